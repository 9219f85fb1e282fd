# SPDX-License-Identifier: Apache-2.0
"""CPUWorker builds its runner from a module attribute (vllm/v1/worker/cpu_worker.py).

Upstream's GPU worker has `_make_model_runner` for subclasses; the CPU worker names the class inside `init_device`, so
the name is exchanged for the duration of that call. vLLM >=0.32,<0.34.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specinfer_vllm.patches.patch import Hook

RUNNER = Hook("vllm.v1.worker.cpu_worker", "CPUModelRunner", reason="the CPU worker builds its runner by this name")
RUNNER_V2 = Hook(
    "vllm.v1.worker.cpu.model_runner", "CPUModelRunner", reason="the CPU worker builds its V2 runner by this name"
)


@contextmanager
def runner_class(replacement: type) -> Iterator[None]:
    """Let CPUWorker.init_device build `replacement`.

    Raises HookMissing when the name, or a method that `replacement` overrides, is not as we know it.
    """
    from specinfer_vllm.patches import hooks

    hooks.check(hooks.RUNNER)
    import vllm.v1.worker.cpu_worker as module

    with exchanged(module, replacement):
        yield


@contextmanager
def runner_v2_class(replacement: type) -> Iterator[None]:
    """The same for the V2 runner, which init_device imports from another module."""
    from specinfer_vllm.patches import hooks

    hooks.check((RUNNER_V2, *hooks.RUNNER_V2))
    import vllm.v1.worker.cpu.model_runner as module

    with exchanged(module, replacement):
        yield


@contextmanager
def exchanged(module: Any, replacement: type) -> Iterator[None]:
    """A module whose name CPUModelRunner means `replacement`."""
    original = module.CPUModelRunner
    module.CPUModelRunner = replacement
    try:
        yield
    finally:
        module.CPUModelRunner = original
