# SPDX-License-Identifier: Apache-2.0
"""The number of nodes a step is worth."""

import numpy as np
import pytest

from specinfer_vllm.tree.budget import level_pays, worthwhile
from specinfer_vllm.tree.expand import prune_batch
from specinfer_vllm.tree.topology import from_arrays, roots


def batch(rng, requests):
    tokens, parent, score, offsets = [], [], [], [0]
    for _ in range(requests):
        own_parent, own_score = [-1], [0.0]
        for i in range(int(rng.integers(0, 10))):
            own_parent.append(int(rng.integers(0, i + 1)))
            own_score.append(own_score[own_parent[-1]] + np.log(rng.random()))
        tokens += range(len(own_parent))
        parent += own_parent
        score += own_score
        offsets.append(len(tokens))
    return from_arrays(
        offsets=np.array(offsets), tokens=np.array(tokens), parent=np.array(parent), score=np.array(score, np.float32)
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_nodes_has_more_tokens_per_time(seed):
    rng = np.random.default_rng(seed)
    trees, cost = batch(rng, int(rng.integers(1, 6))), float(rng.uniform(0, 0.5))

    def rate(total):
        kept = prune_batch(trees, total, 10)
        gain = np.exp(kept.score[kept.parent >= 0].astype(np.float64)).sum()
        return (kept.num_requests + gain) / (1 + cost * (kept.num_rows - 1))

    best = worthwhile(trees, cost)
    assert rate(best) >= max(rate(total) for total in range(int(trees.num_nodes.sum()) + 1)) - 1e-9


def test_free_rows_take_every_node_and_dear_ones_none():
    trees = batch(np.random.default_rng(1), 4)
    assert worthwhile(trees, 0.0) == trees.num_nodes.sum()
    assert worthwhile(trees, 1e9) == 0
    assert worthwhile(roots([1, 2]), 0.05) == 0


NONE = np.zeros(1)  # nobody else proposes


def test_a_level_is_drafted_as_long_as_its_parents_are_likely_enough():
    sure, doubtful = np.log(np.array([[0.9, 0.05]])), np.log(np.array([[0.05, 0.01]]))
    assert level_pays([sure], [sure], NONE, 0.05, 0.08)
    assert not level_pays([doubtful], [doubtful], NONE, 0.05, 0.08)
    assert not level_pays([sure], [sure], NONE, 0.05, 1.0)
    assert level_pays([doubtful], [doubtful], NONE, 0.05, 0.0)


def test_nothing_left_to_draft_from_ends_the_drafting():
    nothing = np.full((2, 3), -np.inf)
    assert not level_pays([nothing], [nothing], NONE, 0.05, 0.0)


def test_a_level_delays_every_request():
    likely, others = np.log(np.array([[0.9]])), np.log(np.full((20, 1), 0.001))
    assert level_pays([likely], [likely], NONE, 0.01, 0.08)
    batch = np.concatenate([likely, others])
    assert not level_pays([batch], [batch], NONE, 0.01, 0.08)


def test_what_others_have_proposed_is_not_drafted_again():
    sure = np.log(np.array([[0.9, 0.05], [0.5, 0.1]]))
    assert level_pays([sure], [sure], np.array([0.9, 0.0]), 0.05, 0.08)
    assert not level_pays([sure], [sure], np.array([0.9, 0.55]), 0.05, 0.08)
    assert level_pays([sure], [sure], np.array([1.0, 0.0]), 0.05, 0.08)  # one request's cover is not another's


def test_a_level_that_keeps_little_of_its_parents_chance_is_the_last():
    """Ten tokens that are all as likely: the next level will be no surer."""
    flat = np.log(np.full((1, 4), 0.1))
    assert level_pays([flat], [flat], NONE, 0.05, 0.1)
    assert not level_pays([flat, 2 * flat], [flat, 2 * flat], NONE, 0.05, 0.1)
