# SPDX-License-Identifier: Apache-2.0
"""Sampled requests through the served engine: the law is plain vLLM's, and a seed fixes the output."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from engines import answers, engine
from scipy import stats
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine

# A text that repeats itself with two continuations in the balance, so that drafts are made and half of them refused.
PROMPT = "red blue red green red blue red green red blue red red green red blue red"
SAMPLES = 2048
BEST = 5  # a token is told apart if it is among the law's best 5, else it counts as "other"
FALSE_ALARM = 1e-3  # fixed beforehand


@pytest.fixture(scope="module")
def exact(model_path) -> dict[tuple[int, ...], float]:
    """Probabilities of the first three tokens at temperature 1, from plain vLLM's logprobs of every prefix."""
    with engine(model_path, max_num_seqs=32) as llm:
        ask = SamplingParams(temperature=0, max_tokens=1, logprobs=BEST)
        prompt = llm.get_tokenizer()(PROMPT).input_ids
        laws: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            prefixes = list(laws)
            asked = llm.generate([{"prompt_token_ids": [*prompt, *each]} for each in prefixes], ask, use_tqdm=False)
            laws = {
                (*prefix, token): laws[prefix] * math.exp(entry.logprob)
                for prefix, output in zip(prefixes, asked, strict=True)
                for token, entry in best(output.outputs[0].logprobs[0])
            }
        return laws


def best(entries: dict) -> list:
    """The BEST most probable tokens of one position."""
    return sorted(entries.items(), key=lambda item: -item[1].logprob)[:BEST]


@pytest.fixture(scope="module")
def tree(model_path, exact):
    """An engine that verifies nodes however unlikely; after `exact`, since one process holds one engine at a time."""
    options = {"method": "tree", "num_nodes": 6, "row_cost": 0}
    with engine(model_path, max_num_seqs=64, max_num_batched_tokens=1024, speculative_config=options) as llm:
        yield llm


def first_three(llm: LLM, seed: int) -> Counter:
    """Counts of the first three tokens of SAMPLES independent requests; the fourth keeps the third's tree alive."""
    params = [SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=seed + i) for i in range(SAMPLES)]
    outputs = llm.generate([PROMPT] * SAMPLES, params, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids[:3]) for output in outputs)


def p_value(counts: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Chi-square over the sequences expected at least 5 times; all others are one bin."""
    named = [sequence for sequence, p in law.items() if p * SAMPLES >= 5]
    observed = [counts[sequence] for sequence in named]
    expected = [law[sequence] * SAMPLES for sequence in named]
    observed.append(SAMPLES - sum(observed))
    expected.append(SAMPLES - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def test_naive_sampling_follows_the_llm(tree, exact):
    before = tree.collective_rpc("tree_stats")[0]
    assert p_value(first_three(tree, seed=1000), exact) > FALSE_ALARM
    after = tree.collective_rpc("tree_stats")[0]
    assert after["accepted"] - before["accepted"] > SAMPLES / 10  # trees decided tokens, not only roots


def test_preferring_drafted_tokens_is_caught(tree, exact, monkeypatch):
    """Negative control: with the first child taken in one case of five the same test must fail."""
    from specinfer_vllm.engine import runner_v1

    original = runner_v1.walk

    def biased(rows, chosen):
        first_children = torch.nonzero(rows.depth > 0).view(-1)
        lucky = first_children[torch.rand(len(first_children)) < 0.2]
        chosen = chosen.clone()
        chosen[rows.parent[lucky]] = rows.tokens[lucky]
        return original(rows, chosen)

    monkeypatch.setattr(runner_v1, "walk", biased)
    assert p_value(first_three(tree, seed=5000), exact) < FALSE_ALARM


def sampled(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": 32, "ignore_eos": True, **params})


def test_a_seed_gives_the_same_output_alone_and_in_any_batch(tree):
    params = sampled(seed=11, n=3)
    alone = answers(tree.generate([PROMPT], params, use_tqdm=False))
    others = [sampled(temperature=t, seed=i) for i, t in enumerate((0.0, 0.5, 1.0, 1.2))]
    crowd = tree.generate([PROMPT, *["Once upon a time"] * 4], [params, *others], use_tqdm=False)
    assert [each.tokens for each in answers(crowd[:1])] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in alone}) == 3


def test_trees_do_not_change_what_a_seed_gives(tree, monkeypatch):
    """Coins are keyed by position: with and without drafts the same tokens come out."""
    params = [sampled(seed=3, top_p=0.9), sampled(seed=4, top_k=20), sampled(seed=5)]
    with_trees = answers(tree.generate([PROMPT] * 3, params, use_tqdm=False))
    monkeypatch.setattr(type(tree_runner(tree).drafter), "draft", lambda self, ids, batch, requests: None)
    without = answers(tree.generate([PROMPT] * 3, params, use_tqdm=False))
    assert [each.tokens for each in with_trees] == [each.tokens for each in without]


def tree_runner(llm: LLM):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def test_mixed_batches_give_each_request_what_it_gets_alone(tree):
    kinds = [
        sampled(temperature=0.0),
        sampled(seed=1, repetition_penalty=1.3),
        sampled(seed=2, top_p=0.8, logprobs=3),
        sampled(temperature=0.0, presence_penalty=0.5),
        sampled(seed=3, min_tokens=8),
    ]
    alone = [answers(tree.generate([PROMPT], each, use_tqdm=False))[0].tokens for each in kinds]
    for order in itertools.islice(itertools.permutations(range(len(kinds))), 0, 120, 53):
        mixed = answers(tree.generate([PROMPT] * len(kinds), [kinds[i] for i in order], use_tqdm=False))
        assert [each.tokens for each in mixed] == [alone[i] for i in order]


def test_an_unseeded_request_varies(tree):
    outputs = answers(tree.generate([PROMPT] * 4, sampled(temperature=1.0), use_tqdm=False))
    assert len({tuple(each.tokens) for each in outputs}) > 1


def test_logprobs_of_sampled_tokens_come_from_their_own_row(tree):
    """Each token's logprob equals what a fresh request over the same prefix says."""
    output = tree.generate([PROMPT], sampled(seed=9, logprobs=0), use_tqdm=False)[0]
    tokens = list(output.outputs[0].token_ids)
    again = tree.generate(
        [{"prompt_token_ids": [*output.prompt_token_ids, *tokens]}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )[0]
    start = len(output.prompt_token_ids)
    for i, token in enumerate(tokens):
        said = output.outputs[0].logprobs[i][token].logprob
        assert said == pytest.approx(again.prompt_logprobs[start + i][token].logprob, abs=1e-3)
