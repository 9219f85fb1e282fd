# SPDX-License-Identifier: Apache-2.0
"""llvmlite's library object answers any attribute with a function, `__dict__` included (llvmlite/binding/ffi.py).

vLLM's search for kernels to override (vllm/triton_utils/dispatcher.py, register_kernels) asks every object of every
module for its `__dict__` and fails on that answer, so an engine started in a process that has imported numba, as our
draft-free proposers do, would not come up. The object has no `__dict__`; with this patch it says so.
vLLM >=0.32,<0.34.
"""

from __future__ import annotations

from typing import Any


def disown_dict() -> None:
    """Let llvmlite's library say that it has no `__dict__`; once per process."""
    from llvmlite.binding import ffi

    wrapper = type(ffi.lib)
    original = wrapper.__getattr__
    if hasattr(original, "original"):
        return

    def answer(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return original(self, name)

    answer.original = original  # type: ignore[attr-defined]
    wrapper.__getattr__ = answer
