# SPDX-License-Identifier: Apache-2.0
"""Which nodes a tree has: the expansion <k1,...,km> (SpecInfer, section 3) and the choice of the best nodes by path score."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from specinfer_vllm.tree.paths import descending
from specinfer_vllm.tree.topology import TokenTrees, as_integers, depth_first, keep_rows, per_request

MAX_NODES = 1 << 16


def parse_expansion(expansion: str | Iterable[int]) -> tuple[int, ...]:
    """The children per node at each depth, from "1,1,3,1", "<1,1,3,1>", "[1,1,3,1]" or a list of integers.

    ValueError: not integers of at least 1, none at all, or a tree of more than MAX_NODES nodes.
    """
    levels = _split(expansion) if isinstance(expansion, str) else expansion
    try:
        widths = tuple(_integer(level) for level in levels)
    except (TypeError, ValueError):
        raise ValueError(
            f"expansion: {expansion!r} is no list of integers; give the children per node at each depth, such as 1,1,3,1"
        ) from None
    if not widths:
        raise ValueError(
            f"expansion: {expansion!r} is empty; give the children per node for at least one depth, such as 1,1,3,1"
        )
    if min(widths) < 1:
        raise ValueError(
            f"expansion: {expansion!r} has {min(widths)} children at depth {widths.index(min(widths)) + 1}; give at least 1"
        )
    if len(widths) > MAX_NODES or num_nodes(widths) > MAX_NODES:
        raise ValueError(f"expansion: {expansion!r} has more than {MAX_NODES} nodes; give fewer or smaller levels")
    return widths


def level_sizes(expansion: Iterable[int]) -> list[int]:
    """Nodes at each depth from 1 on: the running products of the expansion."""
    sizes, size = [], 1
    for width in expansion:
        size *= width
        sizes.append(size)
    return sizes


def num_nodes(expansion: Iterable[int]) -> int:
    """Nodes of the full tree, the root not counted."""
    return sum(level_sizes(expansion))


def static_topology(expansion: Iterable[int]) -> np.ndarray:
    """Parents [1 + nodes] int32 of the full tree in depth-first order, -1 at the root (row 0). ValueError as parse_expansion."""
    block = np.full(1, -1, np.int32)
    for width in reversed(parse_expansion(expansion)):
        size = len(block)
        below = np.tile(block, width) + np.repeat(1 + size * np.arange(width), size).astype(np.int32)
        below[::size] = 0
        block = np.concatenate((np.full(1, -1, np.int32), below))
    return block


def prune(trees: TokenTrees, limit: npt.ArrayLike) -> TokenTrees:
    """Each request's `limit` best nodes by score, depth-first; ties go to the earlier row.

    limit [requests] int or one int for all. A score never rises along a path, so the best nodes always form a tree.
    ValueError: negative limit, or not one per request.
    """
    trees = depth_first(trees)
    limit = per_request("limit", limit, trees.num_requests)
    if (trees.num_nodes <= limit).all():
        return trees
    order, rank = _ranking(trees)
    return _kept(trees, order, rank <= np.repeat(limit, trees.rows_per_request))


def prune_batch(trees: TokenTrees, total: int, limit: npt.ArrayLike) -> TokenTrees:
    """The batch's `total` best nodes by score, at most limit[r] of request r, depth-first (AdaServe's rule for the shared part of a budget).

    total int; limit [requests] int or one int for all. Ties go to the node that ranks higher in its own request, then to the earlier request, so that
    equal scores are shared out. ValueError: negative or ill-shaped total or limit.
    """
    trees = depth_first(trees)
    limit = per_request("limit", limit, trees.num_requests)
    total = _count("total", total)
    if np.minimum(trees.num_nodes, limit).sum() <= total:
        return prune(trees, limit)
    order, rank = _ranking(trees)
    chosen = rank == 0
    open_to = np.flatnonzero((rank > 0) & (rank <= np.repeat(limit, trees.rows_per_request)))
    key = (descending(trees.score.take(order.take(open_to))).astype(np.int64) << 32) | rank.take(open_to)
    chosen[open_to.take(np.argsort(key, kind="stable")[:total])] = True
    return _kept(trees, order, chosen)


def _ranking(trees: TokenTrees) -> tuple[np.ndarray, np.ndarray]:
    """(order, rank) [rows] int64: rows request after request, best first, and the place of each in its request; the root has place 0."""
    order = np.argsort((trees.request << 32) | descending(trees.score), kind="stable")
    return order, trees.local


def _kept(trees: TokenTrees, order: np.ndarray, chosen: np.ndarray) -> TokenTrees:
    """The trees' rows order[chosen]."""
    keep = np.zeros(trees.num_rows, bool)
    keep[order[chosen]] = True
    return keep_rows(trees, keep)


def _count(name: str, value: int) -> int:
    number = as_integers(name, value, np.int64)
    if number.ndim or number < 0:
        raise ValueError(f"{name}: {value!r} must be one integer, 0 or more")
    return int(number)


def _split(text: str) -> list[str]:
    text = text.strip()
    if text[:1] + text[-1:] in ("<>", "[]", "()"):
        text = text[1:-1]
    return text.split(",") if text.strip() else []


def _integer(value: object) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool):
        raise TypeError("a truth value is no count")
    return operator.index(value)
