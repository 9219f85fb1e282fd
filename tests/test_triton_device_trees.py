# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's trees by slot, ordered in Triton's interpreter: depth first, and no slot knows of another."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from specinfer_vllm.engine.device_trees import DeviceTrees  # noqa: E402
from specinfer_vllm.tree.device import DeviceNodes  # noqa: E402

SLOTS = 6
ARRAYS = ("tokens", "parent", "depth", "ancestors", "owner")


def random_nodes(rng, requests, nodes, fewest=0):
    """Trees of `fewest` to `nodes` nodes in a random order of drawing; siblings differ, scores tie."""
    shape = requests, nodes
    token, parent = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    score, owner = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    for request in range(requests):
        for node in range(rng.integers(fewest, nodes + 1)):
            above = rng.integers(0, node + 1)
            token[request, node], parent[request, node] = 100 * above + node, above
            known = score[request, above - 1] if above else 0.0
            score[request, node] = known - rng.choice([0.0, 0.5, 1.0])
            owner[request, node] = rng.integers(1, 8)
    draw = np.where(token >= 0, np.arange(nodes), nodes)
    return DeviceNodes(*map(torch.from_numpy, (token, parent, score, owner, draw)))


def walked(nodes, request):
    """[(token, row of the parent, path of rows, owner)] of a tree's nodes, likeliest child first, by recursion."""
    token, parent, score, owner = (
        each[request].tolist() for each in (nodes.token, nodes.parent, nodes.score, nodes.owner)
    )
    found = []

    def visit(number, row, path):
        children = [node for node in range(len(token)) if token[node] >= 0 and parent[node] == number]
        for node in sorted(children, key=lambda node: -score[node]):
            place = len(found) + 1
            found.append((token[node], row, [*path, place], owner[node]))
            visit(node + 1, place, [*path, place])

    visit(0, 0, [0])
    return found


def check_slot(trees, slot, expected):
    """A slot's rows are the root, the expected nodes, and behind them rows that hang on the root."""
    nothing = [(-1, 0, [0, row], 0) for row in range(len(expected) + 1, trees.rows)]
    for row, (token, parent, path, owner) in enumerate([(-1, -1, [0], 0), *expected, *nothing]):
        assert int(trees.tokens[slot, row]) == token
        assert int(trees.parent[slot, row]) == parent
        assert int(trees.depth[slot, row]) == len(path) - 1
        assert int(trees.owner[slot, row]) == owner
        bits = sum(int(word) % (1 << 64) << 64 * at for at, word in enumerate(trees.ancestors[slot, row].tolist()))
        assert bits == sum(1 << node for node in path)


def copies(trees):
    return {name: getattr(trees, name).clone() for name in ARRAYS}


@pytest.mark.parametrize(("nodes", "requests"), [(1, 3), (8, 6), (63, 2), (64, 2), (90, 3)])
def test_trees_stand_depth_first_with_the_likeliest_child_first(nodes, requests):
    rng = np.random.default_rng(nodes)
    trees = DeviceTrees(SLOTS, nodes, SLOTS, "cpu")
    drawn = random_nodes(rng, requests, nodes)
    slots = torch.from_numpy(rng.permutation(SLOTS)[:requests])
    tokens = trees.write(slots, drawn)
    for request, slot in enumerate(slots.tolist()):
        check_slot(trees, slot, walked(drawn, request))
    assert torch.equal(tokens, trees.tokens[slots, 1:])


def test_new_trees_and_reset_ones_have_no_nodes():
    trees = DeviceTrees(SLOTS, 70, SLOTS, "cpu")
    for slot in range(SLOTS):
        check_slot(trees, slot, [])
    trees.write(torch.arange(SLOTS), random_nodes(np.random.default_rng(1), SLOTS, 70, fewest=5))
    before = copies(trees)
    trees.reset(torch.tensor([4, 1]))
    for slot in (1, 4):
        check_slot(trees, slot, [])
    for name in ARRAYS:
        assert torch.equal(getattr(trees, name)[[0, 2, 3, 5]], before[name][[0, 2, 3, 5]])


def test_to_write_some_slots_leaves_the_others_alone():
    rng = np.random.default_rng(2)
    trees = DeviceTrees(SLOTS, 8, SLOTS, "cpu")
    trees.write(torch.arange(SLOTS), random_nodes(rng, SLOTS, 8, fewest=3))
    before = copies(trees)
    # Fewer requests than last time: what the buffers held of the others must not come through.
    drawn, slots = random_nodes(rng, 2, 8, fewest=2), [5, 0]
    trees.write(torch.tensor(slots), drawn)
    for request, slot in enumerate(slots):
        check_slot(trees, slot, walked(drawn, request))
    for name in ARRAYS:
        assert torch.equal(getattr(trees, name)[1:5], before[name][1:5])


def test_a_tree_replaces_a_larger_one():
    rng = np.random.default_rng(3)
    trees = DeviceTrees(SLOTS, 20, SLOTS, "cpu")
    trees.write(torch.tensor([2, 3]), random_nodes(rng, 2, 20, fewest=20))
    drawn = random_nodes(rng, 1, 20)
    drawn.token[0, 4:], drawn.parent[0, 4:], drawn.score[0, 4:], drawn.owner[0, 4:] = -1, 0, -torch.inf, 0
    trees.write(torch.tensor([2]), drawn)
    check_slot(trees, 2, walked(drawn, 0))


def test_owners_that_do_not_follow_their_nodes_are_caught():
    """Negative control: owners in the order of drawing, tokens depth first."""
    drawn = DeviceNodes(
        torch.tensor([[5, 6, 7]], dtype=torch.int32),
        torch.tensor([[0, 0, 1]], dtype=torch.int32),
        torch.tensor([[-0.5, -1.0, -2.0]]),
        torch.tensor([[1, 2, 4]], dtype=torch.int32),
        torch.tensor([[0, 2, 5]]),
    )
    trees = DeviceTrees(SLOTS, 3, SLOTS, "cpu")
    assert trees.write(torch.tensor([3]), drawn).tolist() == [[5, 7, 6]]
    assert trees.owner[3].tolist() == [0, 1, 4, 2]
    assert trees.rows_of(1).tolist() == [[0, 1, 3, 2]]  # of the root and the nodes in the order of drawing
    assert drawn.numbers(torch.tensor([[5, 0, 1, 2, 9]])).tolist() == [[3, 1, 0, 2, 0]]
    trees.owner[3, 1:] = drawn.owner[0]
    with pytest.raises(AssertionError):
        check_slot(trees, 3, walked(drawn, 0))
