# SPDX-License-Identifier: Apache-2.0
"""The CPU platform returns CPU_ATTN whatever the user asks for (vllm/platforms/cpu.py), but its path can be overridden.

vllm/v1/attention/backends/registry.py documents overriding a built-in backend. It is done in the workers of engines
that serve a tree and undone at their end, so that a plain engine in the same process gets vLLM's own.
vLLM >=0.32,<0.34.
"""

from __future__ import annotations

from specinfer_vllm.patches.patch import Hook

BACKEND = "specinfer_vllm.attention.cpu.TreeCPUAttentionBackend"
REGISTRY = Hook(
    "vllm.v1.attention.backends.registry",
    "register_backend",
    ("backend",),
    "tree attention takes the place of CPU_ATTN, the only backend that the CPU platform gives out",
)
CACHED = Hook(
    "vllm.v1.attention.selector",
    "_cached_get_attn_backend.cache_clear",
    reason="the selector remembers the backend it chose; it must choose again",
)


def register() -> None:
    """Let layers built from now on take the tree backend. Raises HookMissing."""
    REGISTRY.check()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    forget_choice()


def unregister() -> None:
    """Give CPU_ATTN back to vLLM for layers built from now on."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CPU_ATTN.clear_override()
    forget_choice()


def forget_choice() -> None:
    """The selector caches its choice; layers built next must choose again."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
