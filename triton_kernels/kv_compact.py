# SPDX-License-Identifier: Apache-2.0
"""Moves the K/V of accepted nodes to the slots of the path: all layers, K, V and scales in one launch.

In    path          [requests, width] int64         rows of the walk (Walk.rows): the root, then the accepted nodes; -1
                                                    behind. A request's rows stand side by side
      prefix_len    [requests] int32                committed tokens in front of the root
      block_table   [requests, max_blocks] int32    blocks of each request's sequence; more rows do no harm, row stride
                                                    free
      geometry      [caches, FIELDS] int64          one row per cache tensor, see cache_geometry: address, distances in
                                                    bytes, where the bytes of a slot stand; any dtype and layout
In/out              the cache tensors behind the addresses

The K/V of the path's entry l stand at index prefix_len + path[l] - path[0] of the request's sequence, and move to index
prefix_len + l; nothing moves where these are one. Index i stands in slot i % block_size of block block_table[i //
block_size].

A slot's bytes are `pieces` runs of `piece_bytes` each: one in NHD, one per head in HND. A program takes a request, a
cache and a column of these bytes, and goes through the moves in order, reading four of them before it writes them. A
thread reads and writes the same bytes of every slot, so moves need no barrier among each other.

Contract: a path's rows rise, since parents stand before children. So no move reads a slot that an earlier move of its
request writes: sources rise, and a destination never lies behind its source. Slots of different requests differ.
Undefined: a path that does not rise; blocks past the cache. Tensors must outlive the geometry. Not read: entries of the
block table that hold no move's source or destination.
Bytes: 2 * moves * bytes of a slot over all caches; requests whose path is in place read it and stop. Products of rows,
blocks and distances are 64-bit.
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
def _moved(path, root, level, width):
    """The node that moves to a level of the path, counted from the root; -1 = none."""
    row = tl.load(path + level, mask=level < width, other=-1)
    node = (row - root).to(tl.int32)
    return tl.where((row >= 0) & (node != level), node, -1)


@triton.jit
def _place(base, blocks, index, node, within, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Addresses of the columns, in units, at an index of the sequence; node = the one that moves, -1 = none."""
    block = tl.load(blocks + index // BLOCK_SIZE, mask=node >= 0, other=0).to(tl.int64)
    return base + (block * block_stride + index % BLOCK_SIZE * slot_stride) + within


@triton.jit(do_not_specialize=["width", "table_stride"])
def _compact(
    path,
    prefix_len,
    block_table,
    geometry,
    unit_like,  # pointer of the unit's type, for the type only
    width,
    table_stride,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (columns, cache, request): the request's moves in order."""
    cache = geometry + tl.program_id(1) * FIELDS
    request = tl.program_id(2).to(tl.int64)
    path += request * width
    blocks = block_table + request * table_stride
    root = tl.load(path)
    prefix = tl.load(prefix_len + request)
    base = tl.load(cache).to(unit_like.dtype)
    block_stride = tl.load(cache + 1) // UNIT
    slot_stride = tl.load(cache + 2) // UNIT
    piece_stride = tl.load(cache + 3) // UNIT
    piece = (tl.load(cache + 5) // UNIT).to(tl.int32)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < tl.load(cache + 4).to(tl.int32) * piece
    within = (column // piece).to(tl.int64) * piece_stride + column % piece

    for level in range(0, width, 4):
        node0 = _moved(path, root, level, width)
        node1 = _moved(path, root, level + 1, width)
        node2 = _moved(path, root, level + 2, width)
        node3 = _moved(path, root, level + 3, width)
        if tl.maximum(tl.maximum(node0, node1), tl.maximum(node2, node3)) >= 0:
            # Vectors, since the interpreter does not broadcast a scalar comparison.
            on0 = tl.where(inside, node0, -1) >= 0
            on1 = tl.where(inside, node1, -1) >= 0
            on2 = tl.where(inside, node2, -1) >= 0
            on3 = tl.where(inside, node3, -1) >= 0
            from0 = _place(base, blocks, prefix + node0, node0, within, block_stride, slot_stride, BLOCK_SIZE)
            from1 = _place(base, blocks, prefix + node1, node1, within, block_stride, slot_stride, BLOCK_SIZE)
            from2 = _place(base, blocks, prefix + node2, node2, within, block_stride, slot_stride, BLOCK_SIZE)
            from3 = _place(base, blocks, prefix + node3, node3, within, block_stride, slot_stride, BLOCK_SIZE)
            into0 = _place(base, blocks, prefix + level, node0, within, block_stride, slot_stride, BLOCK_SIZE)
            into1 = _place(base, blocks, prefix + level + 1, node1, within, block_stride, slot_stride, BLOCK_SIZE)
            into2 = _place(base, blocks, prefix + level + 2, node2, within, block_stride, slot_stride, BLOCK_SIZE)
            into3 = _place(base, blocks, prefix + level + 3, node3, within, block_stride, slot_stride, BLOCK_SIZE)
            row0 = tl.load(from0, mask=on0)
            row1 = tl.load(from1, mask=on1)
            row2 = tl.load(from2, mask=on2)
            row3 = tl.load(from3, mask=on3)
            tl.store(into0, row0, mask=on0)
            tl.store(into1, row1, mask=on1)
            tl.store(into2, row2, mask=on2)
            tl.store(into3, row3, mask=on3)


UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(geometry: CacheGeometry, path: torch.Tensor, prefix_len: torch.Tensor, block_table: torch.Tensor) -> None:
    """Move the K/V of each path into place in every cache; tensors as in the contract above.

    No host sync, no allocation. Raises ValueError that names the tensor at fault.
    """
    _check(path, prefix_len, block_table)
    if not path.numel():
        return
    requests, width = path.shape
    columns = min(MAX_COLUMNS, triton.next_power_of_2(geometry.columns))
    _compact[(triton.cdiv(geometry.columns, columns), len(geometry.table), requests)](
        path,
        prefix_len,
        block_table,
        geometry.table,
        geometry.table.view(UNITS[geometry.unit]),
        width,
        block_table.stride(0),
        FIELDS=FIELDS,
        BLOCK_SIZE=geometry.block_size,
        UNIT=geometry.unit,
        COLUMNS=columns,
        num_warps=4 if columns > 128 else 1,
    )


def _check(path: torch.Tensor, prefix_len: torch.Tensor, block_table: torch.Tensor) -> None:
    """Raise ValueError for shapes and dtypes that the kernel does not take. Looks at no contents."""
    if path.dim() != 2 or path.dtype != torch.int64 or not path.is_contiguous():
        raise ValueError(f"path: {tuple(path.shape)} {path.dtype} must be [requests, width] int64, contiguous")
    requests = len(path)
    if prefix_len.shape != (requests,) or prefix_len.dtype != torch.int32 or not prefix_len.is_contiguous():
        raise ValueError(f"prefix_len: {tuple(prefix_len.shape)} {prefix_len.dtype} must be [{requests}] int32")
    shape, dtype = tuple(block_table.shape), block_table.dtype
    if len(shape) != 2 or shape[0] < requests or dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table: {shape} {dtype} must be [{requests} or more, blocks] int32, rows dense")
