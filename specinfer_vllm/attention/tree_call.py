# SPDX-License-Identifier: Apache-2.0
"""One call of tree attention, for libraries that attend in our kernel's place: its arguments and its masks. Host-free.

The masks are read on the host, so nothing here belongs into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch

from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.attention.tree_mask import TreeMask

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class SeenKeys:
    """The rows of one request, and the keys that any of them sees.

    rows    of query and output
    see     [rows, keys] bool
    block   [keys] int64    physical block of each key
    offset  [keys] int64    its slot there
    """

    rows: slice
    see: torch.Tensor
    block: torch.Tensor
    offset: torch.Tensor

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """K or V of the keys [keys, kv_heads, head_dim], as stored; cache [blocks, block_size, kv_heads, head_dim]."""
        return cache[self.block, self.offset]


@dataclass(frozen=True)
class TreeCall:
    """The arguments of triton_kernels.tree_attention.tree_attention under their names, with ancestors and output given.

    shared  what the layers of one metadata group have in common: the same dict for all calls of a step
    kept    what outlives a step: the same dict for all steps of the group
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    prefix_len: torch.Tensor
    max_rows: int
    max_keys: int
    scale: float
    ancestors: torch.Tensor
    output: torch.Tensor
    tree_start: torch.Tensor | None = None
    depth: torch.Tensor | None = None
    query_depth: torch.Tensor | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    shared: dict[Hashable, object] = field(default_factory=dict)
    kept: dict[Hashable, object] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim."""
        return self.query.shape[1], self.key.shape[2], self.query.shape[2]

    @property
    def block_size(self) -> int:
        """Slots per physical block."""
        return self.key.shape[1]

    def once(self, name: Hashable, make: Callable[[], Kept]) -> Kept:
        """What `make` gives, made by the step's first call that asks for this name."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]  # type: ignore[return-value]

    @property
    def extents(self) -> list[tuple[slice, int]]:
        """Of each request: its rows, and how many keys it has."""
        return self.once("extents", self._extents)

    def _extents(self) -> list[tuple[slice, int]]:
        mask = self._mask()
        keys = (mask.prefix_len + mask.tree_len).tolist()
        rows = [slice(*each) for each in pairwise(self.query_start.tolist())]
        return list(zip(rows, keys, strict=True))

    def visible(self) -> list[tuple[int, slice, torch.Tensor]]:
        """(request, rows, visibility [rows, keys] bool) of every request that has rows."""
        return self.once(("visible", self.window), lambda: list(self._visible()))

    def _visible(self) -> Iterator[tuple[int, slice, torch.Tensor]]:
        mask = self._mask()
        see = mask.visible(mask.num_keys, self.window or None)
        for request, (rows, keys) in enumerate(self.extents):
            if count := rows.stop - rows.start:
                yield request, rows, see[request, :count, :keys]

    def seen(self) -> list[SeenKeys]:
        """Of every request that has rows, what its rows see."""
        return self.once(("seen", self.window, self.block_size), lambda: [self._seen(*each) for each in self.visible()])

    def _seen(self, request: int, rows: slice, see: torch.Tensor) -> SeenKeys:
        index = see.any(0).nonzero().squeeze(1)
        block = self.block_table[request, index // self.block_size].long()
        return SeenKeys(rows, see[:, index], block, index % self.block_size)

    def _mask(self) -> TreeMask:
        return self.once("mask", self._make_mask)

    def _make_mask(self) -> TreeMask:
        tree_start = self.query_start if self.tree_start is None else self.tree_start
        depth = self.depth
        if depth is None:  # read with a window only
            depth = torch.zeros(int(tree_start[-1]), dtype=torch.int32, device=self.query.device)
        batch = TreeBatch(
            num_requests=len(self.prefix_len),
            num_rows=len(self.query),
            max_rows=self.max_rows,
            query_start=self.query_start,
            prefix_len=self.prefix_len,
            ancestors=one_more(self.ancestors),
            depth=one_more(depth),
            tree_start=self.tree_start,
            row_depth=None if self.query_depth is None else one_more(self.query_depth),
            max_slots=int(tree_start.diff().max()),
        )
        return TreeMask.of_batch(batch, len(self.query))


def one_more(values: torch.Tensor) -> torch.Tensor:
    """With an entry of zeros behind: a request without rows at the end of the batch begins there."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])
