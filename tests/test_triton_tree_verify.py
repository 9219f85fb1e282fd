# SPDX-License-Identifier: Apache-2.0
"""The walk in Triton's interpreter against the float64 references and the torch rules, coin by coin."""

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from test_verify_enumeration import (  # noqa: E402
    Branches,
    best,
    draft,
    iid,
    naive,
    no_replacement,
    none,
    outcomes,
    plain,
    random_laws,
    rest_of_top_1,
)
from test_verify_rules import Coins, batch_of, random_batch  # noqa: E402
from triton_cases import chain, comb, mapped, random_tree, star  # noqa: E402

from specinfer_vllm.tree.topology import from_arrays  # noqa: E402
from specinfer_vllm.triton_kernels import tuning  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_verify as torch_reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_verify import DraftRows, Walk, law_sums, residual_size, verify  # noqa: E402
from specinfer_vllm.verify import greedy as greedy_rule  # noqa: E402
from specinfer_vllm.verify.coins import ACCEPT, SAMPLE, coins  # noqa: E402
from specinfer_vllm.verify.reference.mss import mss, top_k_plus_one  # noqa: E402
from specinfer_vllm.verify.reference.without_replacement import without_replacement  # noqa: E402
from specinfer_vllm.verify.rules import RULES  # noqa: E402
from specinfer_vllm.verify.walk import TreeRows  # noqa: E402

# rule: (reference, how children are drawn, one-hot children, the kernel's drawing)
CASES = {
    "mss": (mss, iid, none, "iid"),
    "without_replacement": (without_replacement, no_replacement, none, "without_replacement"),
    "top_k_plus_one": (top_k_plus_one, rest_of_top_1, best, "iid"),
    "naive": (naive, iid, none, None),
}
rules = pytest.mark.parametrize("rule", CASES)
# More by hand: SPECINFER_TREES=10000 takes half an hour.
TREES = int(os.environ.get("SPECINFER_TREES", 200))


def draft_rows(batch) -> DraftRows:
    """The batch's draws as the kernel takes them, laws in float32 as an SSM would have them."""
    draws, under = batch.draws, batch.rows.parent[batch.draws.row]
    listed = np.lexsort((draws.order.numpy(), under.numpy()))
    counts = torch.bincount(under, minlength=len(batch.rows.tokens))
    laws = draws.laws.float()
    return DraftRows(
        torch.cat((counts.new_zeros(1), counts.cumsum(0))).int(),
        draws.row[listed].int(),
        draws.law[listed].int(),
        laws,
        *law_sums(laws),
    )


def arguments(batch, drawing="iid", **others) -> dict:
    """verify's arguments for a batch of test_verify_rules; drawing None leaves the draws out."""
    offsets, roots = batch.trees.offsets, batch.rows.roots
    parent = batch.trees.parent_row - offsets[batch.trees.request]
    parent[roots] = -1
    made = {"draws": draft_rows(batch), "drawing": drawing} if drawing else {}
    return {
        "logits": batch.law.log().float(),
        "tokens": batch.rows.tokens.int(),
        "parent": torch.from_numpy(parent.astype(np.int32)),
        "start": torch.from_numpy(offsets.astype(np.int32)),
        "max_depth": batch.rows.max_depth,
        "seed": batch.seed[roots],
        "position": batch.position,
    } | made | others  # fmt: skip


@rules
def test_the_kernel_verifies_like_the_reference(rule):
    reference, draw, _, drawing = CASES[rule]
    batch = random_batch(np.random.default_rng(21), TREES, draw)
    accept = coins(batch.seed[:, None], batch.position[:, None], ACCEPT, index=torch.arange(9)[None, :]).numpy()
    picked = coins(batch.seed, batch.position, SAMPLE).numpy()
    walk = verify(**arguments(batch, drawing))
    law, lengths = batch.law.numpy(), []
    for request, tree in enumerate(batch.drafted):
        emitted, nodes = reference(tree, law[batch.span(request)], Coins(batch, request, accept, picked))
        padding = [-1] * (batch.rows.max_depth + 1 - len(emitted))
        assert walk.tokens[request].tolist() == emitted + padding
        assert walk.rows[request].tolist() == [int(batch.trees.offsets[request]) + node for node in nodes] + padding
        assert int(walk.num_tokens[request]) == len(emitted)
        lengths.append(len(emitted))
    assert np.bincount(lengths, minlength=4)[1:4].min() > TREES // 40


@rules
def test_the_torch_reference_walks_and_tosses_the_same(rule):
    _, draw, _, drawing = CASES[rule]
    batch = random_batch(np.random.default_rng(3), 60, draw)
    greedy = torch.arange(60) % 5 == 0
    margin = torch.zeros(60, dtype=torch.float64)
    given = arguments(batch, drawing, greedy=greedy)
    given["logits"][int(given["start"][1])] = torch.nan
    made, expected = verify(**given), torch_reference.verify(**given, margin=margin)
    for field in ("tokens", "rows", "num_tokens"):
        assert torch.equal(getattr(made, field)[margin > 1e-6], getattr(expected, field)[margin > 1e-6])
    assert (margin > 1e-6).sum() >= 58 and (margin[~greedy][1:] < 1).all()


class Regions(Branches):
    """Every outcome of the coins together with the interval that each coin must lie in for it."""

    def __init__(self, script):
        super().__init__(script)
        self.intervals = {}

    def accepts(self, node, number, target, drafted):
        chance = 1.0 if target >= drafted and target > 0 else target / drafted
        accepted = self.choose((chance, 1 - chance)) == 0
        self.intervals[node, ACCEPT, number] = (0.0, chance) if accepted else (chance, 1.0)
        return accepted

    def pick(self, node, law):
        token = self.choose(law.tolist())
        cdf = np.cumsum(law) / law.sum()
        self.intervals[node, SAMPLE, 0] = (cdf[token] - law[token] / law.sum(), cdf[token])
        return token


def regions(run):
    """(probability, intervals, result) of everything that run(chance) can do."""
    scripts = [[]]
    while scripts:
        chance = Regions(scripts.pop())
        result = run(chance)
        scripts += chance.open
        yield chance.weight, chance.intervals, result


BINS = 32
COINS = ((ACCEPT, 0), (ACCEPT, 1), (ACCEPT, 2), (SAMPLE, 0))


@functools.cache
def coin_table() -> tuple[np.ndarray, np.ndarray]:
    """The COINS of 2^22 positions under seed 0 [positions, 4], and a position for every cell of their bins [BINS^4]."""
    positions = torch.arange(1 << 22)
    tossed = [
        coins(torch.tensor(0), positions, purpose, index=torch.tensor(number) if purpose == ACCEPT else 0)
        for purpose, number in COINS
    ]
    tossed = torch.stack(tossed, dim=1).numpy()
    cell = ((tossed * BINS).astype(np.int64) * BINS ** np.arange(4)).sum(axis=1)
    found = np.full(BINS**4, -1)
    found[cell] = positions.numpy()
    return tossed, found


def position_for(node: int, intervals: dict, end: str) -> int:
    """A position at which the coins of the node's row lie within their intervals: in the bin next to `end`, if any."""
    tossed, found = coin_table()
    wanted = [intervals.get((node, *coin), (0.0, 1.0)) for coin in COINS]
    bins = [int(np.ceil(low * BINS)) if end == "low" else int(high * BINS) - 1 for low, high in wanted]
    if all(low * BINS <= b and b + 1 <= high * BINS for b, (low, high) in zip(bins, wanted, strict=True)):
        position = found[(np.array(bins) * BINS ** np.arange(4)).sum()]
        if position >= 0:
            return int(position)
    fits = np.ones(len(tossed), bool)
    for coin, (low, high) in zip(tossed.T, wanted, strict=True):
        fits &= (coin > low + (high - low) / 50) & (coin < high - (high - low) / 50)
    assert fits.any(), "a region too small to be hit: choose other laws"
    return int(fits.argmax())


def enumerated(rule, widths, seed, end):
    """(every draft and every region of its coins, hit next to one end, as one batch; probabilities; the LLM's laws)."""
    reference, draw, fixed, _ = CASES[rule]
    rng = np.random.default_rng(seed)
    depth = max(map(len, widths))
    p, ssms = random_laws(rng, depth), [random_laws(rng, depth) for _ in widths]
    spread = [laws.__getitem__ for laws in ssms]
    trees, laws, weights, positions = [], [], [], []
    drafts = outcomes(lambda chance: draft(spread, widths, draw, chance.choose, fixed))
    for chance, (tree, paths) in drafts:
        at_nodes = np.stack([p[path] for path in paths])
        for weight, intervals, _ in regions(lambda c, tree=tree, at=at_nodes: reference(tree, at, c)):
            positions += [position_for(node, intervals, end) for node in range(len(tree.tokens))]
            trees.append(tree)
            laws.append(at_nodes)
            weights.append(chance * weight)
    batch = batch_of(trees, np.concatenate(laws), np.zeros(len(trees), np.int64))
    return replace(batch, position=torch.tensor(positions)), weights, p


def distance(walk: Walk, weights, p, length: int) -> float:
    """Total variation between what the walks give, continued by plain decoding, and the LLM."""
    law = np.zeros((3,) * length)
    for tokens, count, weight in zip(walk.tokens.tolist(), walk.num_tokens.tolist(), weights, strict=True):
        emitted = tuple(tokens[:count])
        law[emitted] += weight * plain(p, emitted, length - count)
    return float(abs(law - plain(p, (), length)).sum() / 2)


SHAPES = {
    "naive": [[(1, 1)]],
    "mss": [[(1, 1)], [(2,)], [(1,), (1,)]],
    "without_replacement": [[(2,)], [(1, 2)], [(1,), (2,)]],
    "top_k_plus_one": [[(1, 1)], [(1,), (1,)]],
}


@pytest.mark.parametrize("end", ["low", "high"])
@pytest.mark.parametrize(("rule", "widths"), [(rule, widths) for rule in SHAPES for widths in SHAPES[rule]], ids=str)
def test_a_step_of_the_kernel_gives_the_llms_law(rule, widths, end):
    """Every draft, every region of the coins: the kernel is given coins from either end of each region in turn."""
    batch, weights, p = enumerated(rule, widths, 8, end)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    walk = verify(**arguments(batch, CASES[rule][3]))
    assert distance(walk, weights, p, max(map(len, widths)) + 1) <= 1e-12


def test_the_wrong_drawing_is_caught():
    """Negative control for the enumeration: draws without replacement verified as independent ones."""
    batch, weights, p = enumerated("without_replacement", [(2,)], 8, "high")
    assert distance(verify(**arguments(batch, "iid")), weights, p, 2) > 1e-3


@rules
def test_several_blocks_and_dtypes_decide_like_torch(rule, monkeypatch):
    """A vocabulary of several uneven blocks, logits and laws in every dtype, -inf in places, rows with a stride."""
    draw, drawing = CASES[rule][1], CASES[rule][3]
    monkeypatch.setattr(tuning, "verify_plan", lambda *_: tuning.VerifyPlan(block=16, num_warps=1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        batch = random_batch(np.random.default_rng(7), 12, draw, vocab=83)
        logits = batch.law.log().to(dtype)
        laws = batch.draws.laws.to(dtype).float()
        laws /= laws.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        batch = replace(batch, law=logits.double().softmax(-1), draws=replace(batch.draws, laws=laws.double()))
        expected = RULES[rule].verify(*batch.arguments())
        padded = torch.full((len(logits), 100), float("nan"), dtype=dtype)
        padded[:, :83] = logits
        walk = verify(**arguments(batch, drawing, logits=padded[:, :83], tokens=batch.rows.tokens))
        width = expected.tokens.shape[1]
        assert torch.equal(walk.tokens[:, :width], expected.tokens)
        assert torch.equal(walk.num_tokens.long(), expected.num_tokens)


FOREST = [random_tree(np.random.default_rng(2), 17), [], chain(1), chain(9), star(8), comb(15), []]


def forest(vocab: int):
    """Trees whose walks go deep: siblings carry different tokens, most rows favour one of their children."""
    rng = np.random.default_rng(5)
    offsets = np.cumsum([0, *map(len, FOREST)])
    parent = np.array([above for tree in FOREST for above in tree], np.int32)
    tokens = np.zeros(len(parent), np.int32)
    logits = rng.normal(size=(len(parent), vocab)).astype(np.float32)
    for start, end in zip(offsets, offsets[1:], strict=False):
        taken = {}
        for row in range(start, end):
            above = start + parent[row]
            free = sorted(set(range(vocab)) - taken.setdefault(above, set()))
            tokens[row] = rng.choice(free)
            taken[above].add(tokens[row])
            if parent[row] >= 0 and rng.random() < 0.8:
                logits[above, tokens[row]] += 6
    start, tokens, parent, logits = map(torch.from_numpy, (offsets.astype(np.int32), tokens, parent, logits))
    return {"logits": logits, "tokens": tokens, "parent": parent, "start": start}


def torch_rows(trees: dict) -> tuple[TreeRows, list[int]]:
    """The same trees for the torch rules, which know no request without rows; and the requests that have some."""
    filled = [r for r, tree in enumerate(FOREST) if tree]
    offsets = np.cumsum([0, *(len(tree) for tree in FOREST if tree)])
    return TreeRows.of(from_arrays(offsets, trees["tokens"].numpy(), trees["parent"].numpy())), filled


def test_greedy_walks_take_the_most_probable_child():
    trees = forest(20)
    trees["logits"][3, :] = 0.0  # equal: the lowest token
    rows, filled = torch_rows(trees)
    expected = greedy_rule.greedy(rows, trees["logits"])
    walk = verify(**trees, max_depth=rows.max_depth)
    assert torch.equal(walk.tokens[filled], expected.tokens) and torch.equal(walk.rows[filled], expected.rows)
    assert int(walk.num_tokens.max()) >= 4
    assert walk.num_tokens[[1, 6]].tolist() == [0, 0] and (walk.tokens[[1, 6]] == -1).all()


def test_greedy_and_sampled_requests_share_a_launch():
    trees = forest(20)
    rows, filled = torch_rows(trees)
    requests = len(FOREST)
    keys = {"seed": torch.arange(requests), "position": rows.depth + 50}
    greedy = torch.arange(requests) % 3 == 0
    mixed = verify(**trees, max_depth=rows.max_depth, **keys, greedy=greedy)
    sampled = verify(**trees, max_depth=rows.max_depth, **keys)
    best_only = verify(**trees, max_depth=rows.max_depth)
    for request in range(requests):
        expected = best_only if greedy[request] else sampled
        assert torch.equal(mixed.tokens[request], expected.tokens[request])
    assert not torch.equal(sampled.tokens, best_only.tokens)


def test_rows_outside_the_requests_are_left_alone():
    trees = forest(20)
    depth = torch_rows(trees)[0].max_depth
    expected = verify(**trees, max_depth=depth)
    poisoned = {
        "logits": torch.cat((trees["logits"], torch.full((3, 20), float("nan")))),
        "tokens": torch.cat((trees["tokens"], torch.full((3,), 7, dtype=torch.int32))),
        "parent": torch.cat((trees["parent"], torch.full((3,), 1, dtype=torch.int32))),
    }
    out = Walk(expected.tokens * 0, expected.rows * 0, expected.num_tokens * 0)
    assert verify(**(trees | poisoned), max_depth=depth, out=out) is out
    assert torch.equal(out.tokens, expected.tokens) and torch.equal(out.rows, expected.rows)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), None], ids=["NaN", "inf", "all masked"])
def test_a_row_without_a_law_emits_the_vocabularys_size_and_ends(fault):
    logits = torch.zeros(2, 20)
    if fault is None:
        logits[0] = -torch.inf
    else:
        logits[0, 4] = fault
    trees = {
        "logits": logits,
        "tokens": torch.tensor([3, 20]),
        "parent": torch.tensor([-1, 0], dtype=torch.int32),
        "start": torch.tensor([0, 2], dtype=torch.int32),
    }
    keys = {"seed": torch.tensor([1]), "position": torch.tensor([0, 1])}
    for given in ({}, keys):
        walk = verify(**trees, max_depth=0, **given)
        assert walk.tokens.tolist() == [[20]] and walk.num_tokens.tolist() == [1]


def test_no_coin_accepts_a_token_of_probability_0():
    """A coin of exactly 0 is not to be had from a seed: a chance of 0 on both sides takes its place."""
    trees = {
        "logits": torch.tensor([[-torch.inf, 1.0, 1.0]] * 2),
        "tokens": torch.tensor([2, 0]),
        "parent": torch.tensor([-1, 0], dtype=torch.int32),
        "start": torch.tensor([0, 2], dtype=torch.int32),
        "max_depth": 1,
        "position": torch.tensor([0, 1]),
    }
    integers = {"start": [0, 1, 1], "row": [1], "law": [0]}
    lists = {name: torch.tensor(values, dtype=torch.int32) for name, values in integers.items()}
    draws = DraftRows(**lists, laws=torch.tensor([[0.9, 0.1, 0.0]]))
    for seed in range(40):
        walk = verify(**trees, seed=torch.tensor([seed]), draws=draws)
        assert walk.num_tokens.tolist() == [1] and walk.tokens[0, 0] in (1, 2)
    # A chance of 0 on both sides: coin * 0 < 0 must not hold.
    nothing = replace(draws, laws=torch.tensor([[0.0, 0.5, 0.5]]))
    assert verify(**trees, seed=torch.tensor([0]), draws=nothing).num_tokens.tolist() == [1]


def test_a_support_that_is_exhausted_leaves_uniform_draws():
    """q knows one token of four: the second draw is uniform over the others, and is verified as such."""
    rng = np.random.default_rng(0)
    batch = random_batch(rng, 60, no_replacement, vocab=6)
    laws = torch.zeros_like(batch.draws.laws)
    laws[torch.arange(len(laws)), batch.rows.tokens[batch.draws.row][batch.draws.order == 0][0]] = 1.0
    batch = replace(batch, draws=replace(batch.draws, laws=laws))
    expected = RULES["without_replacement"].verify(*batch.arguments())
    walk = verify(**arguments(batch, "without_replacement"))
    assert torch.equal(walk.tokens[:, : expected.tokens.shape[1]], expected.tokens)


def test_logits_past_31_bits():
    """The second request's rows stand where row * stride does not fit 32 bits; nothing is allocated for it."""
    vocab, stride = 20, 1 << 30
    logits = mapped(3 * stride + vocab, torch.float32).as_strided((4, vocab), (stride, 1))
    logits[3, 11] = 5.0
    walk = verify(
        logits,
        torch.tensor([1, 2, 3, 11]),
        torch.tensor([-1, 0, 1, -1], dtype=torch.int32),
        torch.tensor([0, 3, 4], dtype=torch.int32),
        max_depth=2,
    )
    assert walk.tokens[1].tolist() == [11, -1, -1] and walk.rows[1].tolist() == [3, -1, -1]


def test_a_link_that_does_not_rise_ends_the_walk():
    parent = torch.tensor([-1, 1, 1], dtype=torch.int32)
    walk = verify(
        torch.zeros(3, 8),
        torch.zeros(3, dtype=torch.int64),
        parent,
        torch.tensor([0, 3], dtype=torch.int32),
        max_depth=5,
    )
    assert walk.num_tokens.tolist() == [1]


def broken(**changes):
    trees = forest(20) | {"max_depth": 8}
    requests, rows = len(trees["start"]) - 1, len(trees["tokens"])
    keys = {"seed": torch.zeros(requests, dtype=torch.int64), "position": torch.zeros(rows, dtype=torch.int64)}
    return trees | keys | changes


NO_INTS = torch.zeros(0, dtype=torch.int32)
NONE_DRAWN = DraftRows(torch.zeros(51, dtype=torch.int32), NO_INTS, NO_INTS, torch.zeros(0, 20))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits": torch.zeros(50, 20, dtype=torch.float64)}, "logits"),
        ({"logits": torch.zeros(3, 20)}, "logits"),
        ({"parent": torch.zeros(50, dtype=torch.int64)}, "parent"),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, "seed"),
        ({"position": None}, "position"),
        ({"seed": None, "greedy": torch.zeros(7, dtype=torch.bool)}, "greedy"),
        ({"max_depth": -1}, "max_depth"),
        ({"draws": NONE_DRAWN, "drawing": "shuffled"}, "drawing"),
        ({"draws": NONE_DRAWN, "seed": None}, "draws"),
        ({"draws": NONE_DRAWN, "drawing": "without_replacement"}, "draws.mass"),
        ({"draws": replace(NONE_DRAWN, laws=torch.zeros(0, 9))}, "draws.laws"),
        ({"draws": NONE_DRAWN, "residual": torch.zeros(5)}, "residual"),
        ({"out": Walk(torch.zeros(7, 9), torch.zeros(7, 9), torch.zeros(7))}, "tokens"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        verify(**broken(**changes))


def test_a_workspace_of_the_stated_size_does():
    batch = random_batch(np.random.default_rng(1), 5, iid)
    work = torch.full((residual_size(5, batch.law.shape[1]),), float("nan"))
    assert torch.equal(verify(**arguments(batch, residual=work)).tokens, verify(**arguments(batch)).tokens)
