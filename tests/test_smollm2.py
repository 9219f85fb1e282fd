# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from specinfer_vllm.bench import smollm2

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A model folder of five layers whose weights say which layer they are."""
    path = tmp_path_factory.mktemp("toy")
    weights = {f"model.layers.{layer}.mlp.weight": torch.full((2,), float(layer)) for layer in range(5)}
    safetensors.save_file(weights, path / "one.safetensors")
    safetensors.save_file({"model.embed_tokens.weight": torch.arange(4.0)}, path / "two.safetensors")
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 5, "layer_types": list("abcde")}))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_the_model_answers(model_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_gives_text_back_and_splits_digits(model_path: Path):
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model_path)
    text = "def f(x):\n    return x + 2024  # café 日本 ½ ²³"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode(token) for token in tokenizer(" 2024").input_ids] == [" ", "2", "0", "2", "4"]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1


def test_a_cut_model_holds_the_layers_named_in_that_order(toy: Path, tmp_path: Path):
    small = smollm2.cut(toy, layers=[4, 0, 4], out=tmp_path / "small")
    weights = safetensors.load_file(small / "model.safetensors")
    assert [weights[f"model.layers.{place}.mlp.weight"][0].item() for place in range(3)] == [4, 0, 4]
    assert torch.equal(weights.pop("model.embed_tokens.weight"), torch.arange(4.0)) and len(weights) == 3
    config = json.loads((small / "config.json").read_text())
    assert config == {"num_hidden_layers": 3, "layer_types": ["e", "a", "e"]}
    assert (small / "tokenizer.json").exists()


def test_a_cut_model_loads_like_any_other(ssm_path: Path):
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(ssm_path)
    assert len(model.model.layers) == 4
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 49152)


@pytest.mark.parametrize("layers", [[], [0, 5], [-1]])
def test_layers_that_are_not_there_are_refused(toy: Path, tmp_path: Path, layers: list[int]):
    with pytest.raises(ValueError, match="has the layers 0..4"):
        smollm2.cut(toy, layers=layers, out=tmp_path / "small")
