# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over the paths of a whole batch of trees, in log2(depth) numpy calls.

A tree is given by `parent_row` [rows] int64: the row of each row's parent, and the own row at a root. Walking k levels up is then a gather, and the
tables for 1, 2, 4, ... levels cover every path (pointer doubling), so nothing here loops over requests, nodes or levels.
"""

from __future__ import annotations

import numpy as np


def jump_tables(parent_row: np.ndarray, max_depth: int) -> list[np.ndarray]:
    """Rows 1, 2, 4, ... levels up, stopping at the root: as many tables as paths of `max_depth` need.

    parent_row [rows] int64; each table likewise.
    """
    tables = []
    for _ in range(max_depth.bit_length()):
        tables.append(parent_row)
        parent_row = parent_row.take(parent_row)
    return tables


def path_sum(values: np.ndarray, jumps: list[np.ndarray]) -> np.ndarray:
    """Sum of `values` [rows] over each row's path, the row itself included. The roots' values must be 0: they are met more than once."""
    for jump in jumps:
        values = values + values.take(jump)
    return values


def preorder(
    parent_row: np.ndarray, score: np.ndarray, jumps: list[np.ndarray], roots: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Place of each row in its own tree [rows] int64 (root = 0) when it is walked depth first, highest score first, ties by row.

    score [rows] float32, never above 0; roots [trees] int64 = the roots' rows; sizes [trees] int64 = rows of each tree. Rows may stand in any order.
    """
    below = _subtree_sizes(jumps, roots, sizes, len(parent_row))
    descendants = below - 1
    before_children = (
        np.cumsum(descendants) - descendants
    )  # what the siblings' running sum has reached when a row's children begin
    below[roots] = 0  # a root is its own parent, thus stands among its own children: it must take no room there
    order = np.argsort((parent_row << 32) | descending(score), kind="stable")
    room = below.take(order)
    step = np.empty_like(below)
    step[order] = np.cumsum(room) - room - before_children.take(parent_row.take(order)) + 1
    step[roots] = 0
    return path_sum(step, jumps)


def descending(score: np.ndarray) -> np.ndarray:
    """Integers [rows] int32 >= 0 that rise as `score` [rows] float32 <= 0 falls: a float's bits are ordered like the float itself."""
    return np.subtract(0, score, dtype=np.float32).view(np.int32)


def _subtree_sizes(jumps: list[np.ndarray], roots: np.ndarray, sizes: np.ndarray, rows: int) -> np.ndarray:
    """Rows below each row, itself included [rows] int64: the transpose of path_sum, each row adding itself to its ancestors."""
    below = np.ones(rows)
    for jump in jumps:
        below += np.bincount(jump, weights=below, minlength=rows)
    below = below.astype(np.int64)
    below[roots] = sizes  # the tables stop at the roots, which are thus counted more than once above
    return below
