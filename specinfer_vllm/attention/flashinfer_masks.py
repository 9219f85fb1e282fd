# SPDX-License-Identifier: Apache-2.0
"""Tree attention through FlashInfer: its paged prefill with a custom mask, planned once per step and kind of layer.

BatchPrefillWithPagedKVCacheWrapper.plan takes row and page offsets (int32, on the host), the pages of all requests one
after the other, how much of each last page is used, and the mask of all requests as one flat bool tensor, each [rows,
keys] row by row; run takes a layer's queries and its paged K and V, of any strides but the last. Planning compiles the
kernel when it is new, which needs nvcc. Read in FlashInfer 0.7.0.post1, which vLLM 0.32 brings, and 0.7.4. Host-free.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch

from specinfer_vllm.attention.tree_call import TreeCall

WORKSPACE = 394 << 20  # bytes for the results of split keys, as many as vLLM gives it
MAX_MASK = 2**31 - 1  # it counts a mask's entries in 32 bits


def attend(call: TreeCall) -> None:
    """Write call.output. Raises ValueError for masks that FlashInfer cannot count."""
    if not call.visible():
        return
    wrapper = call.once(("flashinfer", kind(call)), lambda: planned(call))
    rows = slice(0, call.visible()[-1][1].stop)
    call.output[rows] = wrapper.run(call.query[rows], (call.key, call.value))


def kind(call: TreeCall) -> tuple[Any, ...]:
    """What a plan depends on beside the trees: layers alike share one."""
    return call.heads, call.block_size, call.query.dtype, call.scale, call.window, call.soft_cap


def planned(call: TreeCall) -> Any:
    """The wrapper of this kind of layer, which outlives the step, ready for the step's trees."""
    import flashinfer

    name = "flashinfer", kind(call)
    if name not in call.kept:
        workspace = workspace_of(call.query.device)
        # Masks are taken by this kernel only; "auto" comes to the same.
        call.kept[name] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    heads, kv_heads, head_dim = call.heads
    wrapper: Any = call.kept[name]
    wrapper.plan(
        *pages(call),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        page_size=call.block_size,
        custom_mask=flat_mask(call),
        sm_scale=call.scale,
        logits_soft_cap=call.soft_cap,
        q_data_type=call.query.dtype,
        kv_data_type=call.key.dtype,
    )
    return wrapper


def pages(call: TreeCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the requests that have rows, int32: offsets of their rows and of their pages, the pages, and what is used of
    each last one. The pages stand on the device, all else on the host.
    """
    size, seen = call.block_size, call.visible()
    keys = [see.shape[1] for _, _, see in seen]
    counts = [-(-count // size) for count in keys]
    tables = [call.block_table[request, :count] for (request, _, _), count in zip(seen, counts, strict=True)]
    rows = [0, *(each.stop for _, each, _ in seen)]
    last = [(count - 1) % size + 1 for count in keys]
    offsets, used, page_offsets = (
        torch.tensor(values, dtype=torch.int32) for values in (rows, last, [0, *accumulate(counts)])
    )
    return offsets, page_offsets, torch.cat(tables), used


def flat_mask(call: TreeCall) -> torch.Tensor:
    """[sum of rows x keys] bool of the requests that have rows."""
    size = sum(see.numel() for _, _, see in call.visible())
    if size > MAX_MASK:
        raise ValueError(
            f"speculative_config.tree_attention: 'flashinfer' takes masks of up to {MAX_MASK} entries and this step's"
            f" trees need {size}; use tree_attention='triton', or lower num_nodes or max_num_seqs"
        )
    return torch.cat([see.flatten() for _, _, see in call.visible()])


@functools.cache
def workspace_of(device: torch.device) -> torch.Tensor:
    """One for all wrappers: calls on a device follow each other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
