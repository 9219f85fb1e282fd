# SPDX-License-Identifier: Apache-2.0
"""Where this project keeps what it builds for a user: one answer for kernels, primers, models and prompts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SPECINFER_CACHE, else specinfer-vllm in the user's own cache folder; it need not exist."""
    own = os.environ.get("SPECINFER_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer-vllm"
