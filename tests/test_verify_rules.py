# SPDX-License-Identifier: Apache-2.0
"""The sampled rules in torch: like their references on random trees, sound at the edges; and the ways of drafting."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_verify_enumeration import after_the_first, best, draft, iid, no_replacement, none, rest_of_top_1

from specinfer_vllm.config import NEED_SSMS, VERIFIERS
from specinfer_vllm.tree.topology import TokenTrees, from_arrays
from specinfer_vllm.verify import draft as drafting
from specinfer_vllm.verify.coins import ACCEPT, DRAFT, SAMPLE, coins
from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.mss import mss
from specinfer_vllm.verify.naive import naive, sample
from specinfer_vllm.verify.offers import independent
from specinfer_vllm.verify.reference import mss as reference_mss
from specinfer_vllm.verify.reference import traversal as reference_traversal
from specinfer_vllm.verify.reference import without_replacement as reference_without_replacement
from specinfer_vllm.verify.reference.drafted import Drafted, Draw
from specinfer_vllm.verify.rejection import refuse
from specinfer_vllm.verify.rules import RULES
from specinfer_vllm.verify.top_k_plus_one import top_k_plus_one
from specinfer_vllm.verify.traversal import traversal
from specinfer_vllm.verify.walk import TreeRows
from specinfer_vllm.verify.without_replacement import without_replacement

VOCAB = 5


pytestmark = pytest.mark.usefixtures("one_thread")


def traversal_iid(*arguments):
    return traversal(*arguments, replacement=True)


def reference_traversal_iid(tree, p, chance):
    return reference_traversal.traversal(tree, p, chance, replacement=True)


# rule: (torch, reference, draws)
RULE_TWINS = {
    "mss": (mss, reference_mss.mss, iid),
    "without_replacement": (without_replacement, reference_without_replacement.without_replacement, no_replacement),
    "top_k_plus_one": (top_k_plus_one, reference_mss.top_k_plus_one, rest_of_top_1),
    "traversal": (traversal, reference_traversal.traversal, no_replacement),
    "traversal, independent": (traversal_iid, reference_traversal_iid, iid),
}
twins = pytest.mark.parametrize(("rule", "reference", "draw"), RULE_TWINS.values(), ids=RULE_TWINS.keys())


@dataclass(frozen=True)
class Batch:
    trees: TokenTrees
    rows: TreeRows
    draws: Draws
    law: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    drafted: list[Drafted]

    def arguments(self) -> tuple:
        return self.rows, self.draws, self.law, self.seed, self.position

    def span(self, request: int) -> slice:
        return slice(int(self.trees.offsets[request]), int(self.trees.offsets[request + 1]))


def batch_of(drafted: list[Drafted], law: np.ndarray, seeds: np.ndarray) -> Batch:
    """One batch of all trees; request r starts at position 100 * r."""
    offsets = np.cumsum([0, *(len(tree.tokens) for tree in drafted)])
    trees = from_arrays(
        offsets=offsets,
        tokens=np.concatenate([tree.tokens for tree in drafted]),
        parent=np.concatenate([tree.parent for tree in drafted]),
    )
    rows = TreeRows.of(trees)
    columns, laws = [], []
    for tree, offset in zip(drafted, offsets, strict=False):
        for made in tree.draws.values():
            columns += [(offset + draw.node, len(laws) + draw.law, order) for order, draw in enumerate(made)]
        laws += tree.laws
    columns = torch.tensor(columns, dtype=torch.int64).reshape(-1, 3)
    # The rules may not count on any order of the list.
    columns = columns[torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))]
    draws = Draws(
        *columns.unbind(dim=1),
        laws=torch.from_numpy(np.stack(laws) if laws else np.zeros((0, law.shape[1]))),
        max_order=int(columns[:, 2].max()) + 1 if len(columns) else 0,
    )
    seed = torch.from_numpy(seeds)[rows.request]
    return Batch(trees, rows, draws, torch.from_numpy(law), seed, rows.depth + 100 * rows.request, drafted)


def sparse_law(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Now and then without some of its tokens."""
    law = rng.dirichlet(np.full(vocab, 0.7))
    if rng.random() < 0.3:
        law[rng.choice(vocab, 2, replace=False)] = 0
    return law / law.sum()


def random_tree(rng: np.random.Generator, draw, vocab: int) -> Drafted:
    """One or two SSMs of depth 0 to 3, with or without one-hot children."""
    widths = [rng.integers(1, 3, rng.integers(0, 4)).tolist() for _ in range(rng.integers(1, 3))]
    fixed = (none, best, after_the_first)[rng.integers(3)]
    laws: dict = {}

    def law_of(ssm):
        return lambda prefix: laws.setdefault((ssm, prefix), sparse_law(rng, vocab))

    spread = [law_of(ssm) for ssm in range(len(widths))]

    def choose(law):
        return int(np.searchsorted(np.cumsum(law), rng.random() * sum(law), side="right"))

    return draft(spread, widths, draw, choose, fixed, below_fixed=bool(rng.integers(2)))[0]


def random_batch(rng: np.random.Generator, requests: int, draw, vocab: int = VOCAB) -> Batch:
    drafted = [random_tree(rng, draw, vocab) for _ in range(requests)]
    rows = sum(len(tree.tokens) for tree in drafted)
    law = np.stack([sparse_law(rng, vocab) for _ in range(rows)])
    return batch_of(drafted, law, rng.integers(0, 2**62, requests))


@functools.cache
def random_batches(draw) -> list[Batch]:
    """10,000 trees."""
    rng = np.random.default_rng(17)
    return [random_batch(rng, 500, draw) for _ in range(20)]


class Coins:
    """A request's own coins, as the references ask for them."""

    def __init__(self, batch: Batch, request: int, accept: np.ndarray, picked: np.ndarray) -> None:
        self.offset, self.accept, self.picked = int(batch.trees.offsets[request]), accept, picked

    def accepts(self, node: int, number: int, target: float, drafted: float) -> bool:
        return self.accept[self.offset + node, number] * drafted < target

    def pick(self, node: int, law: np.ndarray) -> int:
        cdf = np.cumsum(law)
        coin = self.picked[self.offset + node]
        return int(np.searchsorted(cdf, min(coin * cdf[-1], np.nextafter(cdf[-1], 0)), side="right"))


@twins
def test_torch_verifies_like_the_reference_on_10_000_trees(rule, reference, draw):
    lengths = []
    for batch in random_batches(draw):
        index = torch.arange(200)[None, :]
        accept = coins(batch.seed[:, None], batch.position[:, None], ACCEPT, index=index).numpy()
        picked = coins(batch.seed, batch.position, SAMPLE).numpy()
        accepted = rule(*batch.arguments())
        tokens, rows, counts = accepted.tokens.tolist(), accepted.rows.tolist(), accepted.num_tokens.tolist()
        law = batch.law.numpy()
        for request, tree in enumerate(batch.drafted):
            emitted, nodes = reference(tree, law[batch.span(request)], Coins(batch, request, accept, picked))
            padding = [-1] * (len(tokens[request]) - len(emitted))
            assert tokens[request] == emitted + padding
            assert rows[request] == [int(batch.trees.offsets[request]) + node for node in nodes] + padding
            assert counts[request] == len(emitted)
            lengths.append(len(emitted))
    assert np.bincount(lengths, minlength=5)[2:5].min() > 100


@twins
def test_a_request_verifies_the_same_alone_and_in_a_batch(rule, reference, draw):
    rng = np.random.default_rng(5)
    batch = random_batch(rng, 30, draw)
    together = rule(*batch.arguments())
    seeds = batch.seed[batch.rows.roots].numpy()
    for request, tree in enumerate(batch.drafted):
        alone = batch_of([tree], batch.law[batch.span(request)].numpy(), seeds[[request]])
        accepted = rule(alone.rows, alone.draws, alone.law, alone.seed, batch.position[batch.span(request)])
        count = int(accepted.num_tokens[0])
        assert together.tokens[request, :count].tolist() == accepted.tokens[0, :count].tolist()
        assert int(together.num_tokens[request]) == count


@twins
def test_the_number_of_draws_may_come_from_the_host(rule, reference, draw):
    batch = random_batch(np.random.default_rng(8), 40, draw)
    most = max(sum(map(len, tree.draws.values())) for tree in batch.drafted)
    rows, draws, *rest = batch.arguments()
    told = rule(rows, replace(draws, max_per_request=most), *rest)
    assert torch.equal(told.tokens, rule(*batch.arguments()).tokens)


@twins
def test_float32_laws_decide_as_float64_ones_but_for_rare_ties(rule, reference, draw):
    batch = random_batch(np.random.default_rng(2), 2000, draw, vocab=50)
    exact = rule(*batch.arguments())
    rows, draws, law, *keys = batch.arguments()
    rounded = rule(rows, replace(draws, laws=draws.laws.float()), law.float(), *keys)
    assert rounded.tokens.dtype == torch.int64
    assert (exact.tokens != rounded.tokens).any(dim=1).sum() <= 2


@pytest.mark.parametrize("name", RULES)
def test_without_sampled_draws_a_rule_is_naive_sampling(name):
    batch = random_batch(np.random.default_rng(4), 100, iid)
    empty = torch.zeros(0, dtype=torch.int64)
    none_drawn = Draws(empty, empty, empty, batch.draws.laws[:0], max_order=0)
    accepted = RULES[name].verify(batch.rows, none_drawn, *batch.arguments()[2:])
    expected = naive(batch.rows, *batch.arguments()[2:])
    width = accepted.tokens.shape[1]  # a walk that ends early is not filled up
    assert torch.equal(accepted.num_tokens, expected.num_tokens) and width >= int(accepted.num_tokens.max())
    for field in ("tokens", "rows"):
        assert torch.equal(getattr(accepted, field), getattr(expected, field)[:, :width])


def one_draw(law: list[float], q: list[float], token: int) -> Batch:
    tree = Drafted([0, token], [-1, 0], {0: [Draw(1, 0)]}, [np.array(q)])
    return batch_of([tree], np.stack([law, law]), np.zeros(1, np.int64))


@twins
def test_coin_0_accepts_no_token_of_probability_0(monkeypatch, rule, reference, draw):
    batch = one_draw([0.0, 0.6, 0.4], [0.5, 0.5, 0.0], token=0)
    for module in ("rejection", "traversal"):
        monkeypatch.setattr(
            f"specinfer_vllm.verify.{module}.coins",
            lambda seed, position, purpose, index=0: torch.zeros(
                torch.broadcast_shapes(seed.shape, position.shape, torch.as_tensor(index).shape), dtype=torch.float64
            ),
        )
    accepted = rule(*batch.arguments())
    assert accepted.num_tokens.tolist() == [1]
    assert accepted.tokens[:, 0].tolist() == [1] and accepted.rows[:, 0].tolist() == [0]


@twins
def test_the_drafts_own_law_is_always_accepted(rule, reference, draw):
    law = [0.2, 0.5, 0.3]
    batch = one_draw(law, [0.0, 1.0, 0.0] if draw is rest_of_top_1 else law, token=1)
    if draw is rest_of_top_1:
        batch = replace(batch, law=torch.tensor([[0.0, 1.0, 0.0]] * 2, dtype=torch.float64))
    assert rule(*batch.arguments()).tokens[0, 0] == 1
    assert rule(*batch.arguments()).num_tokens.tolist() == [2]


def test_nothing_left_after_a_refusal_keeps_the_residual():
    """Only rounding refuses a draw where R <= q everywhere: the walk then goes on with R, not with 0/0."""
    law = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    batch = one_draw([0.25, 0.5, 0.25], [0.25, 0.5, 0.25], token=1)
    offers = independent(batch.rows, batch.draws)
    q = torch.tensor([[0.25, 0.5, 0.25]] * 2)
    left = refuse(law, q, offers, torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))
    assert torch.equal(left, torch.tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]]))


def three_tokens(rule, draw, k: int, own_positions: bool = False) -> float:
    """p-value that the first three tokens of many requests follow the LLM's law, steps keyed as the engine keys them.

    Each step drafts two levels of k draws a node; a token's law depends on the token before it.
    """
    rng, requests = np.random.default_rng(0), 60_000
    p, q = (torch.from_numpy(rng.dirichlet(np.full(3, 2.0), 3)) for _ in range(2))
    seed = torch.arange(requests)
    emitted, position, last = torch.zeros((requests, 6), dtype=torch.int64), 0 * seed, 0 * seed
    for _ in range(3):
        accepted = rule(*drafted_by_keys(p, q, seed, position, last, k, draw, own_positions))
        # Right to left: what stands behind a step's end is overwritten by the next step.
        for column in range(3):
            emitted[seed, (position + column).clamp(max=5)] = accepted.tokens[:, column]
        last = accepted.tokens.gather(1, accepted.num_tokens[:, None] - 1).squeeze(1)
        position = (position + accepted.num_tokens).clamp(max=3)
    counts = np.bincount((emitted[:, 0] * 9 + emitted[:, 1] * 3 + emitted[:, 2]).numpy(), minlength=27)
    law = (p[0][:, None, None] * p[:, :, None] * p[None, :, :]).flatten().numpy()
    return stats.chisquare(counts, requests * law).pvalue


def drafted_by_keys(p, q, seed, position, last, k, draw, own_positions) -> tuple:
    """A rule's arguments for trees of k different draws and k below each of them, one tree for every seed."""
    n, zero = len(seed), 0 * seed
    upper = draw(q[last], k, seed, position, zero)
    flat, below = upper.flatten(), position.repeat_interleave(k)
    index = 1 + torch.arange(k).repeat(n)
    key = (below + 1, 0 * index) if own_positions else (below, index)
    lower = draw(q[flat], k, seed.repeat_interleave(k), *key).reshape(n, k * k)
    tokens = torch.cat((last[:, None], upper, lower), dim=1)
    size = tokens.shape[1]
    parent = np.array([-1] + [0] * k + [1 + i // k for i in range(k * k)])
    rows = TreeRows.of(from_arrays(np.arange(n + 1) * size, tokens.flatten().numpy(), np.tile(parent, n)))
    row = (torch.arange(n)[:, None] * size + torch.arange(1, size)).flatten()
    order = (torch.arange(size - 1) % k).repeat(n)
    draws = Draws(row, rows.tokens[rows.parent[row]], order, q, max_order=k, max_per_request=size - 1)
    return rows, draws, p[rows.tokens], seed[rows.request], position[rows.request] + rows.depth


@pytest.mark.parametrize(
    ("rule", "draw", "k"),
    [
        (mss, drafting.iid, 1),
        (without_replacement, drafting.without_replacement, 2),
        (traversal, drafting.without_replacement, 2),
        (traversal, drafting.without_replacement, 1),
    ],
)
def test_steps_that_follow_each_other_are_independent(rule, draw, k):
    assert three_tokens(rule, draw, k) > 1e-3


def test_traversal_drafted_by_the_nodes_own_positions_is_caught():
    """A draw that one step refused would come again in the next."""
    assert three_tokens(traversal, drafting.without_replacement, 1, own_positions=True) < 1e-6


def keys(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(n), torch.full((n,), 3), torch.full((n,), 2)


LAW = np.array([0.4, 0.0, 0.25, 0.3, 0.05])


def pair_counts(tokens: torch.Tensor) -> np.ndarray:
    return np.bincount((tokens[:, 0] * 5 + tokens[:, 1]).numpy(), minlength=25)


def assert_law(counts: np.ndarray, law: np.ndarray) -> None:
    assert (counts[law == 0] == 0).all()
    assert stats.chisquare(counts[law > 0], counts.sum() * law[law > 0]).pvalue > 1e-3


def test_independent_draws_follow_their_law():
    n = 100_000
    tokens = drafting.iid(torch.from_numpy(LAW).expand(n, -1), 2, *keys(n))
    assert_law(pair_counts(tokens), np.outer(LAW, LAW).flatten())


def test_draws_without_replacement_follow_their_law_in_their_order():
    n = 100_000
    tokens = drafting.without_replacement(torch.from_numpy(LAW).expand(n, -1), 2, *keys(n))
    law = np.outer(LAW, LAW) / (1 - LAW)[:, None]
    np.fill_diagonal(law, 0)
    assert_law(pair_counts(tokens), law.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exhausted_support_is_marked(dtype):
    law = torch.from_numpy(LAW).to(dtype).expand(1000, -1)
    tokens = drafting.without_replacement(law, 5, *keys(1000))
    assert (tokens[:, 4] == -1).all()
    assert (tokens[:, :4].sort(dim=1).values == torch.tensor([0, 2, 3, 4])).all()


def test_top_k_plus_one_fixes_the_best_and_draws_from_the_rest():
    n = 50_000
    fixed, sampled, rest = drafting.top_k_plus_one(torch.from_numpy(LAW).expand(n, -1), 3, *keys(n))
    assert (fixed == torch.tensor([0, 3])).all()
    assert np.allclose(rest[0], [0, 0, 0.25 / 0.3, 0, 0.05 / 0.3])
    assert_law(np.bincount(sampled.numpy(), minlength=5), rest[0].numpy())


def test_top_k_plus_one_marks_tokens_without_probability():
    law = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    fixed, sampled, rest = drafting.top_k_plus_one(law, 3, *keys(2))
    assert fixed[0].tolist() == [1, -1] and sorted(fixed[1].tolist()) == [0, 1]
    assert sampled.tolist() == [-1, -1]
    assert (rest == 0).all()


@pytest.mark.parametrize("draw", [drafting.iid, drafting.without_replacement])
def test_draws_depend_on_their_keys_alone(draw):
    law = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(1000), 4))
    seed, position, index = torch.arange(4), torch.arange(4) + 7, torch.arange(4) * 3
    together = draw(law, 3, seed, position, index)
    for row in range(4):
        part = slice(row, row + 1)
        assert torch.equal(draw(law[part], 3, seed[part], position[part], index[part])[0], together[row])
    for other in ((seed + 1, position, index), (seed, position + 1, index), (seed, position, index + 1)):
        assert not torch.equal(draw(law, 3, *other), together)


def test_drafting_uses_coins_of_its_own():
    seed, position, index = keys(10)
    law = torch.from_numpy(LAW).expand(10, -1)
    own = sample(law, coins(seed, position, DRAFT, index=index << 32))
    assert torch.equal(drafting.iid(law, 1, seed, position, index).squeeze(1), own)


def test_every_rule_names_a_way_of_drafting():
    assert {name: rule.drafting for name, rule in RULES.items()} == {
        "naive": "any",
        "mss": "iid",
        "without_replacement": "without_replacement",
        "top_k_plus_one": "top_k_plus_one",
        "traversal": "without_replacement",
    }


def test_the_options_name_every_rule():
    """config.py must not import torch, so it names them once more."""
    assert set(VERIFIERS) - {"auto", "greedy"} == set(RULES)
    assert set(NEED_SSMS) == {name for name, rule in RULES.items() if rule.drafting != "any"}
