# SPDX-License-Identifier: Apache-2.0
"""A tuned SSM as one small file: what the LLM has already is left out, matrices are 8-bit whole numbers by row.

Two layers of SmolLM2-135M with a draft vocabulary take 7 MB instead of 142. `assemble` puts the LLM's embeddings back,
and gives the same folder from the same file and LLM.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.train.cut import copy_texts, num_layers, read_weights, save_weights
from specinfer_vllm.train.inputs import InputError, check_disk, check_new, check_new_file
from specinfer_vllm.whole_file import whole_file

SCALE = ".scale"  # of a matrix' rows, under the matrix' own name with this behind it
FORMAT = "specinfer SSM, 1"


def pack(ssm: Path, llm: Path, file: Path) -> None:
    """Write the SSM in folder `ssm` to a new `file`. InputError when `llm` is not the LLM that it was cut from."""
    import torch
    from safetensors.torch import save_file

    check_new_file(file)
    num_layers(ssm)
    num_layers(llm)
    mine, theirs = read_weights(ssm), read_weights(llm, _is_shared)
    shared = {name: _digest(weight) for name, weight in mine.items() if _is_shared(name)}
    for name in shared:
        if name not in theirs or not torch.equal(mine[name], theirs[name]):
            raise InputError(f"{ssm}: its {name} is not that of {llm}; name the LLM it was cut from")
    packed = {DRAFT_VOCAB: torch.from_numpy(np.load(ssm / DRAFT_VOCAB))} if (ssm / DRAFT_VOCAB).is_file() else {}
    for name, weight in mine.items():
        if name in shared:
            continue
        packed[name] = weight
        if weight.dim() == 2:
            scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
            packed[name], packed[name + SCALE] = (weight.float() / scale).round().to(torch.int8), scale
    about = {"format": FORMAT, "config": (ssm / "config.json").read_text(), "shared": json.dumps(shared)}
    with whole_file(file) as draft:
        save_file(packed, draft, metadata=about)


def assemble(file: Path, llm: Path, out: Path) -> None:
    """Make the folder `out` that vLLM and transformers load, from a packed SSM and its LLM's folder.

    InputError for a file that is no packed SSM or another LLM's, or when `out` holds something.
    """
    num_layers(llm)
    check_new(out)
    packed, config, shared = _read(file)
    weights = read_weights(llm, shared.__contains__)
    if shared != {name: _digest(weight) for name, weight in weights.items()}:
        raise InputError(f"{file}: belongs to an LLM with other embeddings than {llm}; name the one it was packed with")
    check_disk(out, sum(weight.nbytes for weight in weights.values()) + 4 * file.stat().st_size)
    vocab = packed.pop(DRAFT_VOCAB, None)
    for name, weight in packed.items():
        if not name.endswith(SCALE):
            scale = packed.get(name + SCALE)
            weights[name] = weight if scale is None else weight.float() * scale
    out.mkdir(parents=True, exist_ok=True)
    save_weights({name: weight.contiguous() for name, weight in weights.items()}, out)
    copy_texts(llm, out)
    if vocab is not None:
        np.save(out / DRAFT_VOCAB, vocab.numpy())
    (out / "config.json").write_text(config)  # last: a folder without it is no model


def _read(file: Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """(weights, configuration, digests of what is the LLM's) of a packed SSM. InputError when it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as source:
            about = source.metadata() or {}
            packed = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118 - not a dict
        if about["format"] != FORMAT:
            raise KeyError("format")
        return packed, about["config"], json.loads(about["shared"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{file}: is no packed SSM ({error}); `specinfer pack` writes them") from None


def _is_shared(name: str) -> bool:
    return "embed_tokens" in name or name.startswith("lm_head")


def _digest(weight: Any) -> str:
    return hashlib.sha256(weight.contiguous().view(-1).numpy(force=True).tobytes()).hexdigest()
