# SPDX-License-Identifier: Apache-2.0
"""Token trees as flat arrays: structure, order, ancestor bits, exchange format, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import batches, from_plain, grown, same_arrays, to_plain, walked

from specinfer_vllm.tree.topology import (
    TokenTrees,
    depth_first,
    from_arrays,
    from_child_sibling,
    roots,
    to_child_sibling,
)

#            0
#        1       2        request 0: two children of the root, the first with two children of its own
#      3   4
FORK = {"offsets": [0, 5], "tokens": [9, 1, 2, 3, 4], "parent": [-1, 0, 0, 1, 1], "score": [0.0, -1, -2, -3, -2]}


@given(batches())
def test_arrays_hold_the_trees_they_were_made_from(batch):
    (trees,) = batch
    trees.validate()
    for request, (nodes, _) in enumerate(to_plain(trees)):
        for local, path in enumerate(nodes):
            row = trees.offsets[request] + local
            assert trees.depth[row] == len(path)
            assert trees.request[row] == request
            assert [trees.tokens[trees.offsets[request] + node] for node in trees.path(request, local)] == list(path)
            assert trees.parent_row[row] == (trees.offsets[request] + trees.parent[row] if path else row)
            children = [i for i, other in enumerate(nodes) if len(other) == len(path) + 1 and other[:-1] == path]
            assert trees.children(request, local) == children
            assert trees.first_child[row] == (children[0] if children else -1)
            for child, after in zip(children, [*children[1:], -1], strict=False):
                assert trees.next_sibling[trees.offsets[request] + child] == after


@given(batches())
def test_parents_stand_before_children(batch):
    (trees,) = batch
    assert (trees.parent_row <= np.arange(trees.num_rows)).all()
    assert (trees.parent_row == np.arange(trees.num_rows)).sum() == trees.num_requests


@given(batches(), st.data())
def test_every_prefix_of_the_nodes_is_a_tree(batch, data):
    (trees,) = batch
    limit = data.draw(st.lists(st.integers(0, 14), min_size=trees.num_requests, max_size=trees.num_requests))
    cut = trees.head(limit)
    cut.validate()
    expected = []
    for (nodes, draws), most in zip(to_plain(trees), limit, strict=True):
        kept = dict(list(nodes.items())[: 1 + most])
        expected.append((kept, [draw for draw in draws if draw[0] in kept]))
    assert to_plain(cut) == expected
    assert [list(nodes) for nodes, _ in to_plain(cut)] == [list(nodes) for nodes, _ in expected]


@given(batches(), st.data())
def test_select_takes_whole_requests_in_the_order_asked(batch, data):
    (trees,) = batch
    chosen = data.draw(st.lists(st.integers(0, trees.num_requests - 1), max_size=6)) if trees.num_requests else []
    part = trees.select(np.array(chosen, np.int64))
    part.validate()
    assert to_plain(part) == [to_plain(trees)[request] for request in chosen]


@given(batches())
def test_depth_first_walks_the_likeliest_child_first(batch):
    (trees,) = batch
    ordered = depth_first(trees)
    ordered.validate()
    assert to_plain(ordered) == to_plain(trees)
    assert [list(nodes) for nodes, _ in to_plain(ordered)] == [walked(nodes) for nodes, _ in to_plain(trees)]
    assert ordered.is_depth_first
    assert depth_first(ordered) is ordered


@given(batches())
def test_is_depth_first_tells_ordered_trees_from_others(batch):
    (trees,) = batch
    assert trees.is_depth_first == all(list(nodes) == walked(nodes) for nodes, _ in to_plain(trees))


def _walked_bits(trees: TokenTrees, row: int) -> set[int]:
    request = trees.request[row]
    return {0, *trees.path(request, row - trees.offsets[request])}


def _set_bits(words: np.ndarray) -> set[int]:
    return {64 * i + bit for i, word in enumerate(words.tolist()) for bit in range(64) if word >> bit & 1}


@given(batches())
def test_ancestor_bits_are_the_walked_paths(batch):
    (trees,) = batch
    assert trees.ancestors.dtype == np.int64
    assert trees.ancestors.shape == (trees.num_rows, 1)
    for row in range(trees.num_rows):
        assert _set_bits(trees.ancestors[row]) == _walked_bits(trees, row)


@pytest.mark.parametrize("nodes", [[62], [63], [64], [5, 126, 0], [127], [128, 64], [191, 192, 193], [1100]])
def test_ancestor_bits_fill_as_many_words_as_the_largest_tree_needs(nodes):
    trees = depth_first(grown(np.random.default_rng(0), nodes))
    assert trees.ancestors.shape == (sum(nodes) + len(nodes), -(-(max(nodes) + 1) // 64))
    for row in range(trees.num_rows):
        assert _set_bits(trees.ancestors[row]) == _walked_bits(trees, row)


def test_node_63_uses_the_sign_bit_of_a_chain():
    chain = from_arrays([0, 130], np.arange(130), np.arange(-1, 129))
    assert chain.ancestors[62].tolist() == [2**63 - 1, 0, 0]
    assert chain.ancestors[63].tolist() == [-1, 0, 0]
    assert chain.ancestors[64].tolist() == [-1, 1, 0]
    assert chain.ancestors[129].tolist() == [-1, -1, 3]


@given(batches())
def test_first_child_and_next_sibling_round_trip(batch):
    (trees,) = batch
    first_child, next_sibling, tokens = to_child_sibling(trees)
    assert first_child.dtype == next_sibling.dtype == tokens.dtype == np.int64
    draws = {name: getattr(trees, name) for name in ("draw_offsets", "draw_node", "draw_owner", "draw_law")}
    back = from_child_sibling(trees.offsets, tokens, first_child, next_sibling, score=trees.score, **draws)
    assert same_arrays(back, trees)


def test_xgrammar_walks_the_exchange_format():
    xgrammar = pytest.importorskip("xgrammar")
    torch = pytest.importorskip("torch")
    info = xgrammar.TokenizerInfo(["a", "b", "c", "</s>"], stop_token_ids=[3])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar('root ::= "a" ("b" "c" | "c" "b") "a"')
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_token(0)  # the root, already committed
    trees = from_arrays([0, 5], [0, 1, 2, 2, 1], [-1, 0, 1, 0, 3])
    bitmask = torch.full((5, 1), -1, dtype=torch.int32)
    first_child, next_sibling, tokens = (torch.from_numpy(links) for links in to_child_sibling(trees))
    assert matcher.traverse_draft_tree(first_child, next_sibling, tokens, bitmask)
    allowed = [[token for token in range(4) if row >> token & 1] for row in bitmask[:, 0].tolist()]
    assert allowed == [[1, 2], [2], [0], [1], [0]]


@given(st.lists(st.integers(0, 99), max_size=5))
def test_roots_are_trees_without_nodes(tokens):
    trees = roots(np.array(tokens, np.int64))
    trees.validate()
    assert to_plain(trees) == [({(): 0.0}, [])] * len(tokens)
    assert trees.tokens.tolist() == tokens
    assert trees.num_nodes.tolist() == [0] * len(tokens)
    assert trees.first_child.tolist() == trees.next_sibling.tolist() == [-1] * len(tokens)
    assert same_arrays(depth_first(trees), trees)
    assert same_arrays(trees.head(3), trees)


def test_an_empty_batch_answers_everything():
    trees = roots([])
    trees.validate()
    assert trees.num_requests == trees.num_rows == 0
    assert trees.ancestors.shape == (0, 1)
    assert trees.first_child.shape == trees.next_sibling.shape == trees.parent_row.shape == (0,)
    assert depth_first(trees).num_rows == trees.head([]).num_rows == trees.select([]).num_rows == 0


def test_one_draw_per_node_is_the_default():
    trees = from_arrays(**FORK, draw_owner=2)
    assert trees.draw_offsets.tolist() == [0, 4]
    assert trees.draw_node.tolist() == [1, 2, 3, 4]
    assert trees.draw_owner.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offsets", [0, 4], "offsets: must run from 0 to 5"),
        ("offsets", [], "offsets: must run"),
        ("offsets", [0, 5, 5], "offsets: request 1 has 0 rows"),
        ("offsets", [0, 6, 5], "offsets: request 1 has -1 rows"),
        ("tokens", [9, 1, -2, 3, 4], "tokens: row 2 of request 0 has a negative token"),
        ("tokens", [9, 1, 1, 3, 4], "tokens: row 2 of request 0 repeats a sibling's token"),
        ("tokens", [9, 1, 2, 3, 2**31], "tokens: 2147483648 does not fit int32"),
        ("tokens", [9, 1, 2, 3, 4.5], "tokens: has type float64"),
        ("tokens", [[9, 1, 2, 3, 4]], "tokens: has shape"),
        ("parent", [-1, 0, 0, 1], "parent: has shape"),
        ("parent", [0, 0, 0, 1, 1], "parent: must be -1 at each root"),
        ("parent", [-1, 0, -1, 1, 1], "parent: row 2 of request 0 has none"),
        ("parent", [-1, 0, 0, 3, 1], "parent: row 3 of request 0 stands before its parent"),
        ("score", [0.0, -1, -2, -0.5, -2], "score: row 3 of request 0 scores higher than its parent"),
        ("score", [0.0, -1, -2, float("nan"), -2], "score: row 3 of request 0"),
        ("score", [0.0, 1, -2, -3, -2], "score: row 1 of request 0"),
        ("score", [-1.0, -1, -2, -3, -2], "score: must be 0"),
        ("score", [0.0], "score: has shape"),
        ("score", ["a"] * 5, "score: has type"),
        ("draw_node", [1, 2, 3, 4, 5], "draw_node: must be a node"),
        ("draw_node", [1, 2, 3, 4, 0], "draw_node: must be a node"),
        ("draw_node", [1, 2, 3, 3, 3], "draw_node: row 4 of request 0 carries no draw"),
        ("draw_offsets", [0, 4], "draw_offsets: must run from 0 to 5"),
        ("draw_offsets", [0, 2, 5], "draw_offsets: has 3 entries"),
        ("draw_offsets", None, "draw_offsets: goes with draw_node"),
        ("draw_owner", [0, 0], "draw_owner: has shape"),
        ("draw_owner", [0, 0, 0, 0, -1], "draw_owner: -1 is no proposer"),
        ("draw_owner", 2**15, "draw_owner: 32768 does not fit int16"),
        ("draw_law", [0, 0], "draw_law: has shape"),
        ("draw_law", -2, "draw_law: -2 is no law"),
    ],
)
def test_bad_arrays_are_refused_by_name(field, value, message):
    arrays = {**FORK, "draw_offsets": [0, 5], "draw_node": [1, 2, 3, 4, 4], "draw_owner": 0, field: value}
    with pytest.raises(ValueError, match=f"^{message}"):
        from_arrays(**arrays)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", np.zeros(5, np.int64), "tokens: must be a one-dimensional numpy array of int32"),
        ("depth", np.array([0, 1, 1, 2, 3], np.int32), "depth: row 4 of request 0"),
        ("depth", np.array([1, 1, 1, 2, 2], np.int32), "depth: row 0 of request 0"),
    ],
)
def test_validate_names_what_is_broken(field, value, message):
    trees = from_arrays(**FORK)
    arrays = {name: getattr(trees, name) for name in TokenTrees.__dataclass_fields__}
    with pytest.raises(ValueError, match=f"^{message}"):
        TokenTrees(**{**arrays, field: value}).validate()


@pytest.mark.parametrize(
    ("first_child", "next_sibling", "message"),
    [
        ([1, 3, -1, -1, -1], [-1, 2, -1, -1, -1], "first_child, next_sibling: 0 links lead to row 4"),
        ([1, 3, 4, -1, -1], [-1, 2, -1, 4, -1], "first_child, next_sibling: 2 links lead to row 4"),
        ([1, 3, -1, -1, -1], [-1, 5, -1, 4, -1], "next_sibling: 5 at row 1"),
        ([2, 3, -1, -1, -1], [-1, -1, 1, 4, -1], "next_sibling: 1 at row 2"),
        ([0, 3, -1, -1, -1], [-1, 2, -1, 4, -1], "first_child: 0 at row 0"),
        ([-1, 3, -1, -1, -1], [1, 2, -1, 4, -1], "next_sibling: a root has no sibling"),
        ([1, 3, -1, -1], [-1, 2, -1, 4, -1], "first_child: has shape"),
    ],
)
def test_bad_links_are_refused_by_name(first_child, next_sibling, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        from_child_sibling([0, 5], FORK["tokens"], first_child, next_sibling)


@pytest.mark.parametrize(
    ("num_nodes", "message"),
    [([1, 2], "num_nodes: has shape"), ([-1], "num_nodes: -1 is negative"), ([0.5], "num_nodes: has type float64")],
)
def test_bad_heads_are_refused_by_name(num_nodes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        from_arrays(**FORK).head(num_nodes)


@pytest.mark.parametrize("requests", [[1], [-1], [[0]]])
def test_unknown_requests_are_refused(requests):
    with pytest.raises(ValueError, match="^requests: "):
        from_arrays(**FORK).select(requests)


def test_roots_take_a_flat_list():
    with pytest.raises(ValueError, match="^tokens: has shape"):
        roots([[1]])


def test_a_request_without_nodes_beside_one_with_nodes():
    trees = from_plain([1, 2, 3], [({(): 0.0}, []), ({(): 0.0, (5,): -1.0}, [((5,), 0)]), ({(): 0.0}, [])])
    assert trees.num_nodes.tolist() == [0, 1, 0]
    assert trees.first_child.tolist() == [-1, 1, -1, -1]
    assert trees.ancestors[:, 0].tolist() == [1, 1, 3, 1]
