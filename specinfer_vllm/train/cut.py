# SPDX-License-Identifier: Apache-2.0
"""A small starting model out of the LLM itself: some of its layers between its own embeddings and head."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.train.corpus import check_disk, check_new

# Files of the LLM's folder that describe its weights, not its texts.
NOT_COPIED = {"config.json", "model.safetensors.index.json", "manifest.json", DRAFT_VOCAB}


def cut(llm: Path, layers: Sequence[int], out: Path, draft_vocab: np.ndarray | None = None) -> None:
    """Write the layers named, in that order, as a Hugging Face folder `out` that vLLM and transformers load.

    llm           folder with safetensors weights, of a model whose layers are called `layers.0`, `layers.1`, ..
    draft_vocab   rising token ids [narrow] that the SSM's head is narrowed to when it drafts; None = all
    Raises ValueError for layers the LLM lacks, a folder without weights, or an `out` that holds something.
    """
    check_layers(llm, layers)
    check_new(out)
    check_disk(out, sum(file.stat().st_size for file in llm.glob("*.safetensors")))
    out.mkdir(parents=True, exist_ok=True)
    _save_weights(llm, layers, out)
    config = json.loads((llm / "config.json").read_text())
    config["num_hidden_layers"] = len(layers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    for file in llm.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in NOT_COPIED:
            shutil.copy(file, out)
    if draft_vocab is not None:
        np.save(out / DRAFT_VOCAB, np.asarray(draft_vocab, np.int32))
    # Last: a folder without it is no model, whatever stopped the work.
    (out / "config.json").write_text(json.dumps(config, indent=2))


def check_layers(llm: Path, layers: Sequence[int]) -> None:
    """ValueError for layers the LLM lacks, or a folder that is no model with safetensors weights."""
    count = num_layers(llm)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise ValueError(f"layers={list(layers)}: {llm} has the layers 0..{count - 1}; name one or more of these")


def num_layers(llm: Path) -> int:
    """Layers of the model in a folder. ValueError when it is no plain text decoder with safetensors weights."""
    if not (llm / "config.json").is_file() or not any(llm.glob("*.safetensors")):
        raise ValueError(f"{llm}: must be the folder of a model with config.json and *.safetensors")
    count = json.loads((llm / "config.json").read_text()).get("num_hidden_layers")
    if not isinstance(count, int):
        raise ValueError(f"{llm}: config.json has no num_hidden_layers; only plain text decoders can be cut")
    return count


def _save_weights(llm: Path, layers: Sequence[int], out: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = {}
    for file in sorted(llm.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            for name in source.keys():  # not a dict
                for renamed in _renamed(name, layers):
                    weights[renamed] = source.get_tensor(name).clone()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _renamed(name: str, layers: Sequence[int]) -> list[str]:
    """The names that a weight gets in the cut model: none for a dropped layer, several for a layer taken twice."""
    found = re.match(r"(.*\blayers\.)(\d+)(\..*)", name)
    if found is None:
        return [name]
    before, layer, after = found.groups()
    return [f"{before}{place}{after}" for place, chosen in enumerate(layers) if chosen == int(layer)]
