# SPDX-License-Identifier: Apache-2.0
"""The union of several proposers' trees: every sequence once, every draw kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import batches, from_plain, grown, same_arrays, to_plain, walked

from specinfer_vllm.tree import merge as merge_module
from specinfer_vllm.tree.merge import merge
from specinfer_vllm.tree.topology import TokenTrees, depth_first, from_arrays, roots

several = st.integers(1, 4).flatmap(lambda inputs: batches(inputs=inputs, max_nodes=8))


def plain_merge(trees):
    """The union the obvious way: per request one dict of sequences, and the draws one input after the other."""
    merged = []
    for request in range(trees[0].num_requests):
        nodes, draws = {}, []
        for batch in trees:
            more_nodes, more_draws = to_plain(batch)[request]
            for path, score in more_nodes.items():
                nodes[path] = max(score, nodes.get(path, -np.inf))
            draws += more_draws
        merged.append((nodes, draws))
    return merged


def check_draws_kept(inputs, merged):
    """The merge holds each draw as often as it was made, with its owner, in the order in which they were drawn."""
    for (_, expected), (_, draws) in zip(plain_merge(inputs), to_plain(merged), strict=True):
        assert draws == expected


@given(several)
def test_every_sequence_of_every_input_is_in_the_merge_and_nothing_else(inputs):
    merged = merge(inputs)
    assert [set(nodes) for nodes, _ in to_plain(merged)] == [set(nodes) for nodes, _ in plain_merge(inputs)]
    assert merged.num_rows == sum(len(nodes) for nodes, _ in plain_merge(inputs))


@given(several)
def test_multiplicity_owner_and_order_of_draws_are_kept(inputs):
    check_draws_kept(inputs, merge(inputs))


@given(several)
def test_a_shared_node_takes_the_highest_score(inputs):
    assert [nodes for nodes, _ in to_plain(merge(inputs))] == [nodes for nodes, _ in plain_merge(inputs)]


@given(several)
def test_the_merge_is_a_valid_batch_in_depth_first_order(inputs):
    merged = merge(inputs)
    merged.validate()
    assert [list(nodes) for nodes, _ in to_plain(merged)] == [walked(nodes) for nodes, _ in plain_merge(inputs)]
    arrays = {name: getattr(merged, name) for name in TokenTrees.__dataclass_fields__}
    assert TokenTrees(**arrays).is_depth_first  # computed afresh, not the mark that merge left
    assert [batch.tokens[o] for batch in inputs for o in batch.offsets[:-1]] == len(inputs) * [
        merged.tokens[o] for o in merged.offsets[:-1]
    ]


@given(several)
def test_merging_is_idempotent_up_to_draws(inputs):
    once = merge(inputs)
    assert to_plain(merge([once, once])) == [(nodes, draws + draws) for nodes, draws in to_plain(once)]


@pytest.mark.parametrize("nodes", [[40] * 20, [0, 200, 1], [700]])
def test_large_trees_merge_as_small_ones_do(nodes):
    rng = np.random.default_rng(1)
    inputs = [grown(rng, nodes, vocabulary=4, owner=owner) for owner in range(3)]
    merged = merge(inputs)
    merged.validate()
    check_draws_kept(inputs, merged)
    assert [list(nodes) for nodes, _ in to_plain(merged)] == [walked(nodes) for nodes, _ in plain_merge(inputs)]


def _deduplicated(trees: TokenTrees) -> TokenTrees:
    """What a merge by Definition 3.2 read literally keeps: one draw per node."""
    first = np.unique(trees.draw_row, return_index=True)[1]
    first.sort()
    counts = np.bincount(trees.draw_request[first], minlength=trees.num_requests)
    return _with_draws(trees, np.concatenate(([0], np.cumsum(counts))), first)


def _with_draws(trees: TokenTrees, draw_offsets, draws) -> TokenTrees:
    arrays = {name: getattr(trees, name) for name in TokenTrees.__dataclass_fields__}
    arrays |= {name: getattr(trees, name)[draws] for name in ("draw_node", "draw_owner", "draw_law")}
    arrays["draw_offsets"] = draw_offsets
    return TokenTrees(**arrays)


#        two SSMs that both draw token 4 after the root; the second draws it twice and token 5 before it
TWICE = [
    from_plain([1], [({(): 0.0, (4,): -1.0}, [((4,), 0)])]),
    from_plain([1], [({(): 0.0, (5,): -2.0, (4,): -0.5}, [((4,), 1), ((5,), 1), ((4,), 1)])]),
]


def test_deduplicated_draws_are_caught():
    merged = merge(TWICE)
    check_draws_kept(TWICE, merged)
    literal = _deduplicated(merged)
    literal.validate()
    with pytest.raises(AssertionError):
        check_draws_kept(TWICE, literal)


def test_shuffled_draws_are_caught():
    merged = merge(TWICE)
    with pytest.raises(AssertionError):
        check_draws_kept(TWICE, _with_draws(merged, merged.draw_offsets, [0, 2, 1, 3]))


def test_two_proposers_of_one_token_share_a_node():
    merged = merge(TWICE)
    assert merged.tokens.tolist() == [1, 4, 5]
    assert merged.score.tolist() == [0.0, -0.5, -2.0]
    assert merged.draw_node.tolist() == [1, 1, 2, 1]
    assert merged.draw_owner.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("weak", [lambda values: values * 0, lambda values: values & 1, lambda values: values >> 32])
@given(inputs=batches(inputs=3, max_nodes=8))
def test_the_merge_never_rests_on_its_fingerprints(weak, inputs):
    expected = merge(inputs)
    scramble = merge_module._scramble
    with pytest.MonkeyPatch.context() as patch:
        weakly = lambda values, salt: weak(values).astype(np.uint64) if salt < 2 else scramble(values, salt)  # noqa: E731
        patch.setattr(merge_module, "_scramble", weakly)
        assert same_arrays(merge(inputs), expected)


def test_equal_fingerprints_in_two_requests_are_told_apart(monkeypatch):
    # With marks of 3 bits the sequences 0, 1 of the first request and 2, 1 of the second have one fingerprint (15), and
    # nothing else has: their last tokens agree, so only their parents tell them apart.
    trees = from_arrays([0, 3, 6], [5, 0, 1, 5, 2, 1], [-1, 0, 1, -1, 0, 1])
    expected = merge([trees, trees])
    salts = []

    def weakly(values, salt):
        salts.append(salt)
        return (values & 7).astype(np.uint64) if salt == 0 else scramble(values, salt)

    scramble = merge_module._scramble
    monkeypatch.setattr(merge_module, "_scramble", weakly)
    assert same_arrays(merge([trees, trees]), expected)
    assert salts == [0, 1]


def test_a_proposer_without_proposals_changes_nothing():
    tree = from_arrays([0, 3, 4], [1, 5, 6, 2], [-1, 0, 0, -1], [0.0, -2.0, -1.0, 0.0])
    assert same_arrays(merge([roots([1, 2]), tree, roots([1, 2])]), depth_first(tree))
    assert same_arrays(merge([roots([1, 2]), roots([1, 2])]), roots([1, 2]))


def test_an_empty_batch_merges_into_an_empty_batch():
    assert merge([roots([]), roots([])]).num_requests == 0


def test_inputs_that_do_not_fit_together_are_refused_by_name():
    with pytest.raises(ValueError, match="^trees: nothing to merge"):
        merge([])
    with pytest.raises(ValueError, match=r"^trees\[1\]: has 2 requests where trees\[0\] has 1"):
        merge([roots([1]), roots([1, 2])])
    with pytest.raises(ValueError, match=r"^trees\[2\].tokens: request 1 has root 3 where trees\[0\] has 2"):
        merge([roots([1, 2]), roots([1, 2]), roots([1, 3])])
