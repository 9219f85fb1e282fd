# SPDX-License-Identifier: Apache-2.0
"""Building tree arrays in Triton's interpreter against numpy's TokenTrees and a slow walk up every path."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import chain, comb, random_tree, star  # noqa: E402

from specinfer_vllm.tree.topology import from_arrays  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_build as reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_build import OrderedTrees, TreeArrays, build, depth_first, words_for  # noqa: E402

RNG = np.random.default_rng(11)
FORESTS = {
    "one root": [chain(1)],
    "roots": [chain(1)] * 5,
    "chain": [chain(9)],
    "star": [star(30)],
    "comb": [comb(31)],
    "forest": [random_tree(RNG, 17), [], chain(1), star(6), comb(20), random_tree(RNG, 40), []],
    "no rows at all": [[], []],
    "63, 64, 65": [random_tree(RNG, 63), random_tree(RNG, 64), random_tree(RNG, 65)],
    "129": [random_tree(RNG, 129), chain(3)],
    "1024": [random_tree(RNG, 1024), star(1024)],
    "chain of 200": [chain(200)],
}


def inputs(trees):
    start = torch.tensor(np.cumsum([0, *(len(tree) for tree in trees)]), dtype=torch.int32)
    parent = torch.tensor([p for tree in trees for p in tree], dtype=torch.int32)
    prefix = torch.from_numpy(RNG.integers(0, 90, len(trees))).to(torch.int32)
    return parent, start, prefix


def walked(trees, words):
    """Depths [rows] and bits [rows, words] by walking up from every row, in Python integers."""
    depths, bits = [], []
    for tree in trees:
        for node in range(len(tree)):
            path = [node]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            number = sum(1 << j for j in path)
            depths.append(len(path) - 1)
            bits.append(np.frombuffer(number.to_bytes(8 * words, "little"), np.int64))
    return torch.tensor(depths, dtype=torch.int32), torch.from_numpy(np.array(bits).reshape(-1, words))


@pytest.mark.parametrize("name", FORESTS)
def test_depths_positions_and_bits_are_those_of_the_paths(name):
    trees = FORESTS[name]
    parent, start, prefix = inputs(trees)
    most = max(len(tree) for tree in trees)
    built = build(parent, start, prefix, max_rows=most)
    depth, bits = walked(trees, words_for(most))
    counts = (start[1:] - start[:-1]).long()
    assert torch.equal(built.depth, depth)
    assert torch.equal(built.ancestors, bits)
    assert torch.equal(built.position, prefix.long().repeat_interleave(counts) + depth)
    assert built.slot is None


def test_the_arrays_are_those_of_token_trees():
    trees = [random_tree(RNG, 17), chain(4), star(90), chain(1)]
    parent, start, prefix = inputs(trees)
    numpy_trees = from_arrays(start.numpy(), np.arange(len(parent)), parent.numpy())
    built = build(parent, start, prefix, max_rows=90)
    assert np.array_equal(built.depth.numpy(), numpy_trees.depth)
    assert np.array_equal(built.ancestors.numpy(), numpy_trees.ancestors)


def sevens(rows, words):
    """Buffers to write to: a word more than needed, and rows to spare."""
    shapes = {"depth": ((rows,), torch.int32), "position": ((rows,), torch.int64)}
    shapes |= {"ancestors": ((rows, words), torch.int64), "slot": ((rows,), torch.int64)}
    return TreeArrays(**{name: torch.full(shape, 7, dtype=dtype) for name, (shape, dtype) in shapes.items()})


@pytest.mark.parametrize("name", ["one root", "forest", "63, 64, 65"])
def test_the_torch_reference_gives_the_same(name):
    parent, start, prefix = inputs(FORESTS[name])
    rows, most = len(parent), int((start[1:] - start[:-1]).max())
    tokens, score = torch.arange(rows, dtype=torch.int32), torch.from_numpy(RNG.integers(0, 4, rows)).float()
    score[score == 0] = torch.nan
    table = torch.from_numpy(RNG.permutation(len(prefix) * 80)).view(-1, 80).to(torch.int32)
    others = {"max_rows": most, "block_table": table, "block_size": 16}
    made = depth_first(tokens, parent, score, start, prefix, **others)
    expected = reference.depth_first(tokens, parent, score, start, prefix, **others)
    for field in ("tokens", "parent", "source"):
        assert torch.equal(getattr(made, field), getattr(expected, field))
    pairs = [(made.arrays, expected.arrays)]
    for buffers in (lambda: None, lambda: sevens(rows + 3, words_for(most) + 1)):
        pairs.append([each(parent, start, prefix, **others, out=buffers()) for each in (build, reference.build)])
    for one, other in pairs:
        for field in ("depth", "position", "ancestors", "slot"):
            assert torch.equal(getattr(one, field), getattr(other, field))


def preorder(tree, score):
    """Nodes of one tree in depth-first order, highest score first, the slow way."""
    children = {node: [] for node in range(-1, len(tree))}
    for node in sorted(range(len(tree)), key=lambda node: (-score[node], node)):
        children[tree[node]].append(node)
    stack, order = children[-1][::-1], []
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]][::-1]
    return order


def shuffled(trees):
    """The same trees in another order that still has parents first: level by level."""
    renamed = []
    for tree in trees:
        depth = [0] * len(tree)
        for node in range(1, len(tree)):
            depth[node] = depth[tree[node]] + 1
        order = sorted(range(len(tree)), key=lambda node: (depth[node], RNG.random()))
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        renamed.append([place[tree[node]] for node in order])
    return renamed


@pytest.mark.parametrize("name", FORESTS)
def test_depth_first_order_has_the_likeliest_child_first(name):
    trees = shuffled(FORESTS[name])
    parent, start, prefix = inputs(trees)
    most, rows = max(len(tree) for tree in trees), len(parent)
    tokens = torch.arange(rows, dtype=torch.int32) + 1000
    score = torch.from_numpy(RNG.integers(0, 4, rows)).float()  # many equal ones
    table = torch.from_numpy(RNG.permutation(len(trees) * 80)).view(-1, 80).to(torch.int32)
    built = depth_first(tokens, parent, score, start, prefix, max_rows=most, block_table=table, block_size=16)
    order, moved = [], []
    for tree, first in zip(trees, start.tolist(), strict=False):
        mine = preorder(tree, score[first : first + len(tree)].tolist())
        place = {node: i for i, node in enumerate(mine)} | {-1: -1}
        order += [first + node for node in mine]
        moved.append([place[tree[node]] for node in mine])
    assert built.source.tolist() == order
    assert built.tokens.tolist() == [1000 + row for row in order]
    assert built.parent.tolist() == [above for tree in moved for above in tree]
    expected = build(built.parent, start, prefix, max_rows=most, block_table=table, block_size=16)
    for field in ("depth", "position", "ancestors", "slot"):
        assert torch.equal(getattr(built.arrays, field), getattr(expected, field))


@pytest.mark.parametrize("parents", [[-1, 2, 1, 3], [-1, -7, 0, 5], [0, 0, 1, 2]])
def test_links_that_do_not_rise_lose_no_row(parents):
    """Their nodes count as roots, so that nothing is written outside the request."""
    parent, start, prefix = inputs([parents])
    score = torch.tensor([1.0, float("nan"), float("nan"), 2.0])
    built = depth_first(torch.arange(4, dtype=torch.int32), parent, score, start, prefix, max_rows=4)
    assert sorted(built.source.tolist()) == [0, 1, 2, 3]


def test_equal_scores_in_the_wrong_order_are_caught():
    """Negative control: of equal siblings the earlier row comes first."""
    parent, start, prefix = inputs([star(5)])
    built = depth_first(torch.arange(5, dtype=torch.int32), parent, torch.zeros(5), start, prefix, max_rows=5)
    assert built.source.tolist() == [0, 1, 2, 3, 4] != preorder(star(5), [0, 1, 2, 3, 4])


def test_depth_first_names_what_is_at_fault():
    parent, start, prefix = inputs([chain(3)])
    tokens, score = torch.zeros(3, dtype=torch.int32), torch.zeros(3)
    good = depth_first(tokens, parent, score, start, prefix, max_rows=3)
    assert depth_first(tokens, parent, score, start, prefix, max_rows=3, out=good) is good
    with pytest.raises(ValueError, match="score"):
        depth_first(tokens, parent, score.double(), start, prefix, max_rows=3)
    with pytest.raises(ValueError, match="tokens"):
        depth_first(tokens[:2], parent, score, start, prefix, max_rows=3)
    with pytest.raises(ValueError, match="scratch"):
        small = OrderedTrees(good.tokens, good.parent, good.source, good.arrays, good.scratch[:1])
        depth_first(tokens, parent, score, start, prefix, max_rows=3, out=small)


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_slots_come_from_the_block_table(block_size):
    trees = [random_tree(RNG, 17), [], chain(1), star(33)]
    parent, start, prefix = inputs(trees)
    table = torch.from_numpy(RNG.permutation(4 * 130)).view(4, 130).to(torch.int32)[:, 1:]
    built = build(parent, start, prefix, max_rows=33, block_table=table, block_size=block_size)
    expected = []
    for r, tree in enumerate(trees):
        for index in range(int(prefix[r]), int(prefix[r]) + len(tree)):
            expected.append(int(table[r, index // block_size]) * block_size + index % block_size)
    assert built.slot.tolist() == expected


def test_slots_past_31_bits():
    """The last block of a table: its number times the block size does not fit 32 bits."""
    parent, start, prefix = torch.tensor([-1, 0, 0], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), [200]
    table = torch.full((1, 2), 2**31 - 1, dtype=torch.int32)
    prefix = torch.tensor(prefix, dtype=torch.int32)
    built = build(parent, start, prefix, max_rows=3, block_table=table, block_size=128)
    assert built.slot.tolist() == [(2**31 - 1) * 128 + 72 + i for i in range(3)]


def test_rows_outside_the_requests_are_left_alone():
    trees = [random_tree(RNG, 9), chain(3)]
    parent, start, prefix = inputs(trees)
    expected = build(parent, start, prefix, max_rows=9)
    padded = torch.cat([parent, torch.full((4,), 99, dtype=torch.int32)])
    out = TreeArrays(*(torch.full(shape, 7, dtype=dtype) for shape, dtype in (
        ((16,), torch.int32), ((16,), torch.int64), ((16, 3), torch.int64), ((16,), torch.int64))))  # fmt: skip
    assert build(padded, start, prefix, max_rows=12, out=out) is out
    for name in ("depth", "position"):
        assert torch.equal(getattr(out, name)[:12], getattr(expected, name))
        assert (getattr(out, name)[12:] == 7).all()
    assert torch.equal(out.ancestors[:12, :1], expected.ancestors)
    assert (out.ancestors[:12, 1:] == 0).all() and (out.ancestors[12:] == 7).all()
    assert (out.slot == 7).all()


def test_a_loop_of_parents_ends():
    parent = torch.tensor([-1, 2, 1, 3], dtype=torch.int32)
    start, prefix = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    assert build(parent, start, prefix, max_rows=4).depth[0] == 0


def test_another_parent_is_caught():
    """Negative control: one changed link shows in depths or bits."""
    trees = [chain(6)]
    parent, start, prefix = inputs(trees)
    parent[4] = 0
    built = build(parent, start, prefix, max_rows=6)
    depth, bits = walked(trees, 1)
    assert not torch.equal(built.depth, depth) and not torch.equal(built.ancestors, bits)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"parent": torch.zeros(3, dtype=torch.int64)}, "parent"),
        ({"start": torch.zeros(3, dtype=torch.int32)}, "start"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int64)}, "block_table"),
        ({"out": TreeArrays(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), None)}, "depth"),
    ],
)
def test_errors_name_what_is_at_fault(broken, named):
    parent, start, prefix = inputs([chain(3)])
    arguments = {"parent": parent, "start": start, "prefix_len": prefix, "max_rows": 3}
    with pytest.raises(ValueError, match=named):
        build(**(arguments | broken))
