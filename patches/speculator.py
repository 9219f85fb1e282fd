# SPDX-License-Identifier: Apache-2.0
"""The V2 runner builds its speculator by a function in its own module (vllm/v1/worker/gpu/model_runner.py).

`init_speculator` chooses by the method's name, which is a closed list; the name is exchanged while the tree runner is
built. vLLM >=0.32,<0.34.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specinfer_vllm.patches.patch import Hook

SPECULATOR = Hook(
    "vllm.v1.worker.gpu.model_runner",
    "init_speculator",
    ("vllm_config", "device", "req_states"),
    "the V2 runner builds its speculator by this name",
)


@contextmanager
def speculator_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Let the V2 runner that is built meanwhile take build(vllm_config, device, req_states). Raises HookMissing."""
    SPECULATOR.check()
    import vllm.v1.worker.gpu.model_runner as module

    original = module.init_speculator
    module.init_speculator = build
    try:
        yield
    finally:
        module.init_speculator = original
