# SPDX-License-Identifier: Apache-2.0
"""The law that each rule gives, by exact enumeration: every draft, everything that the coins can do, float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specinfer_vllm.verify.reference.drafted import ROOT, Drafted, Draw, after_refusal, without
from specinfer_vllm.verify.reference.mss import mss, top_k_plus_one
from specinfer_vllm.verify.reference.traversal import traversal
from specinfer_vllm.verify.reference.without_replacement import without_replacement

VOCAB = 3
EXACT, BIASED = 1e-12, 1e-3
Laws = dict[tuple[int, ...], np.ndarray]  # law of the next token by the tokens before it


class Branches:
    """A Chance that replays a script of outcomes, then takes the first one and notes what else could have come."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.taken, self.weight, self.open = script, [], 1.0, []

    def choose(self, law: Sequence[float]) -> int:
        possible = [outcome for outcome, probability in enumerate(law) if probability > 0]
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            outcome = possible[0]
            self.open += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(outcome)
        self.weight *= law[outcome]
        return outcome

    def accepts(self, node: int, number: int, target: float, drafted: float) -> bool:
        chance = 1.0 if target >= drafted and target > 0 else target / drafted
        return self.choose((chance, 1 - chance)) == 0

    def pick(self, node: int, law: np.ndarray) -> int:
        return self.choose(law.tolist())


def outcomes(run: Callable) -> Iterator[tuple[float, object]]:
    """(probability, result) of everything that run(chance) can do."""
    scripts = [[]]
    while scripts:
        chance = Branches(scripts.pop())
        result = run(chance)
        scripts += chance.open
        yield chance.weight, result


def naive(tree: Drafted, p: np.ndarray, chance) -> tuple[list[int], list[int]]:
    return mss(replace(tree, draws={}), p, chance)


def traversal_iid(tree: Drafted, p: np.ndarray, chance) -> tuple[list[int], list[int]]:
    return traversal(tree, p, chance, replacement=True)


# How to draw k tokens from a law: the tokens, and the law to be stored with them.
def iid(law, k, choose):
    return [choose(law) for _ in range(k)], law


def no_replacement(law, k, choose):
    drawn = []
    for _ in range(k):
        drawn.append(choose(without(law, drawn)))
    return drawn, law


def no_replacement_stopping(law, k, choose):
    return no_replacement(law, min(k, np.count_nonzero(law)), choose)


def rest_of_top_1(law, k, choose):
    rest = without(law, [int(law.argmax())])
    return [choose(rest)], rest


def top_k(law, k, choose):
    return np.argsort(-law)[:k].tolist(), law


def top_p_stored_before(law, k, choose):
    cut = np.where(law >= np.sort(law)[-2], law, 0)
    return [choose(cut / cut.sum()) for _ in range(k)], law


# One-hot children beside the sampled ones, given the law and what was sampled.
def none(law, drawn):
    return []


def best(law, drawn):
    return [int(law.argmax())]


def after_the_first(law, drawn):
    """As an n-gram table would have it, but looking at the draws: all that matters is the coins."""
    return [(drawn[0] + 1) % len(law)] if drawn else [0, 1]


def every(law, drawn):
    return list(range(len(law)))


def draft(ssms, widths, draw, choose, fixed=none, below_fixed=True) -> tuple[Drafted, list[tuple[int, ...]]]:
    """Trees of `ssms` (laws of each) of shape `widths` (one for each), merged, and the path of every node."""
    tokens, parent, paths, draws, laws = [0], [-1], [()], {}, []

    def grow(node: int, by: Sequence[int]) -> None:
        made: dict[int, list[int]] = {}  # token: SSMs that drew it
        sampled = []
        for ssm in by:
            level = len(paths[node])
            if level < len(widths[ssm]):
                q = ssms[ssm](paths[node])
                drawn, stored = draw(q, widths[ssm][level], lambda law: choose(law.tolist()))
                laws.append(stored)
                sampled += [(token, len(laws) - 1) for token in drawn]
                for token in drawn:
                    made.setdefault(token, [])
                    made[token] += [ssm] if ssm not in made[token] else []
        if by and len(paths[node]) < max(map(len, widths)):
            for token in fixed(ssms[by[0]](paths[node]), [token for token, _ in sampled]):
                made.setdefault(token, list(by) if below_fixed else [])
        places = {}
        for token in made:
            places[token] = len(tokens)
            tokens.append(token)
            parent.append(node)
            paths.append((*paths[node], token))
        if sampled:
            draws[node] = [Draw(places[token], law) for token, law in sampled]
        for token, drawers in made.items():
            grow(places[token], drawers)

    grow(ROOT, range(len(ssms)))
    return Drafted(tokens, parent, draws, laws), paths


def random_laws(rng: np.random.Generator, depth: int, vocab: int = VOCAB) -> Laws:
    return {
        prefix: rng.dirichlet(np.ones(vocab))
        for length in range(depth + 1)
        for prefix in itertools.product(range(vocab), repeat=length)
    }


def plain(p: Laws, prefix: tuple[int, ...], length: int) -> np.ndarray:
    """The LLM's law of the next `length` tokens."""
    if length == 0:
        return np.ones(())
    return np.stack([p[prefix][x] * plain(p, (*prefix, x), length - 1) for x in range(len(p[prefix]))])


def emitted_law(rule, p: Laws, drafts, length: int) -> tuple[np.ndarray, float]:
    """(law of the first `length` tokens when plain decoding follows the step, mean tokens of the step)."""
    law, mean = np.zeros((len(p[()]),) * length), 0.0
    behind = {prefix: plain(p, prefix, length - len(prefix)) for prefix in p}
    for chance, (tree, paths) in drafts:
        at_nodes = np.stack([p[path] for path in paths])
        for weight, (emitted, _) in outcomes(lambda coins, tree=tree, at=at_nodes: rule(tree, at, coins)):
            law[tuple(emitted)] += chance * weight * behind.get(tuple(emitted), 1.0)
            mean += chance * weight * len(emitted)
    return law, mean


def distance(rule, draw, seed, widths, fixed=none, below_fixed=True, vocab=VOCAB, spoil=lambda tree: tree) -> float:
    """Total variation between what a step of `rule` gives and the LLM, over the deepest path + 1 tokens."""
    rng = np.random.default_rng(seed)
    depth = max(map(len, widths))
    p, ssms = random_laws(rng, depth, vocab), [random_laws(rng, depth, vocab) for _ in widths]
    spread = [laws.__getitem__ for laws in ssms]

    def drafted(chance: Branches):
        tree, paths = draft(spread, widths, draw, chance.choose, fixed, below_fixed)
        return spoil(tree), paths

    law, _ = emitted_law(rule, p, outcomes(drafted), depth + 1)
    assert law.sum() == pytest.approx(1, abs=1e-10)
    return float(abs(law - plain(p, (), depth + 1)).sum() / 2)


# Every rule with the draws it is exact for.
PAIRS = {
    "naive, top-k": (naive, top_k),
    "naive, independent": (naive, iid),
    "mss, independent": (mss, iid),
    "without replacement": (without_replacement, no_replacement),
    "without replacement, stopping": (without_replacement, no_replacement_stopping),
    "top-(k-1)+1": (top_k_plus_one, rest_of_top_1),
    "traversal, independent": (traversal_iid, iid),
    "traversal, without replacement": (traversal, no_replacement),
}
pairs = pytest.mark.parametrize(("rule", "draw"), PAIRS.values(), ids=PAIRS.keys())
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pairs
@pytest.mark.parametrize("widths", SHAPES, ids=str)
def test_a_step_gives_the_llms_law(rule, draw, widths):
    for seed in range(6):
        assert distance(rule, draw, seed, [widths], best if draw is rest_of_top_1 else none) <= EXACT


@pairs
@pytest.mark.parametrize("shapes", [[(1, 1), (1, 1)], [(2, 1), (1, 1)], [(1,), (3,)]], ids=str)
def test_merged_trees_of_two_ssms_give_the_llms_law(rule, draw, shapes):
    assert distance(rule, draw, 11, shapes, best if draw is rest_of_top_1 else none) <= EXACT


@pairs
@pytest.mark.parametrize("fixed", [best, after_the_first, every])
@pytest.mark.parametrize("below_fixed", [True, False], ids=["drawn below", "bare"])
def test_one_hot_children_leave_the_law_as_it_is(rule, draw, fixed, below_fixed):
    """Whichever they are, even when they depend on what was sampled, and whether or not an SSM drafts below them."""
    for seed, widths in enumerate([[(1, 1)], [(2, 1)], [(1,), (1,)]]):
        assert distance(rule, draw, seed, widths, fixed, below_fixed) <= EXACT


@pairs
def test_three_tokens_from_four(rule, draw):
    assert distance(rule, draw, 5, [(2, 1)], best if draw is rest_of_top_1 else none, vocab=4) <= EXACT
    assert distance(rule, draw, 6, [(3,)], best if draw is rest_of_top_1 else none, vocab=4) <= EXACT


@pytest.mark.parametrize("draw", [no_replacement, no_replacement_stopping])
@pytest.mark.parametrize("rule", [without_replacement, traversal])
def test_an_exhausted_support_leaves_the_law_as_it_is(rule, draw):
    """q has two tokens of four and three are asked for: the third is uniform over the rest, or is not drawn."""
    rng = np.random.default_rng(3)
    p = random_laws(rng, 1, 4)
    q = np.array([0.0, 0.7, 0.0, 0.3])
    law, _ = emitted_law(rule, p, outcomes(lambda chance: draft([lambda _: q], [(3,)], draw, chance.choose)), 2)
    assert abs(law - plain(p, (), 2)).sum() / 2 <= EXACT


# What the test above must catch.
def draws_compared_with_themselves(tree: Drafted, p: np.ndarray, chance) -> tuple[list[int], list[int]]:
    """r < d / d: the draft's probability stands where the LLM's belongs, so every first draw passes."""
    node, emitted = ROOT, []
    while node in tree.draws:
        node = tree.draws[node][0].node
        emitted.append(tree.tokens[node])
    return [*emitted, chance.pick(node, p[node])], []


def without_second_draws(tree: Drafted) -> Drafted:
    """A merged tree read as a set of nodes: the first SSM's draw is kept, later ones of the same token dropped."""
    draws = {}
    for node, made in tree.draws.items():
        seen: dict[int, Draw] = {}
        for draw in made:
            seen.setdefault(draw.node, draw)
        draws[node] = list(seen.values())
    return replace(tree, draws=draws)


def by_token(tree: Drafted) -> Drafted:
    ordered = {node: sorted(made, key=lambda draw: tree.tokens[draw.node]) for node, made in tree.draws.items()}
    return replace(tree, draws=ordered)


CONTROLS = {
    "r < d/d": (draws_compared_with_themselves, iid, [(1, 1)], lambda tree: tree),
    "top-k children with the full q": (mss, top_k, [(2, 1)], lambda tree: tree),
    "top-k children with the full q, traversal": (traversal, top_k, [(2, 1)], lambda tree: tree),
    "q stored before top-p": (mss, top_p_stored_before, [(2, 1)], lambda tree: tree),
    "merged and de-duplicated": (mss, iid, [(2, 1), (2, 1)], without_second_draws),
    "shuffled draws": (without_replacement, no_replacement, [(2, 1)], by_token),
    "shuffled draws, traversal": (traversal, no_replacement, [(2, 1)], by_token),
    "without replacement, q not renormalised": (mss, no_replacement, [(2, 1)], lambda tree: tree),
}


@pytest.mark.parametrize(("rule", "draw", "widths", "spoil"), CONTROLS.values(), ids=CONTROLS.keys())
def test_a_biased_rule_is_caught(rule, draw, widths, spoil):
    assert distance(rule, draw, 0, widths, spoil=spoil) > BIASED


def all_drafts(q: Laws, draw, fixed):
    return outcomes(lambda chance: draft([q.__getitem__], [(2, 2)], draw, chance.choose, fixed))


def test_better_rules_give_more_tokens_per_step():
    """Mean over six random pairs of models, shape (2, 2)."""
    compared = {name: PAIRS[name] for name in ("naive, independent", "mss, independent", "without replacement")}
    compared |= {name: PAIRS[name] for name in ("traversal, independent", "traversal, without replacement")}
    compared["top-(k-1)+1"] = PAIRS["top-(k-1)+1"]
    mean = dict.fromkeys(compared, 0.0)
    for seed in range(6):
        rng = np.random.default_rng(100 + seed)
        p, q = random_laws(rng, 2), random_laws(rng, 2)
        for name, (rule, draw) in compared.items():
            fixed = best if draw is rest_of_top_1 else none
            mean[name] += emitted_law(rule, p, all_drafts(q, draw, fixed), 3)[1] / 6
    print(*(f"{tokens:.3f} tokens per step: {name}" for name, tokens in mean.items()), sep="\n")
    assert mean["naive, independent"] < mean["mss, independent"] < mean["without replacement"]
    assert mean["mss, independent"] <= mean["traversal, independent"]
    assert mean["without replacement"] <= mean["traversal, without replacement"]


def test_nothing_left_after_a_refusal_keeps_the_residual():
    """Only rounding refuses a draw where R <= q everywhere: the walk then goes on with R, not with 0/0."""
    law = np.array([0.25, 0.5, 0.25])
    assert (after_refusal(law, law) == law).all()
