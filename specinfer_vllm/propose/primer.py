# SPDX-License-Identifier: Apache-2.0
"""Where an LLM's primer lies: rows of its best next tokens, recorded once, for recycling from a request's first step.

A primer is made by `specinfer primer MODEL` from fixed prompts. It is read-only while serving and
holds nothing of any user's, so all requests may share it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from specinfer_vllm.cache_folder import cache_folder
from specinfer_vllm.config import AUTO, NONE

CONTEXT = 4  # tokens of context kept per row, the row's own token included


def primer_path(model: str | Path, revision: str | None = None) -> Path:
    """Where the primer of a model is looked for, whether or not there is one.

    model     folder or hub id, as vLLM is given it; a primer of another model costs acceptance, never correctness
    """
    name = str(Path(model).resolve()) if Path(model).is_dir() else f"{model}@{revision or 'main'}"
    return cache_folder() / "primers" / f"{Path(model).name}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.npz"


def find_primer(wanted: str, model: str | Path, revision: str | None = None) -> Path | None:
    """The file that the option `primer` means: `auto` = the model's own if it was made, `none`, or a path."""
    if wanted == NONE:
        return None
    if wanted != AUTO:
        return Path(wanted)
    try:
        own = primer_path(model, revision)
        return own if own.is_file() else None
    except (OSError, RuntimeError):  # a cache folder that cannot be looked into holds no primer
        return None


def read_primer(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(context [rows, CONTEXT], successors [rows, k], probabilities [rows, k]), whole numbers as SuccessorRows keeps.

    Raises OSError or ValueError, saying what to do, for a file that is no primer of an LLM with this vocabulary.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            recorded = int(file["vocab_size"])
            context, successors, probabilities = (file[name] for name in ("context", "successors", "probabilities"))
        fits = context.ndim == successors.ndim == 2 and successors.shape == probabilities.shape
        fits = fits and len(context) == len(successors) and successors.shape[1] > 0 and context.shape[1] == CONTEXT
        numbers = all(array.dtype.kind in "iu" for array in (context, successors, probabilities))
    except OSError:
        raise
    except Exception as error:  # a damaged archive raises whatever its damage leads to
        raise ValueError(f"{path}: is no primer ({error}); make one with `specinfer primer`") from error
    if not fits or not numbers:
        raise ValueError(f"{path}: is no primer (shapes or types); make one with `specinfer primer`")
    if recorded != vocab_size:
        raise ValueError(
            f"{path}: made for a vocabulary of {recorded} tokens, this LLM has {vocab_size}; "
            "make one of this LLM with `specinfer primer`"
        )
    return context, successors, probabilities
