# SPDX-License-Identifier: Apache-2.0
"""Compaction as indexed copies: one cache and one request at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(caches: Iterable[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """Move slots source -> destination in every cache [blocks, block_size, ...], of any dtype and strides.

    source, destination as in the kernel's contract. The kernel's cache_geometry holds addresses; here the caches
    themselves stand in its place.
    """
    for cache in caches:
        bits, size = cache.view(BITS[cache.element_size()]), cache.shape[1]  # numbers of 8 bits cannot be indexed
        for src, dst in zip(torch.atleast_2d(source), torch.atleast_2d(destination), strict=True):
            moves = (src >= 0) & (dst >= 0)
            src, dst = src[moves], dst[moves]
            # Read as a whole before it is written: no move reads a slot that an earlier one writes.
            bits[dst // size, dst % size] = bits[src // size, src % size]
