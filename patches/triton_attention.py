# SPDX-License-Identifier: Apache-2.0
"""vLLM chooses GPU attention by a member of an Enum, and looks layers' backends up in it by `get_name()`.

vllm/v1/attention/backends/registry.py documents `register_backend` with a new name for third parties. CUSTOM, the ready
member, would need the name CUSTOM, and one engine may want it for something else. Nothing is taken from vLLM, so there
is nothing to give back: the name does nothing until `attention_config.backend` says it. vLLM >=0.32,<0.34.
"""

from __future__ import annotations

from typing import Any

from specinfer_vllm.patches import cpu_attention
from specinfer_vllm.patches.patch import Hook

NAME = "TREE_TRITON"
BACKEND = "specinfer_vllm.attention.triton.TreeTritonAttentionBackend"
REGISTRY_MODULE = "vllm.v1.attention.backends.registry"
TRITON_ATTENTION = "vllm.v1.attention.backends.triton_attn"

# Light to look at: what naming the backend needs.
REGISTRY: tuple[Hook, ...] = (
    cpu_attention.REGISTRY,
    Hook(REGISTRY_MODULE, "AttentionBackendEnum.register", ("cls", "name", "value"), "a name is a member of this Enum"),
)
# What attention/triton.py overrides or calls; importing it imports vLLM's kernels.
HOOKS: tuple[Hook, ...] = (
    *REGISTRY,
    Hook(
        TRITON_ATTENTION,
        "TritonAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        "rows of a tree see their own path only",
    ),
    Hook(
        TRITON_ATTENTION,
        "TritonAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata"),
        "the step's trees travel with the attention metadata, and the other requests get theirs",
    ),
    Hook(
        TRITON_ATTENTION,
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture",
        ("self", "common_attn_metadata"),
        "CUDA graphs of uniform tree batches",
    ),
    Hook(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_cudagraph_support",
        ("cls", "vllm_config", "kv_cache_spec"),
        "no full CUDA graphs where a library reads the trees on the host",
    ),
    Hook(
        TRITON_ATTENTION,
        "TritonAttentionImpl.process_weights_after_loading",
        ("self", "act_dtype"),
        "sinks are kept in the kernel's dtype",
    ),
    Hook(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata.replace",
        ("self",),
        "the metadata of the requests without a tree is cut from the batch's",
    ),
)


def register() -> Any:
    """Let `attention_config.backend` name the tree backend. Returns its member of AttentionBackendEnum.

    Once per process; more calls return the same member. Raises HookMissing.
    """
    for hook in REGISTRY:
        hook.check()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
    member = AttentionBackendEnum[NAME]
    # An Enum pickles by value, and a spawned engine unpickles its configuration before it loads plug-ins.
    member.__reduce_ex__ = lambda protocol: (register, ())
    return member
