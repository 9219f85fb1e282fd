# SPDX-License-Identifier: Apache-2.0
"""Moves the K/V of accepted nodes to the slots of the path: all layers, K, V and scales in one launch.

In    source, destination  [requests, width] int64      physical slots (block * block_size + offset), or [moves]: one
                                                        request's; negative = no move; source == destination = no move
      geometry             [caches, FIELDS] int64       one row per cache tensor, see cache_geometry: address, distances
                                                        in bytes, where the bytes of a slot stand; any dtype and layout
In/out                     the cache tensors behind the addresses

A slot's bytes are `pieces` runs of `piece_bytes` each: one in NHD, one per head in HND. A program takes a request, a
cache and a column of these bytes, and goes through the moves in order, reading four of them before it writes them. A
thread reads and writes the same bytes of every slot, so moves need no barrier among each other.

Contract: within a request no move reads a slot that an earlier move writes. A path's moves keep it, since sources rise
and a destination never lies behind its source. Slots of different requests differ.
Undefined: a destination that occurs twice in a request; slots past the cache. Tensors must outlive the geometry.
Bytes: 2 * moves * bytes of a slot over all caches; requests whose path is in place read their slot numbers and stop.
Products of blocks and distances are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FIELDS = 6  # address, bytes between blocks, between slots, between pieces, pieces, bytes per piece
MAX_COLUMNS = 512  # units that a program moves of each slot


@dataclass(frozen=True)
class CacheGeometry:
    """Where the slots of some cache tensors stand, for compact.

    table       [caches, FIELDS] int64, on the caches' device
    block_size  slots per block
    unit        bytes that are moved as one number: 1, 2, 4 or 8; divides every address, distance and piece
    columns     units of the largest slot
    """

    table: torch.Tensor
    block_size: int
    unit: int
    columns: int


def cache_geometry(caches: Iterable[torch.Tensor]) -> CacheGeometry:
    """Geometry of cache tensors [blocks, block_size, ...]: K and V of all layers, and their scales if they have any.

    Each may have its own dtype, trailing shape and strides; a slot's elements must be runs at one distance. Built once:
    it copies to the device. Raises ValueError: no caches, block sizes or devices that differ, a slot that is not
    runs at one distance (give K and V as two tensors).
    """
    caches = list(caches)
    if len({(cache.shape[1], cache.device) for cache in caches}) != 1:
        raise ValueError("caches: give at least one; all must have one block size and stand on one device")
    rows = [_geometry_row(cache) for cache in caches]
    unit = 8
    while any(field % unit for row in rows for field in (*row[:4], row[5])):
        unit //= 2
    return CacheGeometry(
        table=torch.tensor(rows, dtype=torch.int64).to(caches[0].device),
        block_size=caches[0].shape[1],
        unit=unit,
        columns=max(pieces * size for *_, pieces, size in rows) // unit,
    )


def _geometry_row(cache: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    size = cache.element_size()
    runs: list[tuple[int, int]] = []  # (length, stride) from the outside in, merged where they join up
    for length, stride in zip(cache.shape[2:], cache.stride()[2:], strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1] == length * stride:
            runs[-1] = (runs[-1][0] * length, stride)
        else:
            runs.append((length, stride))
    if not runs or runs[-1][1] != 1:
        runs.append((1, 1))
    if len(runs) > 2:
        raise ValueError(
            f"caches: a slot of shape {tuple(cache.shape[2:])} and strides {cache.stride()[2:]} is not runs at one"
            " distance; give K and V as two tensors"
        )
    pieces, distance = runs[0] if len(runs) == 2 else (1, 0)
    blocks, slots = cache.stride()[:2]
    return cache.data_ptr(), blocks * size, slots * size, distance * size, pieces, runs[-1][0] * size


@triton.jit
def _slot_pair(source, destination, request, move, width, source_stride, destination_stride):
    """Source and destination of a move, -1 where there is none."""
    inside = move < width
    src = tl.load(source + request * source_stride + move, mask=inside, other=-1)
    dst = tl.load(destination + request * destination_stride + move, mask=inside, other=-1)
    moves = (src >= 0) & (dst >= 0) & (src != dst)
    return tl.where(moves, src, -1), dst


@triton.jit
def _place(base, slot, within, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Addresses of a slot's columns, in units."""
    return base + (slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride) + within


@triton.jit(do_not_specialize=["width", "source_stride", "destination_stride"])
def _compact(
    source,
    destination,
    geometry,
    unit_like,  # pointer of the unit's type, for the type only
    width,
    source_stride,
    destination_stride,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (columns, cache, request): the request's moves in order."""
    cache = geometry + tl.program_id(1) * FIELDS
    request = tl.program_id(2).to(tl.int64)
    base = tl.load(cache).to(unit_like.dtype)
    block_stride = tl.load(cache + 1) // UNIT
    slot_stride = tl.load(cache + 2) // UNIT
    piece_stride = tl.load(cache + 3) // UNIT
    piece = (tl.load(cache + 5) // UNIT).to(tl.int32)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < tl.load(cache + 4).to(tl.int32) * piece
    within = (column // piece).to(tl.int64) * piece_stride + column % piece

    for move in range(0, width, 4):
        src0, dst0 = _slot_pair(source, destination, request, move, width, source_stride, destination_stride)
        src1, dst1 = _slot_pair(source, destination, request, move + 1, width, source_stride, destination_stride)
        src2, dst2 = _slot_pair(source, destination, request, move + 2, width, source_stride, destination_stride)
        src3, dst3 = _slot_pair(source, destination, request, move + 3, width, source_stride, destination_stride)
        if tl.maximum(tl.maximum(src0, src1), tl.maximum(src2, src3)) >= 0:
            # Vectors, since the interpreter does not broadcast a scalar comparison.
            on0 = tl.where(inside, src0, -1) >= 0
            on1 = tl.where(inside, src1, -1) >= 0
            on2 = tl.where(inside, src2, -1) >= 0
            on3 = tl.where(inside, src3, -1) >= 0
            row0 = tl.load(_place(base, src0, within, block_stride, slot_stride, BLOCK_SIZE), mask=on0)
            row1 = tl.load(_place(base, src1, within, block_stride, slot_stride, BLOCK_SIZE), mask=on1)
            row2 = tl.load(_place(base, src2, within, block_stride, slot_stride, BLOCK_SIZE), mask=on2)
            row3 = tl.load(_place(base, src3, within, block_stride, slot_stride, BLOCK_SIZE), mask=on3)
            tl.store(_place(base, dst0, within, block_stride, slot_stride, BLOCK_SIZE), row0, mask=on0)
            tl.store(_place(base, dst1, within, block_stride, slot_stride, BLOCK_SIZE), row1, mask=on1)
            tl.store(_place(base, dst2, within, block_stride, slot_stride, BLOCK_SIZE), row2, mask=on2)
            tl.store(_place(base, dst3, within, block_stride, slot_stride, BLOCK_SIZE), row3, mask=on3)


UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(geometry: CacheGeometry, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Move slots source -> destination in every cache; tensors as in the contract above. No host sync, no allocation.

    Raises ValueError for other shapes or dtypes than the contract's.
    """
    if source.shape != destination.shape or source.dim() not in (1, 2):
        raise ValueError(f"source, destination: {tuple(source.shape)}, {tuple(destination.shape)} must be one shape")
    for name, slots in (("source", source), ("destination", destination)):
        if slots.dtype != torch.int64 or slots.stride(-1) != 1:
            raise ValueError(f"{name}: {slots.dtype} must be int64 and contiguous in its last dimension")
    if not source.numel():
        return
    source, destination = source.view(-1, source.shape[-1]), destination.view(-1, source.shape[-1])
    requests, width = source.shape
    columns = min(MAX_COLUMNS, triton.next_power_of_2(geometry.columns))
    _compact[(triton.cdiv(geometry.columns, columns), len(geometry.table), requests)](
        source,
        destination,
        geometry.table,
        geometry.table.view(UNITS[geometry.unit]),
        width,
        source.stride(0),
        destination.stride(0),
        FIELDS=FIELDS,
        BLOCK_SIZE=geometry.block_size,
        UNIT=geometry.unit,
        COLUMNS=columns,
        num_warps=4 if columns > 128 else 1,
    )
