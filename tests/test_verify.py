# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules: torch against their float64 twins, and the law they give by exact enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from specinfer_vllm.tree.topology import TokenTrees, from_arrays
from specinfer_vllm.verify import coins as coin_tosses
from specinfer_vllm.verify.greedy import greedy
from specinfer_vllm.verify.naive import naive, sample
from specinfer_vllm.verify.reference import walk as reference
from specinfer_vllm.verify.walk import TreeRows

VOCAB = 5


def random_batch(rng: np.random.Generator, requests: int) -> TokenTrees:
    """Trees of 0 to 12 nodes over a tiny vocabulary, siblings distinct."""
    tokens, parent, offsets = [], [], [0]
    for _ in range(requests):
        own_tokens, own_parent, taken = [0], [-1], set()
        for _ in range(int(rng.integers(0, 13))):
            node, token = int(rng.integers(0, len(own_tokens))), int(rng.integers(0, VOCAB))
            if (node, token) not in taken:
                taken.add((node, token))
                own_tokens.append(token)
                own_parent.append(node)
        tokens += own_tokens
        parent += own_parent
        offsets.append(len(tokens))
    return from_arrays(offsets=np.array(offsets), tokens=np.array(tokens), parent=np.array(parent))


def per_request(trees: TokenTrees, request: int) -> tuple[list[int], list[int], slice]:
    span = slice(int(trees.offsets[request]), int(trees.offsets[request + 1]))
    return trees.tokens[span].tolist(), trees.parent[span].tolist(), span


def assert_equal(accepted, trees: TokenTrees, expected) -> None:
    for request in range(trees.num_requests):
        tokens, parent, span = per_request(trees, request)
        emitted, nodes = expected(tokens, parent, span)
        count = int(accepted.num_tokens[request])
        assert accepted.tokens[request, :count].tolist() == emitted
        assert (accepted.tokens[request, count:] == -1).all()
        assert (accepted.rows[request, :count] - span.start).tolist() == nodes
        assert (accepted.rows[request, count:] == -1).all()


@pytest.mark.parametrize("seed", range(20))
def test_torch_walks_like_the_reference(seed):
    rng = np.random.default_rng(seed)
    trees = random_batch(rng, requests=50)
    rows = TreeRows.of(trees)
    logits = torch.from_numpy(rng.standard_normal((trees.num_rows, VOCAB)))
    assert_equal(greedy(rows, logits), trees, lambda t, p, span: reference.greedy(t, p, logits[span].numpy()))
    seeds = torch.from_numpy(rng.integers(0, 2**62, trees.num_requests))[rows.request]
    position = rows.depth + 100 * rows.request
    law = logits.softmax(dim=-1)
    tossed = coin_tosses.coins(seeds, position, coin_tosses.SAMPLE)
    assert_equal(
        naive(rows, law, seeds, position),
        trees,
        lambda t, p, span: reference.naive(t, p, law[span].numpy(), lambda node: float(tossed[span][node])),
    )


def test_placeholders_match_nothing():
    """vLLM pads new decodes with -1: such a chain is never accepted."""
    from specinfer_vllm.engine.step import chain

    rows = TreeRows.of(chain(np.array([-1, -1, -1])))
    accepted = greedy(rows, torch.zeros(4, VOCAB))
    assert accepted.num_tokens.tolist() == [1]


def middle(law: np.ndarray, token: int) -> float:
    """A coin from the middle of the region that picks `token`; the region's size is the token's probability."""
    return float(np.cumsum(law)[token] - law[token] / 2)


def two_tokens(p: np.ndarray, children: tuple[int, ...], first: int, second: int) -> list[int]:
    """What a step emits when its coins ask for `first` at the root and `second` behind it."""
    tokens, parent = [0, *children], [-1, *[0] * len(children)]
    law = np.stack([p[0], *(p[1 + token] for token in children)])
    wanted = [first, *[second] * len(children)]
    return reference.naive(tokens, parent, law, lambda node: middle(law[node], wanted[node]))[0]


def naive_law(p: np.ndarray, drafts: list[tuple[int, ...]], chances: np.ndarray) -> np.ndarray:
    """Law of the first two tokens: every draft, every region of both coins.

    p [1 + 3, 3]: row 0 the law at the root, row 1 + t the law behind token t. chances[i] = probability of drafts[i].
    """
    law = np.zeros((3, 3))
    for children, chance in zip(drafts, chances, strict=True):
        for first, second in itertools.product(range(3), repeat=2):
            emitted = two_tokens(p, children, first, second)
            # After a step of one token the next one samples the second token, with the same coin.
            pair = (*emitted, second)[:2]
            law[pair] += chance * p[0][first] * p[1 + first][second]
    return law


@pytest.mark.parametrize("seed", range(6))
def test_naive_sampling_is_exact_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(3), size=4)
    drafts = [(), (0,), (1, 2), (2, 0), (0, 1, 2)]
    law = naive_law(p, drafts, rng.dirichlet(np.ones(len(drafts))))
    assert abs(law - p[0][:, None] * p[1:]).sum() / 2 <= 1e-12


def test_samples_follow_their_law_and_a_biased_sampler_is_caught():
    generator = np.random.default_rng(0)
    law = torch.from_numpy(generator.dirichlet(np.ones(50)))
    draws = 200_000
    tossed = coin_tosses.coins(torch.tensor(7), torch.arange(draws), coin_tosses.SAMPLE)
    counts = np.bincount(sample(law.expand(draws, -1), tossed).numpy(), minlength=50)
    assert stats.chisquare(counts, draws * law.numpy()).pvalue > 1e-4
    biased = np.bincount(sample(law.expand(draws, -1), tossed**1.02).numpy(), minlength=50)
    assert stats.chisquare(biased, draws * law.numpy()).pvalue < 1e-4


def test_no_coin_picks_a_token_without_probability():
    law = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0]])
    for coin in (0.0, 0.5, np.nextafter(0.5, 0), 1 - 2.0**-53):
        assert int(sample(law, torch.tensor([coin], dtype=torch.float64))) in (2, 4)


def test_coins_are_uniform_and_independent_across_keys():
    seeds, positions = torch.arange(300)[:, None], torch.arange(300)[None, :]
    tossed = coin_tosses.coins(seeds, positions, coin_tosses.SAMPLE)
    assert stats.kstest(tossed.flatten().numpy(), "uniform").pvalue > 1e-3
    assert 0 <= float(tossed.min()) and float(tossed.max()) < 1
    for other in (
        coin_tosses.coins(seeds + 1, positions, coin_tosses.SAMPLE),
        coin_tosses.coins(seeds, positions + 1, coin_tosses.SAMPLE),
        coin_tosses.coins(seeds, positions, coin_tosses.ACCEPT),
        coin_tosses.coins(seeds, positions, coin_tosses.SAMPLE, index=1),
    ):
        assert abs(np.corrcoef(tossed.flatten(), other.flatten())[0, 1]) < 0.02
        assert not torch.equal(tossed, other)
