# SPDX-License-Identifier: Apache-2.0
"""Where an LLM's primer lies: rows of its best next tokens, recorded once, for recycling from a request's first step.

A primer is made by `python -m specinfer_vllm.bench.primer MODEL` from fixed prompts. It is read-only while serving and
holds nothing of any user's, so all requests may share it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from specinfer_vllm.cache_folder import cache_folder


def primer_path(model: str | Path, revision: str | None = None) -> Path:
    """Where the primer of a model is looked for, whether or not there is one.

    model     folder or hub id, as vLLM is given it; a primer of another model costs acceptance, never correctness
    """
    name = str(Path(model).resolve()) if Path(model).is_dir() else f"{model}@{revision or 'main'}"
    return cache_folder() / "primers" / f"{Path(model).name}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.npz"
