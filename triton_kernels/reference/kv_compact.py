# SPDX-License-Identifier: Apache-2.0
"""Compaction as indexed copies: one cache and one request at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(
    caches: Iterable[torch.Tensor], path: torch.Tensor, prefix_len: torch.Tensor, block_table: torch.Tensor
) -> None:
    """Move the K/V of each path into place in every cache [blocks, block_size, ...], of any dtype and strides.

    path, prefix_len, block_table as in the kernel's contract. The kernel's cache_geometry holds addresses; here the
    caches themselves stand in its place.
    """
    for cache in caches:
        bits, size = cache.view(BITS[cache.element_size()]), cache.shape[1]  # numbers of 8 bits cannot be indexed
        for rows, prefix, blocks in zip(path, prefix_len.tolist(), block_table, strict=False):
            rows = rows[rows >= 0]
            source = prefix + rows - rows[:1]
            destination = prefix + torch.arange(len(rows), device=rows.device)
            # Read as a whole before it is written: no move reads a slot that an earlier one writes.
            moved = bits[blocks[source // size].long(), source % size]
            bits[blocks[destination // size].long(), destination % size] = moved
