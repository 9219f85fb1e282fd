# SPDX-License-Identifier: Apache-2.0
"""Static shapes: steps counted one by one, and the search against trying everything."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer_vllm.tree.shape import BestTrees, Ranks, best_forest, tokens_per_step
from specinfer_vllm.tree.static import StaticTree, num_nodes


def random_ranks(seed: int, texts: int = 20, likely: float = 0.6) -> Ranks:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, texts)
    rank = rng.geometric(likely, lengths.sum()) - 1
    return Ranks(rank, np.concatenate([[0], np.cumsum(lengths)]))


def steps_one_by_one(ranks: Ranks, paths) -> int:
    steps, nodes = 0, set(paths)
    for start, end in itertools.pairwise(ranks.offsets):
        steps += start < end  # the prompt's own pass gives the first token
        text = ranks.rank[start + 1 : end].tolist()
        while text:
            level = 0
            while level < len(text) - 1 and tuple(text[: level + 1]) in nodes:
                level += 1
            text = text[level + 1 :]
            steps += 1
    return steps


@st.composite
def static_trees(draw, most: int = 12) -> StaticTree:
    nodes = [()]
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.sampled_from(nodes))
        nodes.append((*parent, sum(node[:-1] == parent for node in nodes[1:])))
    return StaticTree.of_paths(nodes[1:])


EXPANSIONS = [(), (1,), (3,), (1, 1, 1), (4, 2, 1), (1, 3), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_an_expansion_as_paths_is_the_same_shape(expansion):
    paths = [path for depth in range(len(expansion)) for path in itertools.product(*map(range, expansion[: depth + 1]))]
    tree = StaticTree.of_paths(reversed(paths))
    assert tree == StaticTree.of_expansion(expansion) and tree.expansion == expansion
    assert tree.paths == paths and tree.num_nodes == len(paths) and tree.depth == len(expansion)
    assert tree.num_read == num_nodes(expansion[:-1])
    ranks = random_ranks(2)
    assert (ranks.accepted(tree) == ranks.accepted(expansion)).all()


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_steps_are_those_of_decoding(expansion):
    ranks = random_ranks(1)
    expected = len(ranks.rank) / steps_one_by_one(ranks, StaticTree.of_expansion(expansion).paths)
    assert ranks.tokens_per_step(expansion) == pytest.approx(expected)


@given(static_trees())
def test_any_tree_is_walked_as_decoding_goes(tree):
    ranks = random_ranks(3)
    assert ranks.tokens_per_step(tree) == pytest.approx(len(ranks.rank) / steps_one_by_one(ranks, tree.paths))


@given(static_trees(), st.randoms())
def test_paths_may_stand_in_any_order(tree, random):
    paths = tree.paths
    random.shuffle(paths)
    assert StaticTree.of_paths(paths) == tree
    assert tree.num_read == len({path[:-1] for path in paths} - {()})


def test_ranks_that_were_not_told_apart_are_never_accepted():
    ranks = Ranks(np.full(10, 4), np.array([0, 10]), widest=4)
    assert ranks.tokens_per_step((8,)) == ranks.tokens_per_step(StaticTree.of_expansion((8,))) == 1
    assert best_forest([ranks], 8, 2, np.ones(9), draft_cost=[0.0]).nodes == 0


def test_no_text_at_all_takes_no_steps():
    assert Ranks(np.zeros(0, int), np.zeros(3, np.int64)).tokens_per_step((2, 1)) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("row", [0.0, 0.02, 0.1])
def test_the_search_is_no_worse_than_the_best_expansion(seed, row):
    ranks = random_ranks(seed, texts=100, likely=0.4 + 0.08 * seed)
    cost = 1 + row * np.arange(13)
    found = best_forest([ranks], 12, 4, cost, draft_cost=[0.05])
    every = [
        shape for depth in range(5) for shape in itertools.product(range(1, 13), repeat=depth) if num_nodes(shape) <= 12
    ]
    best = max(ranks.tokens_per_step(each) / (cost[num_nodes(each)] + 0.05 * len(each)) for each in every)
    assert found.nodes <= 12 and found.trees[0].depth <= 4
    assert found.speed >= 0.98 * best


def test_nodes_that_cost_too_much_are_not_drafted():
    ranks = random_ranks(3)
    assert best_forest([ranks], 8, 4, 1 + 5.0 * np.arange(9), draft_cost=[0.0]).nodes == 0


SMALL = 6


def all_trees(nodes: int) -> list[StaticTree]:
    """Every tree of that many nodes whose children are the first ones of their parent."""

    def forests(count: int, rank: int, parent: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        if count == 0:
            return [[]]
        node = (*parent, rank)
        return [
            [node, *below, *beside]
            for size in range(count)
            for below in forests(size, 0, node)
            for beside in forests(count - 1 - size, rank + 1, parent)
        ]

    return [StaticTree.of_paths(paths) for paths in forests(nodes, 0, ())]


EVERY = [each for nodes in range(SMALL + 1) for each in all_trees(nodes)]


def expected_tokens(tree: StaticTree, chance) -> float:
    chance = [*chance, *[None] * SMALL]
    if any(chance[rank] is None for path in tree.paths for rank in path):
        return -math.inf
    return 1 + sum(math.prod(chance[rank] for rank in path) for path in tree.paths)


def test_there_are_as_many_small_trees_as_catalan_counted():
    assert np.bincount([each.num_nodes for each in EVERY]).tolist() == [1, 1, 2, 5, 14, 42, 132]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 4))
def test_the_dynamic_programme_finds_the_best_of_all_small_trees(chance, levels):
    found = BestTrees.of(np.array(chance), SMALL, levels)
    for nodes, depth in itertools.product(range(SMALL + 1), range(levels + 1)):
        every = [expected_tokens(each, chance) for each in EVERY if each.num_nodes == nodes and each.depth <= depth]
        best = max(every, default=-math.inf)
        assert found.tokens[depth, nodes] == pytest.approx(best)
        if best == -math.inf:
            with pytest.raises(ValueError, match=f"no tree of {depth} levels has {nodes}"):
                found.tree(nodes, depth)
            continue
        tree = found.tree(nodes, depth)
        assert tree.num_nodes == nodes and tree.depth <= depth
        assert expected_tokens(tree, chance) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("row", [0.0, 0.02, 0.1])
def test_the_best_tree_comes_near_the_best_of_all(seed, row):
    ranks = random_ranks(seed, texts=60, likely=0.4 + 0.1 * seed)
    cost = 1 + row * np.arange(SMALL + 1)
    found = best_forest([ranks], SMALL, 4, cost, draft_cost=[0.05])
    speeds = [ranks.tokens_per_step(each) / (cost[each.num_nodes] + 0.05 * each.depth) for each in EVERY]
    assert found.nodes <= SMALL and found.trees[0].depth <= 4
    assert found.tokens_per_step == ranks.tokens_per_step(found.trees[0])
    assert found.speed == pytest.approx(found.tokens_per_step / (cost[found.nodes] + 0.05 * found.trees[0].depth))
    assert found.speed >= 0.97 * max(speeds)


def test_a_tree_is_found_without_any_text():
    assert best_forest([Ranks(np.zeros(0, int), np.zeros(1, np.int64))], 8, 4, np.ones(9), draft_cost=[0.1]).nodes == 0


# -- several SSMs ------------------------------------------------------------------------------------------------------


def test_an_ssm_that_never_helps_gets_no_nodes():
    ranks = random_ranks(5)
    useless = Ranks(np.full(len(ranks.rank), 99), ranks.offsets)
    found = best_forest([ranks, useless, ranks], 8, 4, 1 + 0.02 * np.arange(9), [0.05] * 3)
    assert [tree.num_nodes > 0 for tree in found.trees] in ([True, False, False], [False, False, True])


def test_ssms_that_know_different_texts_share_the_nodes():
    offsets = np.array([0, 60, 120])
    halves = [np.repeat(each, 60) for each in ([0, 99], [99, 0])]
    found = best_forest([Ranks(half, offsets) for half in halves], 6, 3, 1 + 0.05 * np.arange(7), [0.02, 0.02])
    assert [tree.expansion for tree in found.trees] == [(1, 1, 1)] * 2
    accepted = np.max([Ranks(half, offsets).accepted((1, 1, 1)) for half in halves], axis=0)
    assert found.tokens_per_step == tokens_per_step(accepted, offsets) > 3
