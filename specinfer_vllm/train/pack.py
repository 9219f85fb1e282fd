# SPDX-License-Identifier: Apache-2.0
"""A tuned SSM as one small file: what the LLM has already is left out, matrices are 8-bit whole numbers by row.

Two layers of SmolLM2-135M with a draft vocabulary take 7 MB instead of 142. `assemble` puts the LLM's embeddings back,
and gives the same folder from the same file and LLM.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.train.corpus import check_disk, check_new
from specinfer_vllm.train.cut import NOT_COPIED, num_layers

SCALE = ".scale"  # of a matrix' rows, under the matrix' own name with this behind it
FORMAT = "specinfer SSM, 1"


def pack(ssm: Path, llm: Path, file: Path) -> None:
    """Write the SSM in folder `ssm` to `file`. ValueError when `llm` is not the LLM that it was cut from."""
    import torch
    from safetensors.torch import save_file

    mine, theirs = _weights(ssm), _weights(llm)
    shared = [name for name in mine if _is_shared(name)]
    for name in shared:
        if name not in theirs or not torch.equal(mine[name], theirs[name]):
            raise ValueError(f"{ssm}: its {name} is not that of {llm}; name the LLM it was cut from")
    packed = {DRAFT_VOCAB: torch.from_numpy(np.load(ssm / DRAFT_VOCAB))} if (ssm / DRAFT_VOCAB).is_file() else {}
    for name, weight in mine.items():
        if name in shared:
            continue
        packed[name] = weight
        if weight.dim() == 2:
            scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
            packed[name], packed[name + SCALE] = (weight.float() / scale).round().to(torch.int8), scale
    about = {"format": FORMAT, "config": (ssm / "config.json").read_text(), "shared": json.dumps(shared)}
    draft = file.with_name(f".{file.name}.part")
    save_file(packed, draft, metadata=about)
    draft.replace(file)


def assemble(file: Path, llm: Path, out: Path) -> None:
    """Make the folder `out` that vLLM and transformers load, from a packed SSM and its LLM's folder.

    ValueError for a file that is no packed SSM or another LLM's, or when `out` holds something.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    num_layers(llm)
    check_new(out)
    try:
        with safe_open(file, "pt") as source:
            about = source.metadata() or {}
            packed = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: is no packed SSM ({error})") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{file}: is no packed SSM; `specinfer pack` writes them")
    config, theirs = json.loads(about["config"]), _weights(llm)
    own = json.loads((llm / "config.json").read_text())
    for name in ("vocab_size", "hidden_size"):
        if own.get(name) != config.get(name):
            raise ValueError(f"{file}: has {name} {config.get(name)}, {llm} has {own.get(name)}; it is another LLM's")
    weights = {name: theirs[name] for name in json.loads(about["shared"])}
    check_disk(out, sum(weight.nbytes for weight in weights.values()) + 4 * file.stat().st_size)
    vocab = packed.pop(DRAFT_VOCAB, None)
    for name, weight in packed.items():
        if not name.endswith(SCALE):
            scale = packed.get(name + SCALE)
            weights[name] = weight if scale is None else weight.float() * scale
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, out / "model.safetensors")
    for each in llm.iterdir():
        if each.is_file() and each.suffix != ".safetensors" and each.name not in NOT_COPIED:
            shutil.copy(each, out)
    if vocab is not None:
        np.save(out / DRAFT_VOCAB, vocab.numpy())
    (out / "config.json").write_text(about["config"])  # last: a folder without it is no model


def _is_shared(name: str) -> bool:
    return "embed_tokens" in name or name.startswith("lm_head")


def _weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    num_layers(folder)
    return {name: weight for each in sorted(folder.glob("*.safetensors")) for name, weight in load_file(each).items()}
