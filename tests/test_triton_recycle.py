# SPDX-License-Identifier: Apache-2.0
"""Token recycling in Triton's interpreter against its reference, and against trees worked out by hand."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from specinfer_vllm.propose.device_ngram import DeviceNgram  # noqa: E402
from specinfer_vllm.propose.device_primer import device_primer  # noqa: E402
from specinfer_vllm.propose.device_recycling import DeviceRecycling  # noqa: E402
from specinfer_vllm.propose.ngram import NgramProposer  # noqa: E402
from specinfer_vllm.propose.proposer import DraftBatch, Observation  # noqa: E402
from specinfer_vllm.propose.recycling import RecyclingProposer  # noqa: E402
from specinfer_vllm.propose.successors import NOBODY, SuccessorRows  # noqa: E402
from specinfer_vllm.propose.votes import ROW_VOTERS, Weights  # noqa: E402
from specinfer_vllm.tree.device import child_path  # noqa: E402
from specinfer_vllm.triton_kernels import recycle as kernel_module  # noqa: E402
from specinfer_vllm.triton_kernels.recycle import (  # noqa: E402
    CONTEXT,
    NGRAM_WEIGHTS,
    PLACES,
    WEIGHTS,
    WINDOW,
    Grown,
    ngram,
    recycle,
)
from specinfer_vllm.triton_kernels.reference import recycle as reference  # noqa: E402

POISON = 2**31 - 7
TRUST = [weight / (1 + weight) for weight in WEIGHTS]  # chance of a place's only successor
FIELDS = ("tokens", "parent", "score", "depth", "path")
CLOSE = 1e-5  # scores closer than this may be ordered either way


def case(seed, slots=7, max_len=60, ring=32, width=8, vocab=6, recorded=0.7, lengths=None):
    """Arguments of recycle: random texts over a small vocabulary, so that contexts recur. Unused memory is poison.

    lengths [slots] = committed tokens; given by the seed when missing, with an empty slot and a full one.
    """
    rng = np.random.default_rng(seed)
    if lengths is None:
        lengths = rng.integers(1, max_len + 1, slots)
        lengths[:2] = 0, max_len
    history = np.full((slots, max_len + 3), POISON, np.int32)
    place = np.full((slots, ring), -1, np.int32)
    successors = np.full((slots, ring, width), POISON, np.int32)
    chances = np.full((slots, ring, width), np.nan, np.float32)
    for slot, size in enumerate(lengths):
        history[slot, :size] = rng.integers(0, vocab, size)
        for at in range(size - 1):
            if rng.random() < recorded:
                known = rng.integers(0, min(vocab, width) + 1)
                place[slot, at % ring] = at
                successors[slot, at % ring] = -1
                successors[slot, at % ring, :known] = rng.permutation(vocab)[:known]
                chances[slot, at % ring] = np.sort(rng.dirichlet(np.full(width, 0.5)))[::-1]
    given = {
        "history": torch.from_numpy(history)[:, :max_len],
        "length": torch.tensor(np.array(lengths), dtype=torch.int32),
        "slot": torch.from_numpy(rng.permutation(slots)),
        "place": torch.from_numpy(place),
        "successors": torch.from_numpy(successors),
        "chances": torch.from_numpy(chances),
        "branches": torch.from_numpy(rng.choice([1, 2, width, 64], slots).astype(np.int32)),
        "last": torch.full((slots,), max_len + 20, dtype=torch.int32),
        "weight": torch.tensor(WEIGHTS, dtype=torch.float32),
        "max_depth": 8,
    }
    return given


def sevens(requests, nodes):
    """Buffers to write to, a request longer than needed."""
    out = Grown.empty(requests + 1, nodes, "cpu")
    for name in FIELDS:
        getattr(out, name).fill_(7)
    return out


def both(given, nodes):
    """(the kernel's trees, the reference's, whether no decision was close [requests])."""
    requests = len(given["slot"])
    made = recycle(**given, out=sevens(requests, nodes))
    margin = torch.empty(requests, dtype=torch.float64)
    expected = reference.recycle(**given, out=sevens(requests, nodes), margin=margin)
    return made, expected, margin > CLOSE


def check_equal(made, expected, requests):
    """`requests` [requests] bool agree in everything, scores up to rounding."""
    for name in FIELDS:
        one, other = (getattr(each, name)[:-1][requests] for each in (made, expected))
        if name == "score":
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(one, other), name
        assert (getattr(made, name)[-1] == 7).all(), f"{name}: written past the last request"


def paths(made, request):
    """{path of tokens: score} of a tree, in the order of its nodes; checks the links on the way."""
    found = [()]
    nodes = zip(made.tokens[request].tolist(), made.parent[request].tolist(), strict=True)
    for node, (token, above) in enumerate(nodes):
        if token < 0:
            break
        assert above <= node
        found.append((*found[above], token))
        assert int(made.depth[request, node]) == len(found[-1])
    return dict(zip(found[1:], made.score[request].tolist(), strict=False))


SHAPES = {
    "usual": {},
    "one node": {"nodes": 1},
    "sizes that are no power of two": {"nodes": 5, "width": 3},
    "more than 64 nodes": {"nodes": 70, "vocab": 12, "slots": 3},
    "one successor": {"nodes": 9, "width": 1},
    "nothing recorded": {"recorded": 0.0},
    "everything recorded": {"recorded": 1.0, "ring": 64},
    "short texts": {"max_len": 5, "ring": 5, "vocab": 2},
    "one token": {"max_len": 1, "ring": 1},
    "a ring that wraps": {"ring": 7, "max_len": 90},
    "many equal contexts": {"vocab": 2, "nodes": 16, "slots": 5},
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_grows_like_the_reference(name, seed):
    shape = dict(SHAPES[name])
    nodes = shape.pop("nodes", 8)
    given = case(seed, **shape)
    made, expected, clear = both(given, nodes)
    check_equal(made, expected, clear)
    assert clear.float().mean() >= 0.5


def test_the_trees_of_these_tests_are_trees():
    """Most cases have several levels, siblings, all nodes that were asked for, and requests without any."""
    counts, depths, widest = [], [], 0
    for seed in range(3):
        made, _, _ = both(case(seed, vocab=4), 8)
        counts += (made.tokens[:-1] >= 0).sum(1).tolist()
        depths += made.depth[:-1].amax(1).tolist()
        widest = max(widest, int((made.parent[:-1] == 0).sum(1).max()))
    assert 0 in counts and counts.count(8) >= 4 and max(depths) >= 4 and widest >= 4


def test_best_nodes_come_first_and_paths_are_numbered():
    made, _, _ = both(case(5, vocab=4), 16)
    for request in range(7):
        tree = paths(made, request)
        scores = list(tree.values())
        assert scores == sorted(scores, reverse=True)
        assert all(scores[node] >= kernel_module.LEAST.value for node in range(len(tree)))
        for node, path in enumerate(tree):
            number = torch.zeros((), dtype=torch.int64)
            for token in path:
                number = child_path(number, torch.tensor(token))
            assert int(number) == int(made.path[request, node])
        assert len(set(made.path[request, : len(tree)].tolist())) == len(tree)


def test_behind_the_last_node_everything_is_blank():
    made, _, _ = both(case(0, recorded=0.0), 8)
    blank = made.tokens[:-1] < 0
    assert blank.any()
    for name, value in {"tokens": -1, "parent": 0, "score": -torch.inf, "depth": 1, "path": 0}.items():
        assert (getattr(made, name)[:-1][blank] == value).all()


def hand(text, rows=None, ring=16, **changes):
    """Arguments for one request over a text; rows = {index: [(token, chance), ...]}."""
    size = len(text)
    given = case(0, slots=1, max_len=max(size, ring), ring=ring, width=4, lengths=[0])
    given["history"][0, :size] = torch.tensor(text)
    given["length"][0] = size
    given["branches"][0] = 4
    for at, found in (rows or {}).items():
        given["place"][0, at % ring] = at
        given["successors"][0, at % ring] = -1
        for rank, (token, chance) in enumerate(found):
            given["successors"][0, at % ring, rank] = token
            given["chances"][0, at % ring, rank] = chance
    return given | changes


def grown(given, nodes=8):
    """{path: score} of the only request, the same from kernel and reference."""
    made, expected, _ = both(given, nodes)
    check_equal(made, expected, torch.tensor([True]))
    return paths(made, 0)


def test_the_text_goes_on_as_it_did():
    """A chain: nothing is recorded, so the latest place of the longest context gives one token after the other."""
    tree = grown(hand([1, 2, 3, 4, 5, 9, 1, 2]))
    assert list(tree) == [(3,), (3, 4), (3, 4, 5), (3, 4, 5, 9), (3, 4, 5, 9, 1), (3, 4, 5, 9, 1, 2)] + [
        (3, 4, 5, 9, 1, 2, 3),
        (3, 4, 5, 9, 1, 2, 3, 4),
    ]
    assert tree[(3,)] == pytest.approx(np.log(TRUST[1])) and tree[3, 4] == pytest.approx(np.log(TRUST[1] * TRUST[2]))
    assert tree[3, 4, 5] == pytest.approx(np.log(TRUST[1] * TRUST[2] * TRUST[3]))


def test_recorded_successors_make_a_star():
    rows = {0: [(6, 0.5), (7, 0.25), (8, 0.125), (9, 0.0625)]}
    tree = grown(hand([1, 2, 1], rows))
    assert list(tree) == [(6,), (7,), (8,), (9,)]
    assert list(tree.values()) == pytest.approx([np.log(TRUST[0] * 0.5**k) for k in (1, 2, 3, 4)])


def test_the_longer_context_wins_over_the_later_place():
    text = [5, 1, 2, 7, 1, 3, 2, 8, 5, 1, 2]
    assert list(grown(hand(text), 1)) == [(7,)]  # 5 1 2 at the start, not 3 2 behind it
    assert list(grown(hand([4, 2, 7, 4, 2, 8, 4, 2]), 1)) == [(8,)]  # of equal contexts the later


def test_contexts_do_not_reach_in_front_of_the_text():
    """The first token has no context but itself."""
    tree = grown(hand([2, 7, 4, 2, 8, 2], last=torch.tensor([100], dtype=torch.int32)), 1)
    assert list(tree) == [(8,)] and tree[(8,)] == pytest.approx(np.log(TRUST[0]))
    assert list(grown(hand([3, 3]), 1).values()) == pytest.approx([np.log(TRUST[0])])


def test_a_text_without_a_past_has_no_tree():
    for text in ([], [4], [1, 2, 3]):
        assert grown(hand(text)) == {}


@pytest.mark.parametrize("branches", [0, 1, 2, 3, 4, 64])
def test_branches_bound_the_children(branches):
    rows = {0: [(1, 0.3), (6, 0.25), (7, 0.2), (8, 0.1)]}
    given = hand([1, 2, 1], rows, branches=torch.tensor([branches], dtype=torch.int32))
    tree = grown(given, 12)
    children = [sum(path[:-1] == above for path in tree) for above in [(), *tree]]
    assert max(children, default=0) == min(branches, 4)
    assert (len(tree) > 0) == (branches > 0)
    if branches == 1:
        assert all(each == 1 for each in children[: len(tree)])


@pytest.mark.parametrize(("max_depth", "room", "deepest"), [(3, 50, 3), (8, 3, 2), (8, 1, 0), (8, 0, 0), (8, -4, 0)])
def test_no_node_is_deeper_than_allowed(max_depth, room, deepest):
    """Of `room` tokens that are still to come one is the bonus token."""
    given = hand([1, 1, 1, 1], max_depth=max_depth, last=torch.tensor([4 + room], dtype=torch.int32))
    assert max(map(len, grown(given)), default=0) == deepest


def test_a_token_that_is_missing_ends_the_row():
    rows = {0: [(-1, 0.5), (7, 0.25), (-1, 0.2)]}
    assert list(grown(hand([1, 2, 1], rows))) == [(7,)]
    assert grown(hand([1, 2, 1], {0: []})) == {}  # a row that says nothing is still a row


def test_chances_that_are_not_worth_a_node_are_left_out():
    rows = {0: [(6, 0.9), (7, 0.001), (8, 0.0), (9, float("nan"))]}
    assert list(grown(hand([1, 2, 1], rows))) == [(6,)]


def test_of_equal_scores_the_earlier_candidate_is_taken():
    rows = {0: [(6, 0.25), (7, 0.25), (8, 0.25), (9, 0.25)]}
    assert list(grown(hand([1, 2, 1], rows), 3)) == [(6,), (7,), (8,)]
    # Both children of the root have children of one and the same score: the earlier node's come first.
    text = [6, 3, 7, 4, 1, 2, 1]
    rows = {0: [(10, 0.5), (11, 0.5)], 2: [(12, 0.5), (13, 0.5)], 4: [(6, 0.5), (7, 0.5)]}
    tree = grown(hand(text, rows))
    assert list(tree) == [(6,), (7,), (6, 10), (6, 11), (7, 12), (7, 13)]


def test_a_place_that_the_ring_has_given_away_counts_as_not_recorded():
    """Index 17 stands where index 1 stood: what it says is not what followed index 1."""
    text = [9, 1, 5, *range(20, 34), 9, 1]
    rows = {17: [(6, 0.9)]}
    assert text.index(9, 1) == 17
    assert list(grown(hand(text, rows), 1)) == [(5,)]
    rows = {1: [(6, 0.9)]}
    assert list(grown(hand(text, rows), 1)) == [(6,)]


def test_only_the_window_is_looked_at(monkeypatch):
    for module in (kernel_module, reference):
        monkeypatch.setattr(module, "WINDOW", 8)
    far = [1, 5, *range(20, 27), 1]  # 10 tokens: the first two are out of the window
    assert grown(hand(far)) == {}
    assert list(grown(hand(far[:-3] + [1]), 1)) == [(5,)]
    made, expected, clear = both(case(0, vocab=3), 8)
    check_equal(made, expected, clear)


def test_more_tokens_than_the_window():
    given = case(3, slots=2, max_len=WINDOW + 300, ring=WINDOW, vocab=40, lengths=[WINDOW + 300, WINDOW + 1])
    made, expected, clear = both(given, 8)
    check_equal(made, expected, clear)
    assert clear.any() and (made.tokens[:-1] >= 0).any()


def test_rows_of_history_and_length_may_be_a_larger_buffers():
    """vLLM's buffers: rows of `history` lie apart, and its slots are more than those that are asked for."""
    given = case(1)
    assert given["history"].stride(0) > given["history"].shape[1]
    some = given | {"slot": torch.tensor([3, 1])}
    made, expected, _ = both(some, 8)
    check_equal(made, expected, torch.tensor([True, True]))
    whole, _, _ = both(given | {"slot": torch.arange(7)}, 8)
    for name in FIELDS:
        assert torch.equal(getattr(made, name)[:2], getattr(whole, name)[[3, 1]])
    dense = given | {"history": given["history"].contiguous(), "slot": torch.arange(7)}
    assert torch.equal(both(dense, 8)[0].tokens, whole.tokens)


def test_what_is_not_committed_does_not_count():
    """Other poison in unused memory, the same trees."""
    given = case(2)
    made, _, _ = both(given, 8)
    other = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    for slot, size in enumerate(given["length"].tolist()):
        other["history"][slot, size:] = 3
        unused = given["place"][slot] < 0
        other["successors"][slot, unused] = 2
        other["chances"][slot, unused] = 1.0
    again = recycle(**other, out=sevens(7, 8))
    for name in FIELDS:
        assert torch.equal(getattr(made, name), getattr(again, name))


def test_no_request_at_all():
    given = case(0) | {"slot": torch.zeros(0, dtype=torch.int64)}
    out = sevens(0, 8)
    assert recycle(**given, out=out) is out and (out.tokens == 7).all()


@pytest.mark.parametrize("name", ["history", "length", "place", "successors", "chances", "branches", "last", "weight"])
def test_every_input_matters(name):
    """Negative control: one tensor changed, and the reference finds other trees."""
    given = case(4, vocab=4)
    changed = {"history": (given["history"] + 1) % 4, "length": given["length"] // 2, "place": given["place"] * 0 - 1}
    changed |= {
        "successors": given["successors"] + 1,
        "chances": given["chances"] / 2,
        "branches": given["last"] * 0 + 1,
    }
    changed |= {"last": given["length"] + 2, "weight": given["weight"].flip(0)}
    made, _, clear = both(given, 8)
    expected = reference.recycle(**(given | {name: changed[name].contiguous()}), out=sevens(7, 8))
    with pytest.raises(AssertionError):
        check_equal(made, expected, clear)


def test_what_was_observed_is_proposed():
    """DeviceRecycling: rows go to their own slot, places that do not count to nobody, a reset forgets a slot."""
    recycling = DeviceRecycling(slots=3, max_len=10, nodes=4, max_depth=8, owner=2, vocab_size=200, device="cpu")
    history = torch.zeros(3, 10, dtype=torch.int32)
    history[:, :4] = torch.tensor([5, 6, 7, 5])
    length, last = torch.full((3,), 4, dtype=torch.int32), torch.full((3,), 10, dtype=torch.int32)
    branches = torch.full((3,), 64, dtype=torch.int32)
    index = torch.tensor([[0, 1], [0, 1]])
    is_seen = torch.tensor([[True, False], [False, False]])
    tokens = torch.arange(32).view(4, 8) + 100
    chances = torch.full((4, 8), 0.5)
    recycling.observe(torch.tensor([2, 0]), index, is_seen, (tokens, chances))
    draws = recycling.propose(history, length, torch.tensor([2, 0, 1]), branches, last)
    assert draws.token[0].tolist() == [100, 101, 102, 103]
    assert draws.token[1].tolist() == draws.token[2].tolist() == [6, 7, 5, 6]
    assert draws.owner.tolist() == [[4] * 4] * 3 and draws.num_draws == 4
    assert torch.equal(draws.path[0], child_path(torch.zeros(4, dtype=torch.int64), draws.token[0]))
    recycling.reset(torch.tensor([2]))
    assert recycling.propose(history, length, torch.tensor([2]), branches, last).token.tolist() == [[6, 7, 5, 6]]


# -- the text alone ----------------------------------------------------------------------------------------------------

ROWS = ("place", "successors", "chances")


def text_case(seed, **shape):
    """Arguments of ngram, as case."""
    given = case(seed, **shape) | {"weight": torch.tensor(NGRAM_WEIGHTS, dtype=torch.float32)}
    return {name: value for name, value in given.items() if name not in ROWS}


def both_ngrams(given, nodes):
    """As both."""
    requests = len(given["slot"])
    margin = torch.empty(requests, dtype=torch.float64)
    expected = reference.ngram(**given, out=sevens(requests, nodes), margin=margin)
    return ngram(**given, out=sevens(requests, nodes)), expected, margin > CLOSE


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [({"slots": 5}, 8), ({"max_len": 5, "vocab": 2}, 4), ({"max_len": 1}, 1), ({"vocab": 12, "slots": 3}, 19)],
)
def test_ngram_grows_like_its_reference(shape, nodes):
    made, expected, clear = both_ngrams(text_case(3, **shape), nodes)
    check_equal(made, expected, clear)
    assert clear.float().mean() >= 0.3 and (made.tokens[:-1] >= 0).any() == (shape.get("max_len") != 1)


def ngram_tree(text, nodes=8, **changes):
    """{path: score} of the only request, the same from kernel and reference."""
    given = hand(text, **changes) | {"weight": torch.tensor(NGRAM_WEIGHTS, dtype=torch.float32)}
    made, expected, _ = both_ngrams({name: value for name, value in given.items() if name not in ROWS}, nodes)
    check_equal(made, expected, torch.tensor([True]))
    return paths(made, 0)


def test_every_place_votes():
    one, two = NGRAM_WEIGHTS[:2]
    text = [8, 1, 5, 9, 1, 6, 7, 1, 6, 8, 1]
    total = 1 + two + 2 * one
    assert list(ngram_tree(text, 2)) == [(5,), (6,)]
    assert list(ngram_tree(text, 2).values()) == pytest.approx([np.log(two / total), np.log(2 * one / total)])
    assert list(ngram_tree(text, 2, branches=torch.tensor([1], dtype=torch.int32)))[0] == (5,)
    assert (6,) not in ngram_tree(text, 8, branches=torch.tensor([1], dtype=torch.int32))
    assert ngram_tree(text, 8, vocab=6).keys() <= {(5,)}
    assert ngram_tree([1, 2, 3]) == ngram_tree([]) == {}


def test_as_many_places_as_the_kernel_looks_for_are_found():
    """The latest of those whose contexts are equally long."""
    text = [each for token in range(20, 20 + PLACES + 2) for each in (1, token)] + [1]
    assert sorted(ngram_tree(text, PLACES + 2, max_depth=1)) == [(token,) for token in range(22, 22 + PLACES)]


def text_without_repeats(rng, size, vocab):
    """Random tokens, no CONTEXT of them twice."""
    while True:
        text = rng.integers(0, vocab, size)
        if len({tuple(text[at : at + CONTEXT]) for at in range(size - CONTEXT + 1)}) == size - CONTEXT + 1:
            return text


def test_ngram_grows_like_the_proposer_of_the_v1_runner():
    """Where no match is longer than CONTEXT, no token has more than PLACES successors, and votes do not fade."""
    requests, nodes, size, depth = 2, PLACES + PLACES**2, 24, 2
    rng = np.random.default_rng(0)
    history = np.stack([text_without_repeats(rng, size, PLACES) for _ in range(requests)]).astype(np.int32)
    length = np.array([size, size - 5])
    weights = Weights(doubt=1, text=NGRAM_WEIGHTS[0], text_growth=3.0)
    rows = np.arange(requests)
    batch = DraftBatch(rows, history, rows, length, np.full(requests, depth), np.full(requests, nodes))
    trees = NgramProposer(weights=weights).propose(batch)
    most = torch.full((requests,), 64, dtype=torch.int32)
    made = ngram(
        torch.from_numpy(history),
        torch.from_numpy(length.astype(np.int32)),
        torch.arange(requests),
        most,
        most,
        torch.from_numpy((weights.text * weights.text_growth ** np.arange(CONTEXT)).astype(np.float32)),
        max_depth=depth,
        out=sevens(requests, nodes),
    )
    for request in range(requests):
        theirs = trees_paths(trees, request)
        assert len(theirs) > PLACES
        assert paths(made, request) == pytest.approx(theirs, abs=1e-5)


def trees_paths(trees, request):
    """{path: score} of a tree of the V1 runner's proposers."""
    start, end = trees.offsets[request], trees.offsets[request + 1]
    found = [()]
    for token, above in zip(trees.tokens[start + 1 : end], trees.parent[start + 1 : end], strict=True):
        found.append((*found[above], int(token)))
    return dict(zip(found[1:], trees.score[start + 1 : end].tolist(), strict=True))


def test_the_proposer_hands_its_own_draws_over():
    proposer = DeviceNgram(slots=2, nodes=3, max_depth=2, owner=1, vocab_size=9, device="cpu")
    history = torch.tensor([[5, 6, 5, 0], [5, 9, 5, 0]], dtype=torch.int32)
    length, last = torch.full((2,), 3, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
    draws = proposer.propose(history, length, torch.tensor([1, 0]), torch.full((2,), 64, dtype=torch.int32), last)
    assert draws.token.tolist() == [[-1, -1, -1], [6, 5, -1]]  # 9 is no token of the vocabulary
    assert (draws.owner == 2).all() and draws.depth[1].tolist() == [1, 2, 1]


# -- a primer ----------------------------------------------------------------------------------------------------------


def save_primer(path, contexts, successors, chances, vocab):
    """A primer's file: contexts [rows, CONTEXT] nearest first, successors and chances [rows, k]."""
    rows = SuccessorRows(max(len(contexts), 1), successors.shape[1], vocab)
    slots = np.arange(len(contexts))
    tails = np.ascontiguousarray(contexts[:, 1:], np.int32)
    rows.append(np.full(len(contexts), NOBODY), tails, Observation(slots, contexts[:, 0], successors, chances))
    rows.save(path)
    return path


def random_primer(path, rows=60, vocab=6, width=3, seed=0):
    """Random rows, so few tokens that contexts recur; some are as short as at the start of a text."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, vocab, (rows, CONTEXT))
    contexts[rng.random(rows) < 0.2, 2:] = -1
    successors = rng.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1)[:, :width]
    chances = np.sort(rng.dirichlet(np.ones(width), rows))[:, ::-1]
    return save_primer(path, contexts, successors, chances, vocab)


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [({"slots": 4}, 8), ({"width": 3}, 5), ({"vocab": 12, "slots": 2}, 19), ({"max_len": 1, "ring": 1, "slots": 3}, 4)],
)
def test_primed_trees_grow_like_the_reference(tmp_path, shape, nodes):
    vocab = shape.get("vocab", 6)
    given = case(1, **shape) | {"primer": device_primer(random_primer(tmp_path / "p.npz", vocab=vocab), vocab, "cpu")}
    made, expected, clear = both(given, nodes)
    check_equal(made, expected, clear)
    assert clear.float().mean() >= 0.5
    with pytest.raises(AssertionError):  # the primer matters
        check_equal(both(given | {"primer": None}, nodes)[0], expected, clear)


@pytest.mark.parametrize("rows", [ROW_VOTERS, 0])
def test_a_primer_alone_says_what_it_says_on_the_v1_runner(tmp_path, rows):
    """Texts in which nothing stands twice: as on the V1 runner each row of the primer counts by its equal tokens."""
    vocab, nodes, depth, texts = 40, 8, 3, 4
    rng = np.random.default_rng(2)
    history = np.stack([rng.permutation(vocab)[:6] for _ in range(texts)]).astype(np.int32)
    # Each row's context is the end of a text, as long as it may be, in front of it something else.
    contexts = history[rng.integers(0, texts, rows), ::-1][:, :CONTEXT].copy()
    for row, equal in zip(contexts, rng.integers(1, CONTEXT + 1, rows), strict=True):
        row[equal:] = vocab - 1
    successors = rng.permuted(np.tile(np.arange(8), (rows, 1)), axis=1)[:, :3]
    chances = rng.dirichlet(np.ones(3), rows)
    path = save_primer(tmp_path / "p.npz", contexts, successors, chances, vocab)
    length, at = np.array([6, 6, 6, 0]), np.arange(texts)
    batch = DraftBatch(at, history, at, length, np.full(texts, depth), np.full(texts, nodes))
    theirs = RecyclingProposer(vocab, texts, primer=path).propose(batch)
    recycling = DeviceRecycling(texts, 10, nodes, depth, 0, vocab, "cpu", device_primer(path, vocab, "cpu"))
    most = torch.full((texts,), 64, dtype=torch.int32)
    recycling.propose(torch.from_numpy(history), torch.from_numpy(length).int(), torch.arange(texts), most, most)
    for text in range(texts):
        expected = trees_paths(theirs, text)
        assert (len(expected) == nodes) == (rows > 0 and text < 3)
        assert paths(recycling.grown, text) == pytest.approx(expected, abs=1e-4)


def primed(tmp_path, **changes):
    """Arguments for a text in which 1 was followed by 2, with a primer that knows 9 1 -> 3, 1 -> 2 and 7 -> 8."""
    contexts = np.array([[1, 9, -1, -1], [1, 5, 5, 5], [7, -1, -1, -1]])
    successors, chances = np.array([[3, -1], [2, -1], [8, -1]]), np.array([[1.0, 0], [1.0, 0], [1.0, 0]])
    path = save_primer(tmp_path / "p.npz", contexts, successors, chances, 20)
    return hand([6, 1, 2, 9, 1], primer=device_primer(path, 20, "cpu"), **changes)


def test_text_and_primer_are_weighed_against_each_other(tmp_path):
    given = primed(tmp_path)
    key = child_path(child_path(torch.tensor(0), torch.tensor(1)), torch.tensor(9))
    row = given["primer"].keys.tolist().index(int(key))
    votes = dict(zip(given["primer"].tokens[row].tolist(), given["primer"].votes[row].tolist(), strict=True))
    total = 1 + WEIGHTS[0] + float(given["primer"].total[row])
    tree = grown(given | {"max_depth": 1})
    assert tree[(2,)] == pytest.approx(np.log((WEIGHTS[0] + votes[2]) / total), abs=1e-5)
    assert tree[(3,)] == pytest.approx(np.log(votes[3] / total), abs=1e-5)
    assert votes[3] > 3 * votes[2]  # the longer context counts more


def test_a_primer_is_bounded_like_the_text(tmp_path):
    given = primed(tmp_path)
    assert max(map(len, grown(given | {"max_depth": 1}))) == 1
    assert (2,) not in grown(given | {"vocab": 2}) and grown(given | {"vocab": 2}) == {}
    assert sum(len(path) == 1 for path in grown(given | {"branches": torch.tensor([1], dtype=torch.int32)})) == 1
    assert grown(given | {"branches": torch.tensor([0], dtype=torch.int32)}) == {}
    given["history"][0, 4] = 7
    assert list(grown(given, 3)) == [(8,)]  # nothing in the text is a 7


def test_a_primer_that_the_kernel_does_not_take_is_refused(tmp_path):
    given = primed(tmp_path)
    wrong = {"start": given["primer"].start[:-2], "keys": given["primer"].keys.int(), "total": torch.zeros(1)}
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            recycle(**(given | {"primer": replace(given["primer"], **{name: tensor})}), out=sevens(1, 2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"history": torch.zeros(7, 60, dtype=torch.int64)}, "history"),
        ({"history": torch.zeros(60, 7, dtype=torch.int32).T}, "history"),
        ({"length": torch.zeros(6, dtype=torch.int32)}, "length"),
        ({"slot": torch.zeros(7, dtype=torch.int32)}, "slot"),
        ({"place": torch.zeros(7, dtype=torch.int32)}, "place"),
        ({"place": torch.zeros(6, 32, dtype=torch.int32)}, "place"),
        ({"successors": torch.zeros(7, 31, 8, dtype=torch.int32)}, "successors"),
        ({"successors": torch.zeros(7, 32, dtype=torch.int32)}, "successors"),
        ({"chances": torch.zeros(7, 32, 7)}, "chances"),
        ({"chances": torch.zeros(7, 32, 8).double()}, "chances"),
        ({"branches": torch.zeros(7, dtype=torch.int64)}, "branches"),
        ({"last": torch.zeros(14, dtype=torch.int32)[::2]}, "last"),
        ({"weight": torch.zeros(CONTEXT - 1)}, "weight"),
        ({"out": Grown.empty(6, 8, "cpu")}, "tokens"),
        ({"out": Grown(*(torch.zeros(7, 8, dtype=torch.int32) for _ in FIELDS))}, "score"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        recycle(**(case(0) | {"out": sevens(7, 8)} | changes))
