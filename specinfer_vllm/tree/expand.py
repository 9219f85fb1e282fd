# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a tree are kept: the best by score."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specinfer_vllm.tree.checks import INT64, as_integers, per_request
from specinfer_vllm.tree.paths import descending, place_among_equals
from specinfer_vllm.tree.topology import TokenTrees, depth_first, keep_rows


def prune(trees: TokenTrees, limit: npt.ArrayLike) -> TokenTrees:
    """Each request's `limit` best nodes by score, depth-first; ties go to the node that stands first in that order.

    limit [requests] int or one int for all. A score never rises along a path, so the best nodes always form a tree.
    ValueError: negative limit, or not one per request.
    """
    limit = per_request("limit", limit, trees.num_requests)
    trees = depth_first(trees)
    if not np.count_nonzero(trees.num_nodes > limit):
        return trees
    return _kept(trees, _ranking(trees)[_within(trees, limit)])


def prune_batch(trees: TokenTrees, total: int, limit: npt.ArrayLike) -> TokenTrees:
    """The batch's `total` best nodes by score, at most limit[r] of request r, depth-first.

    AdaServe's rule for the shared part of a budget. total int; limit [requests] int or one int for all. Ties go to the
    node that ranks higher in its own request, then to the earlier request, so that equal scores are shared out.
    ValueError: negative or ill-shaped total or limit.
    """
    total = _count("total", total)
    limit = per_request("limit", limit, trees.num_requests)
    trees = depth_first(trees)
    if np.minimum(trees.num_nodes, limit).sum() <= total:
        return prune(trees, limit)
    ranking, place = _ranking(trees), trees.local
    contenders = (_within(trees, limit) & (place > 0)).nonzero()[0]
    key = (descending(trees.score.take(ranking.take(contenders))).astype(np.int64) << 32) | place.take(contenders)
    best = contenders.take(key.argsort(kind="stable")[:total])
    return _kept(trees, ranking.take(np.concatenate((best, trees.offsets[:-1]))))


def narrow(trees: TokenTrees, width: int) -> TokenTrees:
    """The first `width` children of every node and what hangs on them; width 1 leaves one chain per request.

    In depth-first order the first children are the likeliest. ValueError: width below 1.
    """
    if (width := _count("width", width)) < 1:
        raise ValueError("width: 0 children per node leave no tree; give at least 1")
    nodes = (trees.parent >= 0).nonzero()[0]
    keep = np.ones(trees.num_rows, bool)
    keep[nodes] = place_among_equals(trees.parent_row.take(nodes)) < width
    for _ in range(trees.max_depth):
        keep &= keep.take(trees.parent_row)
    return keep_rows(trees, keep)


def _ranking(trees: TokenTrees) -> np.ndarray:
    """Rows [rows] int64 request after request, best first: entry i has place trees.local[i], the root place 0."""
    return ((trees.request << 32) | descending(trees.score)).argsort(kind="stable")


def _within(trees: TokenTrees, limit: np.ndarray) -> np.ndarray:
    """Which entries of the ranking [rows] bool are a root or one of its request's `limit` best."""
    return trees.local <= limit.repeat(trees.rows_per_request)


def _kept(trees: TokenTrees, rows: np.ndarray) -> TokenTrees:
    keep = np.zeros(trees.num_rows, bool)
    keep[rows] = True
    return keep_rows(trees, keep)


def _count(name: str, value: int) -> int:
    number = as_integers(name, value, INT64)
    if number.ndim or number < 0:
        raise ValueError(f"{name}: {value!r} must be one integer, 0 or more")
    return int(number)
