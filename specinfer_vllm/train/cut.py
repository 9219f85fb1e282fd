# SPDX-License-Identifier: Apache-2.0
"""A small starting model out of the LLM itself: some of its layers between its own embeddings and head."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.bench.cache import sha256
from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.train.inputs import InputError, check_disk, check_new, read_json

TEXTS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # tokenizer and templates, not weights of whatever kind
NOT_COPIED = {"config.json", "manifest.json", "tuning.json"}


def cut(llm: Path, layers: Sequence[int], out: Path, draft_vocab: np.ndarray | None = None) -> None:
    """Write the layers named, in that order, as a Hugging Face folder `out` that vLLM and transformers load.

    llm           folder with safetensors weights, of a model whose layers are called `layers.0`, `layers.1`, ..
    draft_vocab   rising token ids [narrow] that the SSM's head is narrowed to when it drafts; None = all
    Raises InputError for layers the LLM lacks, a folder without weights, or an `out` that holds something.
    """
    check_layers(llm, layers)
    check_new(out)
    check_disk(out, sum(file.stat().st_size for file in llm.glob("*.safetensors")))
    config = read_json(llm / "config.json")
    if draft_vocab is not None and draft_vocab.max() >= config.get("vocab_size", 0):
        raise InputError(f"--corpus: holds token {draft_vocab.max()}, unknown to {llm}; use a corpus of its own")
    config["num_hidden_layers"] = len(layers)
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) <= max(layers):
            raise InputError(f"{llm}: config.json names the kind of {len(kinds)} layers only")
        config["layer_types"] = [kinds[layer] for layer in layers]
    weights = _cut_weights(llm, layers)
    out.mkdir(parents=True, exist_ok=True)
    save_weights(weights, out)
    copy_texts(llm, out)
    if draft_vocab is not None:
        np.save(out / DRAFT_VOCAB, np.asarray(draft_vocab, np.int32))
    # Last: a folder without it is no model, whatever stopped the work.
    (out / "config.json").write_text(json.dumps(config, indent=2))


def copy_texts(folder: Path, out: Path) -> None:
    """Copy what a model's folder holds beside weights and configuration: tokenizer and templates."""
    for file in folder.iterdir():
        is_index = file.name.endswith(".index.json")
        if file.is_file() and file.suffix in TEXTS and file.name not in NOT_COPIED and not is_index:
            shutil.copy(file, out)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, or all that are called model..., or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def weight_hashes(folder: Path) -> list[str]:
    """SHA-256 of each of a model's weight files."""
    return [sha256(file) for file in weight_files(folder)]


def read_weights(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """The weights of a model by name, of those wanted only. InputError for a file that is damaged or missing."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as source:
                found |= {name: source.get_tensor(name) for name in source.keys() if wanted(name)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read ({error})") from None
    return found


def save_weights(weights: dict[str, Any], out: Path) -> None:
    """The weights as transformers and vLLM read them."""
    from safetensors.torch import save_file

    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def check_layers(llm: Path, layers: Sequence[int]) -> None:
    """InputError for layers the LLM lacks, or a folder that is no model with safetensors weights."""
    count = num_layers(llm)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise InputError(f"layers={list(layers)}: {llm} has the layers 0..{count - 1}; name one or more of these")


def check_model(folder: Path) -> None:
    """InputError for a folder that is no model with safetensors weights; nothing is looked up elsewhere."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder}: is no folder of a model with config.json and *.safetensors")


def num_layers(llm: Path) -> int:
    """Layers of the model in a folder. InputError when it is no plain text decoder with safetensors weights."""
    check_model(llm)
    count = read_json(llm / "config.json").get("num_hidden_layers")
    if not isinstance(count, int):
        raise InputError(f"{llm}: config.json has no num_hidden_layers; models whose layers are `layers.N` can be cut")
    return count


def _cut_weights(llm: Path, layers: Sequence[int]) -> dict[str, Any]:
    """The weights of the cut model. InputError when a layer is not found under the name `layers.N`."""
    weights = {}
    for name, weight in read_weights(llm, lambda name: bool(_renamed(name, layers))).items():
        for renamed in _renamed(name, layers):
            weights[renamed] = weight.clone()
    for place, layer in enumerate(layers):
        if not any(f"layers.{place}." in name for name in weights):
            raise InputError(f"{llm}: has no weights called layers.{layer}; only layers called `layers.N` can be cut")
    return weights


def _renamed(name: str, layers: Sequence[int]) -> list[str]:
    """The names that a weight gets in the cut model: none for a dropped layer, several for a layer taken twice."""
    found = re.match(r"(.*\blayers\.)(\d+)(\..*)", name)
    if found is None:
        return [name]
    before, layer, after = found.groups()
    return [f"{before}{place}{after}" for place, chosen in enumerate(layers) if chosen == int(layer)]
