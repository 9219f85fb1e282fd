# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend with a masked path for tree rows; everything else, chains included, takes vLLM's kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout
from specinfer_vllm.attention.tree_mask import TreeMask


@dataclass
class TreePass:
    """A mask with what layers of one metadata group derive from it: made by the first layer, reused by the others.

    blocks  [requests, blocks] int64    physical blocks that hold each request's keys
    """

    mask: TreeMask
    blocks: torch.Tensor
    biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: TreeMask, block_table: torch.Tensor, block_size: int) -> TreePass:
        """The blocks up to the longest request of the mask; shorter ones read blocks whose keys the bias hides."""
        longest = int(mask.prefix_len.max()) + mask.tree_depth.shape[1]
        num_blocks = min(-(-longest // block_size), block_table.shape[1])
        return cls(mask, block_table[mask.batch, :num_blocks].to(torch.int64))

    def bias(self, num_keys: int, window: int | None) -> torch.Tensor:
        """[requests, 1, 1, width, num_keys] float32."""
        key = (num_keys, window)
        if key not in self.biases:
            self.biases[key] = self.mask.bias(num_keys, window)[:, None, None]
        return self.biases[key]


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder; the runner hangs a TreePass on what it builds."""

    def build(self, *args, **kwargs) -> CPUAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        metadata.tree = None
        return metadata


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Tree rows: gather the blocks, one masked softmax over prefix and tree, float32 inside."""

    layout: CpuKvLayout | None = None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs) -> torch.Tensor:
        tree: TreePass | None = getattr(attn_metadata, "tree", None)
        if tree is None or not tree.mask.covers_all:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if tree is not None:
            self.tree_forward(layer, query, kv_cache, tree, output)
        return output

    def tree_forward(self, layer, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreePass, output) -> None:
        """Overwrite the tree rows of `output`.

        query, output  [rows, heads, head_dim]
        kv_cache       [blocks, kv_heads, block_size, 2 * head_dim], interior as the layout says
        """
        keys, values = self.gather(layer, kv_cache, tree.blocks)
        requests, width = tree.mask.rows.shape
        num_blocks, block_size = keys.shape[1], keys.shape[-1]
        group = self.num_queries_per_kv
        rows = tree.mask.rows.view(-1)
        # Query heads of one KV head stand beside each other, so group and rows fold into one matrix dimension.
        queries = query[rows].float().view(requests, width, self.num_kv_heads, group, self.head_size)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(requests, 1, self.num_kv_heads, group * width, self.head_size)
        scores = torch.matmul(queries * self.scale, keys)
        if self.logits_soft_cap:
            scores = torch.tanh(scores / self.logits_soft_cap) * self.logits_soft_cap
        num_keys = num_blocks * block_size
        scores = scores.permute(0, 2, 3, 1, 4).reshape(requests, self.num_kv_heads, group, width, num_keys)
        window = self.sliding_window if self.sliding_window > 0 else None
        weights = scores.add_(tree.bias(num_keys, window)).softmax(dim=-1)
        weights = weights.view(requests, self.num_kv_heads, group * width, num_blocks, block_size).permute(0, 3, 1, 2, 4)
        result = torch.matmul(weights, values).sum(dim=1)
        result = result.view(requests, self.num_kv_heads, group, width, self.head_size).permute(0, 3, 1, 2, 4)
        valid = tree.mask.valid.view(-1)
        result = result.reshape(requests * width, self.num_heads, self.head_size)
        if requests > 1:
            rows, result = rows[valid], result[valid]
        output[rows] = result.to(output.dtype)

    def gather(self, layer, kv_cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [requests, blocks, kv_heads, head_dim, block_size] and values [.., block_size, head_dim], float32."""
        num_blocks, heads, block_size, _ = kv_cache.shape
        if self.layout is None:
            self.layout = CpuKvLayout.probe(block_size, self.head_size, kv_cache.dtype, layer.isa)
        interior = kv_cache.view(num_blocks, heads, -1)[blocks]
        if self.layout.is_transposed_key:
            keys, values = interior.view(*interior.shape[:3], 2, -1).unbind(dim=3)
            keys = keys.view(*keys.shape[:3], self.head_size, block_size)
        else:
            keys = interior[..., self.layout.key.T]
            values = interior[..., self.layout.value]
        return keys.float(), values.reshape(*values.shape[:3], block_size, self.head_size).float()


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered in the place of CPU_ATTN while a tree is served: vLLM's CPU platform offers no choice of backend."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
