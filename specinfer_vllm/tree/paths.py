# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over the paths of a whole batch of trees, in log2(depth) numpy calls.

A tree is given by `parent_row` [rows] int64: the row of each row's parent, and the own row at a root. Walking some
levels up is then a gather, and the tables for 1, 2, 4, ... levels cover every path (pointer doubling), so nothing here
loops over requests, nodes or levels.

A decoding step handles some hundred rows, where the time goes into the number of numpy calls and not into the rows.
Hence array methods, `np.add.accumulate` and `np.count_nonzero` throughout this folder: the functions np.cumsum,
np.repeat, np.any and their like cost two to five times as much per call.
"""

from __future__ import annotations

import numpy as np


def jump_tables(parent_row: np.ndarray, max_depth: int) -> list[np.ndarray]:
    """Rows 1, 2, 4, ... levels up, stopping at the root: as many tables as paths of `max_depth` need.

    parent_row [rows] int64; each table likewise.
    """
    tables = [parent_row] if max_depth else []
    for _ in range(max_depth.bit_length() - 1):
        tables.append(tables[-1].take(tables[-1]))
    return tables


def path_sum(values: np.ndarray, jumps: list[np.ndarray]) -> np.ndarray:
    """Sum of `values` [rows] over each row's path, the row itself included.

    A root is met more than once, 2^tables - depth times by a row of that depth: its value is 0 unless that is wanted.
    """
    for jump in jumps:
        values = values + values.take(jump)
    return values


def preorder(
    parent_row: np.ndarray, score: np.ndarray, jumps: list[np.ndarray], roots: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Place of each row in its own tree (root = 0), walked depth first, highest score first, ties by row.

    score [rows] float32, never above 0; roots [trees] int64, the roots' rows; sizes [trees] int64, rows of each tree.
    Rows may stand in any order. Returns [rows] int64.
    """
    size = _subtree_sizes(jumps, roots, sizes, len(parent_row))
    descendants = size - 1
    # The siblings' running sum (below) when it comes to a row's children; they are sorted by their parent's row.
    before_children = np.add.accumulate(descendants)
    before_children -= descendants
    size[roots] = 0  # a root is its own parent, thus stands among its own children: it must take no room there
    order = ((parent_row << 32) | descending(score)).argsort(kind="stable")
    room = size.take(order)
    step = np.empty_like(size)
    step[order] = np.add.accumulate(room) - room - before_children.take(parent_row.take(order)) + 1
    step[roots] = 0
    return path_sum(step, jumps)


def descending(score: np.ndarray) -> np.ndarray:
    """Integers [rows] int32 >= 0 that rise as `score` [rows] float32 <= 0 falls: floats are ordered like their bits."""
    return (0 - score).view(np.int32)  # not -score: the bits of -0.0 are a large number


def _subtree_sizes(jumps: list[np.ndarray], roots: np.ndarray, sizes: np.ndarray, rows: int) -> np.ndarray:
    """Rows below each row, itself included [rows] int64: path_sum transposed, each row adds to its ancestors."""
    size = np.ones(rows)
    for jump in jumps:
        size += np.bincount(jump, size, rows)
    size = size.astype(np.int64)
    size[roots] = sizes  # counted too often above, since the tables stop at the roots
    return size


def place_among_equals(values: np.ndarray) -> np.ndarray:
    """How many equal values stand before each [n] int64; values [n] int, not negative."""
    order = values.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=-1))
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))
    return place
