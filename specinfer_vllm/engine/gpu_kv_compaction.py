# SPDX-License-Identifier: Apache-2.0
"""KV compaction on a GPU: every layer of a KV cache group in one launch, whatever its layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specinfer_vllm.triton_kernels.kv_compact import cache_geometry, compact
from specinfer_vllm.triton_kernels.tree_verify import Walk


class GpuKvCompaction:
    """Compaction over layers whose caches have one block size; reads their addresses once."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """caches: per layer vLLM's logical view [blocks, kv_heads, block_size, content], any strides.

        Raises ValueError for a layout whose slots are not runs of bytes at one distance.
        """
        self.caches = list(caches)  # the geometry holds addresses only
        self.geometry = cache_geometry([cache.transpose(1, 2) for cache in self.caches])
        self.block_size = self.geometry.block_size

    def compact(self, walked: Walk, prefix_len: torch.Tensor, block_table: torch.Tensor) -> None:
        """Move the K/V of the accepted paths into place, in one launch.

        prefix_len   [requests] int32            committed tokens in front of each root
        block_table  [requests, blocks] int32    of the layers' KV cache group
        """
        compact(self.geometry, walked.rows, prefix_len, block_table)
