# SPDX-License-Identifier: Apache-2.0
"""Trees of a fixed size: what the device merges and keeps is what numpy merges, and a tree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import batches, from_plain, grown, to_plain

from specinfer_vllm.tree.device import DeviceDraws, best_nodes, child_path, first_of, merged
from specinfer_vllm.tree.merge import merge

several = st.integers(1, 4).flatmap(lambda inputs: batches(inputs=inputs, max_nodes=8))
POISON = 77  # in what belongs to draws that do not exist


def as_draws(trees, owner, spare=0):
    """The trees as an SSM or a table would draw them: nodes in the rows' order, draws that do not exist in between."""
    counts = np.diff(trees.offsets) - 1
    shape = len(counts), int(counts.max(initial=0)) + spare + 1
    token, parent, depth = (torch.full(shape, POISON, dtype=torch.int32) for _ in range(3))
    score, path = torch.full(shape, -torch.inf), torch.zeros(shape, dtype=torch.int64)
    parent %= shape[1]
    for request, (first, end) in enumerate(zip(trees.offsets, trees.offsets[1:], strict=False)):
        # The first draw is one that does not exist, so that no draw stands where its node stood.
        for node in range(1, end - first):
            row, above = first + node, int(trees.parent[first + node])
            token[request, node] = int(trees.tokens[row])
            parent[request, node] = above + 1 if above else 0
            depth[request, node] = int(trees.depth[row])
            score[request, node] = float(trees.score[row])
            up = path[request, above] if above else torch.zeros((), dtype=torch.int64)
            path[request, node] = child_path(up, token[request, node])
    return DeviceDraws(token, parent, score, depth, path, torch.full(shape, 1 << owner, dtype=torch.int32))


def one_tree(nodes):
    """A batch of one tree from {sequence: score}, one draw on each node."""
    return from_plain([1], [({(): 0.0} | nodes, [(path, 0) for path in nodes])])


def parts_of(inputs):
    return [as_draws(trees, owner, spare=owner) for owner, trees in enumerate(inputs)]


def plain(draws, request):
    """{sequence: (score, owners)} of the draws that exist, in their order; every one's parent exists before it."""
    found = {0: ()}
    made = {}
    for number in range(1, draws.token.shape[1] + 1):
        score = float(draws.score[request, number - 1])
        if score == -np.inf:
            continue
        above = int(draws.parent[request, number - 1])
        found[number] = (*found[above], int(draws.token[request, number - 1]))
        assert found[number] not in made, "a sequence stands twice"
        if above:
            assert made[found[above]][0] >= score, "a child is likelier than its parent"
        made[found[number]] = score, int(draws.owner[request, number - 1])
    return made


def possible(trees, request):
    """{sequence: score} of the nodes that have a chance."""
    nodes, _ = to_plain(trees)[request]
    return {path: score for path, score in nodes.items() if path and score > -np.inf}


def check_merge(inputs, united):
    """Every sequence of every input is in the merge and nothing else, with its best score and all its owners."""
    expected = merge(inputs)
    for request in range(expected.num_requests):
        made = plain(united, request)
        assert {path: score for path, (score, _) in made.items()} == possible(expected, request)
        holders = [possible(trees, request) for trees in inputs]
        for path, (_, owners) in made.items():
            assert owners == sum(1 << owner for owner, nodes in enumerate(holders) if path in nodes)


@given(several)
def test_the_merge_is_numpys_merge_with_all_owners(inputs):
    check_merge(inputs, merged(parts_of(inputs)))


@pytest.mark.parametrize("nodes", [[40] * 9, [0, 200, 1], [700]])
def test_large_trees_merge_as_small_ones_do(nodes):
    rng = np.random.default_rng(1)
    inputs = [grown(rng, nodes, vocabulary=4) for _ in range(3)]
    check_merge(inputs, merged(parts_of(inputs)))


#        both draw token 4 after the root; the second thinks more of it, and of token 5 below
SHARED = [
    one_tree({(4,): -1.0, (4, 6): -2.0}),
    one_tree({(9,): -3.0, (4,): -0.5, (4, 5): -0.75}),
]


def test_the_first_of_equal_paths_stays_and_takes_the_best_score():
    united = merged(parts_of(SHARED))
    assert plain(united, 0) == {(4,): (-0.5, 3), (4, 6): (-2.0, 1), (9,): (-3.0, 2), (4, 5): (-0.75, 2)}


def test_a_shared_path_that_stands_twice_is_caught():
    """Negative control: paths that are all taken for different ones."""
    parts = [replace(part, path=part.path + owner) for owner, part in enumerate(parts_of(SHARED))]
    with pytest.raises(AssertionError, match="twice"):
        check_merge(SHARED, merged(parts))


def test_lost_owners_and_scores_are_caught():
    """Negative control: only the first proposer's bit; only the first proposer's score."""
    united = merged(parts_of(SHARED))
    with pytest.raises(AssertionError):
        check_merge(SHARED, replace(united, owner=united.owner & 1))
    with pytest.raises(AssertionError):
        check_merge(SHARED, merged([parts_of(SHARED)[0]] * 2))


def test_one_proposer_alone_is_not_touched():
    (part,) = parts_of(SHARED[:1])
    assert merged([part]) is part


@given(several)
def test_the_first_part_that_has_draws_gives_all_of_them(inputs):
    chosen = first_of(parts_of(inputs))
    for request in range(inputs[0].num_requests):
        trees = [possible(trees, request) for trees in inputs]
        first = next((at for at, nodes in enumerate(trees) if nodes), None)
        for at, part in enumerate(chosen):
            assert len(plain(part, request)) == (len(trees[at]) if at == first else 0)


def kept(nodes, request):
    """{sequence: (score, owners)} of the nodes that exist, in order; those that do not stand last and are blank."""
    exists = nodes.token[request] >= 0
    count = int(exists.sum())
    assert exists[:count].all()
    assert (nodes.parent[request, count:] == 0).all() and (nodes.owner[request, count:] == 0).all()
    assert (nodes.score[request, count:] == -torch.inf).all()
    found = [()]
    for node in range(count):
        above = int(nodes.parent[request, node])
        assert above <= node, "a parent stands behind its child"
        found.append((*found[above], int(nodes.token[request, node])))
    values = zip(nodes.score[request].tolist(), nodes.owner[request].tolist(), strict=True)
    return dict(zip(found[1:], values, strict=False))


def check_best(draws, nodes, limit):
    """The likeliest draws that are not too deep, of equal ones the earlier, in the order of drawing."""
    found = best_nodes(draws, nodes, torch.tensor(limit))
    assert all(getattr(found, name).shape == (len(limit), nodes) for name in ("token", "parent", "score", "owner"))
    for request, deepest in enumerate(limit):
        all_draws = plain(draws, request)
        allowed = [path for path in all_draws if len(path) <= deepest]
        best = sorted(allowed, key=lambda path: -all_draws[path][0])[:nodes]
        assert kept(found, request) == {path: all_draws[path] for path in allowed if path in best}
        assert list(kept(found, request)) == [path for path in allowed if path in best]


@given(several, st.integers(1, 20), st.data())
def test_the_best_nodes_are_a_tree(inputs, nodes, data):
    draws = merged(parts_of(inputs))
    requests = len(draws.token)
    check_best(draws, nodes, data.draw(st.lists(st.integers(-2, 5), min_size=requests, max_size=requests)))


def test_equal_scores_keep_the_earlier_draws():
    tree = one_tree({(4,): -1.0, (5,): -1.0, (4, 6): -1.0, (4, 7): -1.0})
    nodes = best_nodes(as_draws(tree, 0), 3, torch.tensor([5]))
    assert nodes.token.tolist() == [[4, 5, 6]] and nodes.parent.tolist() == [[0, 0, 1]]


def test_no_draw_at_all_leaves_placeholders():
    draws = as_draws(from_plain([1, 2], [({(): 0.0}, []), ({(): 0.0}, [])]), 0)
    nodes = best_nodes(draws, 3, torch.tensor([5, 5]))
    assert kept(nodes, 0) == kept(nodes, 1) == {} and nodes.token.shape == (2, 3)


def test_different_paths_have_different_numbers():
    tokens = torch.tensor([*range(200), *range(2**17 - 50, 2**17), 2**31 - 1], dtype=torch.int32)
    numbers = torch.zeros(1, dtype=torch.int64)
    every = [numbers]
    for _ in range(2):
        numbers = child_path(numbers[:, None], tokens[None, :]).flatten()
        every.append(numbers)
    every.append(child_path(numbers[:, None], tokens[None, :20]).flatten())
    every = torch.cat(every)
    assert len(every.unique()) == len(every)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), min_size=2, max_size=6))
def test_numbers_of_paths_are_those_of_the_sequences(sequences):
    def number(sequence, dtype):
        path = torch.zeros((), dtype=torch.int64)
        for token in sequence:
            path = child_path(path, torch.tensor(token, dtype=dtype))
        return int(path)

    numbers = {tuple(sequence): number(sequence, torch.int32) for sequence in sequences}
    assert numbers == {tuple(sequence): number(sequence, torch.int64) for sequence in sequences}
    assert len(set(numbers.values())) == len(numbers)
    assert number([], torch.int32) == 0
