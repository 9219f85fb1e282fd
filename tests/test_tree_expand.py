# SPDX-License-Identifier: Apache-2.0
"""The choice of the best nodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import batches, grown, same_arrays, to_plain, walked

from specinfer_vllm.tree.expand import prune, prune_batch
from specinfer_vllm.tree.topology import depth_first, from_arrays, roots

small = batches()


def _best(nodes, most):
    """The best `most` nodes the obvious way: sorted by score, ties in depth-first order."""
    ranked = sorted(walked(nodes)[1:], key=lambda path: -nodes[path])
    return ranked[:most]


def _limits(data, trees):
    return data.draw(st.lists(st.integers(0, 8), min_size=trees.num_requests, max_size=trees.num_requests))


def _check_kept(trees, kept, chosen):
    kept.validate()
    assert kept.is_depth_first
    for (nodes, draws), (left, left_draws), paths in zip(to_plain(trees), to_plain(kept), chosen, strict=True):
        assert set(left) == {(), *paths}
        assert list(left) == walked(left)
        assert all(left[path] == nodes[path] for path in left)
        assert left_draws == [draw for draw in draws if draw[0] in left]


@given(small, st.data())
def test_prune_keeps_exactly_the_best_nodes(batch, data):
    (trees,) = batch
    limit = _limits(data, trees)
    chosen = [_best(nodes, most) for (nodes, _), most in zip(to_plain(trees), limit, strict=True)]
    assert all(path[:-1] in {(), *paths} for paths in chosen for path in paths)
    _check_kept(trees, prune(trees, limit), chosen)


@given(small, st.integers(0, 20), st.data())
def test_prune_batch_keeps_the_best_nodes_of_the_batch(batch, total, data):
    (trees,) = batch
    limit = _limits(data, trees)
    ranked = [_best(nodes, most) for (nodes, _), most in zip(to_plain(trees), limit, strict=True)]
    scores = [nodes for nodes, _ in to_plain(trees)]
    taken = [0] * len(ranked)
    for _ in range(total):
        open_to = [r for r in range(len(ranked)) if taken[r] < len(ranked[r])]
        if open_to:
            taken[min(open_to, key=lambda r: (-scores[r][ranked[r][taken[r]]], taken[r], r))] += 1
    _check_kept(trees, prune_batch(trees, total, limit), [paths[:n] for paths, n in zip(ranked, taken, strict=True)])


@given(small, st.integers(0, 20), st.data())
def test_prune_batch_never_exceeds_total_nor_limit(batch, total, data):
    (trees,) = batch
    limit = np.array(_limits(data, trees), np.int64)
    kept = prune_batch(trees, total, limit).num_nodes
    assert (kept <= limit).all()
    assert kept.sum() == min(total, np.minimum(trees.num_nodes, limit).sum())


def test_equal_scores_are_shared_out_between_requests():
    trees = from_arrays([0, 4, 8, 12], [0, 1, 2, 3] * 3, [-1, 0, 1, 2] * 3)
    assert prune_batch(trees, 5, 9).num_nodes.tolist() == [2, 2, 1]


def test_large_trees_prune_as_small_ones_do():
    trees = grown(np.random.default_rng(2), [300, 0, 70, 129])
    chosen = [_best(nodes, 65) for nodes, _ in to_plain(trees)]
    _check_kept(trees, prune(trees, 65), chosen)


def test_a_limit_above_the_size_keeps_the_trees():
    trees = grown(np.random.default_rng(3), [6, 9])
    assert same_arrays(prune(trees, 9), depth_first(trees))
    assert same_arrays(prune_batch(trees, 15, 9), depth_first(trees))


def test_nothing_is_left_of_a_request_but_its_root_at_limit_zero():
    trees = grown(np.random.default_rng(4), [6, 9])
    assert same_arrays(prune(trees, 0), roots([7, 7]))
    assert same_arrays(prune_batch(trees, 0, 9), roots([7, 7]))


def test_an_empty_batch_is_pruned_to_an_empty_batch():
    assert prune(roots([]), []).num_requests == prune_batch(roots([]), 3, []).num_requests == 0


@pytest.mark.parametrize("limit", [[1], [1, 2, 3], -1, [0, -1], 1.5])
def test_bad_limits_are_refused_by_name(limit):
    with pytest.raises(ValueError, match="^limit: "):
        prune(roots([1, 2]), limit)
    with pytest.raises(ValueError, match="^limit: "):
        prune_batch(roots([1, 2]), 4, limit)


@pytest.mark.parametrize("total", [-1, [1, 2], 0.5])
def test_bad_totals_are_refused_by_name(total):
    with pytest.raises(ValueError, match="^total: "):
        prune_batch(roots([1, 2]), total, 4)
