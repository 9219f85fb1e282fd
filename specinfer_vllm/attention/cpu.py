# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend with a masked path for tree rows; all else, chains included, takes vLLM's kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from specinfer_vllm.attention.cpu_kernel import TILE_COLS, Problem, kernel
from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout, layout_of
from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.attention.tree_mask import TreeMask


@dataclass
class TreePass:
    """A mask with what layers of one metadata group derive from it: made by the first layer, reused by the others.

    table    [requests, blocks] int32    physical blocks that hold each request's keys
    """

    mask: TreeMask
    table: torch.Tensor
    biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    problems: dict[tuple, tuple[Problem, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: TreeMask, block_table: torch.Tensor, block_size: int) -> TreePass:
        """The blocks up to the longest request of the mask; what shorter ones have behind their last is not read."""
        num_blocks = min(-(-mask.num_keys // block_size), block_table.shape[1])
        return cls(mask, block_table[mask.batch, :num_blocks].contiguous())

    def bias(self, num_keys: int, window: int | None) -> torch.Tensor:
        """[requests, 1, 1, width, num_keys] float32."""
        key = (num_keys, window)
        if key not in self.biases:
            self.biases[key] = self.mask.bias(num_keys, window)[:, None, None]
        return self.biases[key]

    def problem(self, impl: TreeCPUAttentionImpl, block_size: int) -> Problem:
        """The kernel's arguments, all but the layer's own tensors; layers alike share one, with its workspace."""
        key = (impl.num_heads, impl.num_kv_heads, impl.head_size, block_size, impl.sliding_window, impl.scale)
        if key not in self.problems:
            self.problems[key] = self._problem(impl, block_size)
        return self.problems[key][0]

    def _problem(self, impl: TreeCPUAttentionImpl, block_size: int) -> tuple[Problem, torch.Tensor]:
        mask, threads = self.mask, torch.get_num_threads()
        requests, width = mask.rows.shape
        # A few tasks per thread even out; a split is a block at least.
        splits = min(self.table.shape[1], max(1, -(-4 * threads // (requests * impl.num_kv_heads))))
        tile = width * impl.num_queries_per_kv
        workspace = torch.empty(requests * impl.num_kv_heads * splits * tile * (impl.head_size + 2))
        return Problem(
            table=self.table.data_ptr(),
            rows=mask.padded_rows.data_ptr(),
            prefix=mask.prefix_len.data_ptr(),
            tree_len=mask.tree_len.data_ptr(),
            ancestors=mask.words.data_ptr(),
            position=mask.position.data_ptr(),
            depth=mask.tree_depth.data_ptr(),
            partial=workspace.data_ptr(),
            requests=requests,
            width=width,
            tree=mask.tree_depth.shape[1],
            words=mask.words.shape[-1],
            heads=impl.num_heads,
            kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            block=block_size,
            table_stride=self.table.shape[1],
            splits=splits,
            window=max(impl.sliding_window, 0),
            scale=impl.scale,
            soft_cap=impl.logits_soft_cap,
        ), workspace


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder. The V1 runner hangs a TreePass on what it builds; the V2 runner sets `tree` beforehand."""

    tree: TreeBatch | None = None

    def build(self, common_prefix_len: int, common_attn_metadata, *args, **kwargs) -> CPUAttentionMetadata:
        """As upstream, and the trees of the pass when they are known."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata.tree = None
        if self.tree is not None:
            mask = TreeMask.of_batch(self.tree, common_attn_metadata.num_actual_tokens)
            metadata.tree = TreePass.of(mask, common_attn_metadata.block_table_tensor, self.kv_cache_spec.block_size)
        return metadata


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Tree rows: one masked softmax over prefix and tree, float32 inside, compiled where packing and dtype allow."""

    layout: CpuKvLayout | None = None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs) -> torch.Tensor:
        """As upstream for all rows but the tree's."""
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
        if self.layout is None:
            self.layout = layout_of(layer, kv_cache)
            self.compiled = kernel() if self.fits_kernel(query, kv_cache) else None
        if self.compiled is not None:
            self.kernel_forward(query, kv_cache, tree, output)
        else:
            self.torch_forward(query, kv_cache, tree, output)

    def check(self) -> None:
        """Raise NotImplementedError for a kind of attention the masked path does not know; called before serving."""
        for name in ("alibi_slopes", "sinks"):
            if getattr(self, name) is not None:
                raise NotImplementedError(
                    f"speculative_config.method: 'tree' cannot verify this LLM yet, whose attention uses {name}; "
                    "use another method"
                )

    def fits_kernel(self, query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Whether cpu_kernel.cpp was written for this dtype, packing and shape."""
        floats = query.dtype == kv_cache.dtype == torch.float32 and kv_cache.is_contiguous()
        whole = self.head_size % TILE_COLS == 0 and kv_cache.shape[2] % TILE_COLS == 0
        return floats and whole and self.layout.is_transposed_key

    def kernel_forward(self, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreePass, output: torch.Tensor) -> None:
        """In cpu_kernel.cpp."""
        problem = tree.problem(self, kv_cache.shape[2])
        problem.query, problem.output, problem.cache = query.data_ptr(), output.data_ptr(), kv_cache.data_ptr()
        problem.query_stride, problem.output_stride = query.stride(0), output.stride(0)
        self.compiled(problem)

    def torch_forward(self, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreePass, output: torch.Tensor) -> None:
        """The same in torch, for every packing and dtype; gathers the blocks."""
        keys, values = self.gather(kv_cache, tree.table.to(torch.int64))
        requests, width = tree.mask.rows.shape
        num_blocks, block_size = keys.shape[1], keys.shape[-1]
        group, num_keys = self.num_queries_per_kv, num_blocks * block_size
        rows = tree.mask.rows.view(-1)
        # Query heads of one KV head stand beside each other, so group and rows fold into one matrix dimension.
        queries = query[rows].float().view(requests, width, self.num_kv_heads, group, self.head_size)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(requests, 1, self.num_kv_heads, group * width, self.head_size)
        scores = torch.matmul(queries * self.scale, keys)
        if self.logits_soft_cap:
            scores = torch.tanh(scores / self.logits_soft_cap) * self.logits_soft_cap
        scores = scores.permute(0, 2, 3, 1, 4).reshape(requests, self.num_kv_heads, group, width, num_keys)
        window = self.sliding_window if self.sliding_window > 0 else None
        bias = tree.bias(num_keys, window)
        # Replaced, not added to: unused slots may hold NaN.
        weights = scores.masked_fill_(bias == float("-inf"), float("-inf")).softmax(dim=-1)
        weights = weights.view(requests, self.num_kv_heads, group * width, num_blocks, block_size)
        weights = weights.permute(0, 3, 1, 2, 4)
        result = torch.matmul(weights, values).sum(dim=1)
        result = result.view(requests, self.num_kv_heads, group, width, self.head_size).permute(0, 3, 1, 2, 4)
        valid = tree.mask.valid.view(-1)
        output[rows[valid]] = result.reshape(-1, self.num_heads, self.head_size)[valid].to(output.dtype)

    def gather(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [requests, blocks, kv_heads, head_dim, block_size] and values [.., block_size, head_dim], float32."""
        num_blocks, heads, _, _ = kv_cache.shape
        interior = kv_cache.view(num_blocks, heads, -1)[blocks]
        # A hidden value has weight 0, and 0 * NaN is NaN: what was never written must not count.
        return interior[..., self.layout.key.T].float(), interior[..., self.layout.value].float().nan_to_num_(0.0)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered in the place of CPU_ATTN while a tree is served: vLLM's CPU platform offers no choice of backend."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """The layers' implementation."""
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return TreeCPUAttentionMetadataBuilder
