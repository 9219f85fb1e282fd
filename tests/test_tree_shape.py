# SPDX-License-Identifier: Apache-2.0
"""Static shapes: steps counted one by one, and the search against trying everything."""

import itertools

import numpy as np
import pytest

from specinfer_vllm.tree.expand import num_nodes
from specinfer_vllm.tree.shape import Ranks, best_expansion


def random_ranks(seed: int, texts: int = 20, likely: float = 0.6) -> Ranks:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, texts)
    rank = rng.geometric(likely, lengths.sum()) - 1
    return Ranks(rank, np.concatenate([[0], np.cumsum(lengths)]))


def steps_one_by_one(ranks: Ranks, expansion) -> int:
    steps = 0
    for start, end in itertools.pairwise(ranks.offsets):
        text = list(ranks.rank[start:end])
        while text:
            level = 0
            while level < len(expansion) and level < len(text) - 1 and text[level] < expansion[level]:
                level += 1
            text = text[level + 1 :]
            steps += 1
    return steps


@pytest.mark.parametrize("expansion", [(), (1,), (3,), (1, 1, 1), (4, 2, 1), (1, 3), (2, 2, 2, 2, 2)])
def test_steps_are_those_of_decoding(expansion):
    ranks = random_ranks(1)
    expected = len(ranks.rank) / steps_one_by_one(ranks, expansion)
    assert ranks.tokens_per_step(expansion) == pytest.approx(expected)


def test_no_text_at_all_takes_no_steps():
    assert Ranks(np.zeros(0, int), np.zeros(3, np.int64)).tokens_per_step((2, 1)) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("row", [0.0, 0.02, 0.1])
def test_the_search_comes_near_the_best_of_all(seed, row):
    ranks = random_ranks(seed, likely=0.4 + 0.08 * seed)
    cost = 1 + row * np.arange(13)
    found = best_expansion(ranks, 12, 4, cost, draft_cost=0.05)
    every = [
        shape for depth in range(5) for shape in itertools.product(range(1, 13), repeat=depth) if num_nodes(shape) <= 12
    ]
    best = max(ranks.tokens_per_step(each) / (cost[num_nodes(each)] + 0.05 * len(each)) for each in every)
    assert found.nodes <= 12 and len(found.expansion) <= 4
    assert found.speed >= 0.98 * best


def test_nodes_that_cost_too_much_are_not_drafted():
    ranks = random_ranks(3)
    assert best_expansion(ranks, 8, 4, 1 + 5.0 * np.arange(9), draft_cost=0.0).expansion == ()
