# SPDX-License-Identifier: Apache-2.0
"""Moves the K/V of accepted nodes to the slots of the path, so that the cache looks as if they were decoded one by one.

Depth-first trees with the likeliest child first leave most paths in place already; then nothing is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from specinfer_vllm.verify.walk import Accepted

if TYPE_CHECKING:
    from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout
    from specinfer_vllm.triton_kernels.tree_verify import Walk


def moves(accepted: Accepted | Walk, roots: torch.Tensor, root_slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots that the accepted nodes leave and those they move to, index in the request's sequence.

    roots      [requests] int64           row of each root
    root_slot  [requests] int64, int32    sequence index of the root, the row behind it has the next one, and so on
    Returns the request of each move [moves] and source, destination [2, moves]; empty when every path is in place.
    Destinations never lie behind their sources, since parents stand before children.
    """
    level = torch.arange(accepted.rows.shape[1], device=accepted.rows.device)
    node = accepted.rows - roots[:, None]
    request, column = torch.nonzero((accepted.rows >= 0) & (node != level), as_tuple=True)
    source = root_slot[request] + node[request, column]
    return request, torch.stack([source, root_slot[request] + column])


def llm_layers(kv_cache_config: Any, context: Mapping[str, Any], drafts: Set[str]) -> list[tuple[int, list[Any]]]:
    """The LLM's attention layers that own a cache, by KV cache group and shape of their cache.

    context  vLLM's static_forward_context: layers by their names
    drafts   names of the SSMs' layers, which re-read the path instead
    """
    shapes: dict[tuple, list[Any]] = {}
    for group, spec in enumerate(kv_cache_config.kv_cache_groups):
        for name in spec.layer_names:
            layer = context[name]
            if name in drafts or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            shapes.setdefault((group, tuple(layer.kv_cache.shape)), []).append(layer)
    return [(group, layers) for (group, _), layers in shapes.items()]


class CpuKvCompaction:
    """Compaction over the layers of a CPU KV cache; index tensors are shared by all layers of one shape."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: CpuKvLayout) -> None:
        """caches: per layer [blocks, kv_heads, block_size, 2 * head_dim], contiguous, one shape for all.

        Raises ValueError when shapes differ or a cache is not contiguous: flat indices would not hold.
        """
        shapes = {tuple(cache.shape) for cache in caches}
        if len(shapes) != 1 or not all(cache.is_contiguous() for cache in caches):
            raise ValueError(f"KV compaction: layers must be contiguous and of one shape, found {sorted(shapes)}")
        self.flat = [cache.view(-1) for cache in caches]
        _, self.heads, self.block_size, content = shapes.pop()
        self.interior = self.block_size * content
        self.elements = torch.cat([layout.key, layout.value], dim=1)
        self.head_offsets = torch.arange(self.heads) * self.interior

    def indices(self, slots: torch.Tensor) -> torch.Tensor:
        """Flat element indices [slots * heads * 2 * head_dim] int64 of physical slots (block * block_size + offset)."""
        block, offset = slots // self.block_size, slots % self.block_size
        start = (block * self.heads * self.interior)[:, None] + self.head_offsets
        return (start[:, :, None] + self.elements[offset][:, None, :]).view(-1)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy physical slots source -> destination, int64 of one shape; all are read before one is written."""
        if not source.numel():
            return
        read, write = self.indices(source.flatten()), self.indices(destination.flatten())
        for cache in self.flat:
            cache.index_copy_(0, write, cache.index_select(0, read))

    def compact(self, walked: Walk, prefix_len: torch.Tensor, block_table: torch.Tensor) -> None:
        """As GpuKvCompaction.compact."""
        request, places = moves(walked, walked.rows[:, 0], prefix_len)
        self.move(*physical_slots(block_table, request, places, self.block_size))


def physical_slots(
    block_table: torch.Tensor, request: torch.Tensor, index: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Sequence indices to physical slots. block_table [requests, blocks]; request [n], index [n] or [k, n] int64."""
    return block_table[request, index // block_size].to(torch.int64) * block_size + index % block_size
