# SPDX-License-Identifier: Apache-2.0
"""The SSMs that come with the package."""

import json

import numpy as np
import pytest

from specinfer_vllm.bench import smollm2
from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.propose.draft_vocab import check_ids

MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def folders(model_path):
    return smollm2.ssms()


def test_each_is_a_small_file_and_has_its_place_in_the_card():
    card, files = (smollm2.PACKED / "README.md").read_text(), sorted(smollm2.PACKED.glob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        assert file.stat().st_size <= MOST_BYTES and f"`{file.name}`" in card
    for needed in ("Licence:", "## Recipe", "## Data"):
        assert needed in card


def test_they_are_put_together_for_this_llm(folders, model_path):
    llm = json.loads((model_path / "config.json").read_text())
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        assert config["vocab_size"] == llm["vocab_size"] and config["num_hidden_layers"] <= 3
        assert len(check_ids(folder / DRAFT_VOCAB, llm["vocab_size"])) == 6144


def test_the_first_one_knows_what_the_llm_says(folders, model_path):
    """A text as the LLM writes them; an SSM that was damaged or assembled wrongly has nothing of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specinfer_vllm.train.tune import Student

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    llm = AutoModelForCausalLM.from_pretrained(model_path)
    text = llm.generate(**asked, max_new_tokens=64, do_sample=False)
    student, first = Student(folders[0]).eval(), asked["input_ids"].shape[1]
    places = torch.arange(first - 1, text.shape[1] - 1)
    with torch.no_grad():
        logits = student(text, torch.tensor([text.shape[1]]), places)
    likeliest = student.ids[logits.topk(3, dim=1).indices]
    hits = (likeliest == text[0, places + 1][:, None]).any(dim=1).float().mean()
    assert np.isfinite(logits).all() and hits > 0.5
