# SPDX-License-Identifier: Apache-2.0
"""Sampled requests through the served engine: the law is plain vLLM's, and a seed fixes the output."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter

import pytest
import torch
from engines import answers, engine
from scipy import stats
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from specinfer_vllm.bench import smollm2
from specinfer_vllm.bench.engines import runner_of
from specinfer_vllm.engine import sampling
from specinfer_vllm.verify import rejection
from specinfer_vllm.verify.coins import ACCEPT
from specinfer_vllm.verify.rules import RULES

pytestmark = pytest.mark.engine

# A text that repeats itself with two continuations in the balance, so that drafts are made and half of them refused.
# Long enough for one block of the prefix cache, so that requests cost their own tokens only.
PROMPT = " ".join(["red blue red green red blue red green red blue red red green red blue red"] * 2) + " red blue red"
SAMPLES = int(os.environ.get("SPECINFER_SAMPLES", "160"))  # requests per set of parameters
BEST = 5  # a token is told apart if it is among the law's best 5, else it counts as "other"
FALSE_ALARM = 1e-3  # of a whole test, fixed beforehand

EXTRAS = {
    "none": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {2654: 1.5, 4461: -1.0, 198: 2.0}},
}
SETTINGS = {
    f"{name} at {temperature}": {"temperature": temperature, **extra}
    for temperature in (0.3, 0.7, 1.0)
    for name, extra in EXTRAS.items()
}
BATCHES = {"max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 3 << 29}
Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def laws(model_path) -> dict[str, Law]:
    """Probabilities of the first two tokens under each setting, as plain vLLM itself says it samples them."""
    with engine(model_path, max_num_seqs=32, logprobs_mode="processed_logprobs") as llm:
        prompt = llm.get_tokenizer()(PROMPT).input_ids
        return {name: law_of(llm, prompt, settings) for name, settings in SETTINGS.items()}


def law_of(llm: LLM, prompt: list[int], settings: dict) -> Law:
    ask = SamplingParams(**settings, max_tokens=1, logprobs=BEST)
    law: Law = {(): 1.0}
    for _ in range(2):
        prefixes = list(law)
        asked = llm.generate([{"prompt_token_ids": [*prompt, *each]} for each in prefixes], ask, use_tqdm=False)
        law = {
            (*prefix, token): law[prefix] * math.exp(entry.logprob)
            for prefix, output in zip(prefixes, asked, strict=True)
            for token, entry in best(output.outputs[0].logprobs[0])
        }
    return law


def best(entries: dict) -> list:
    """The BEST most probable tokens of one position."""
    return sorted(entries.items(), key=lambda item: -item[1].logprob)[:BEST]


@pytest.fixture(scope="module")
def tree(model_path, laws, ssm_path):
    """Two SSMs, one of them good, merged with draft-free trees; after `laws`: a process holds one engine at a time."""
    good = smollm2.cut(model_path, layers=[*range(12), *range(20, 30)])
    options = {
        "method": "tree",
        "ssms": [{"model": str(good), "expansion": [2]}, {"model": str(ssm_path), "expansion": [1, 1]}],
        "proposers": ["ngram", "recycling"],
        "verifier": "without_replacement",
        "num_nodes": 6,
        "primer": "none",
    }
    settings = {**BATCHES, "logprobs_mode": "processed_logprobs"}
    with engine(model_path, max_num_seqs=64, **settings, speculative_config=options) as llm:
        yield llm


def pairs(llm: LLM, settings: dict[str, dict], seed: int | None = None) -> dict[str, Counter]:
    """Counts of the first two tokens of SAMPLES requests per setting, all in one batch.

    The third token keeps the tree behind the first alive. seed: of the first request of each; None = no seeds
    """
    params = [
        SamplingParams(**each, max_tokens=3, ignore_eos=True, seed=None if seed is None else seed + i)
        for i in range(SAMPLES)
        for each in settings.values()
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    counts = {name: Counter() for name in settings}
    for name, output in zip(itertools.cycle(settings), outputs, strict=False):
        counts[name][tuple(output.outputs[0].token_ids[:2])] += 1
    return counts


def p_value(counts: Counter, law: Law) -> float:
    """Chi-square over the sequences expected at least 5 times; the other named ones and the rest are a bin each."""
    total = sum(counts.values())
    likely = [sequence for sequence, p in law.items() if p * total >= 5]
    observed = [counts[sequence] for sequence in likely]
    expected = [law[sequence] * total for sequence in likely]
    rare = set(law) - set(likely)
    for seen, due in (
        (sum(counts[each] for each in rare), total * sum(law[each] for each in rare)),
        (sum(n for each, n in counts.items() if each not in law), total * (1 - sum(law.values()))),
    ):
        if due >= 5:
            observed.append(seen)
            expected.append(due)
        else:
            assert seen <= due + 12, f"{seen} samples where {due:.1f} are due"
    assert len(observed) > 1
    return float(stats.chisquare(observed, [each * sum(observed) / sum(expected) for each in expected]).pvalue)


def p_values(counts: dict[str, Counter], laws: dict[str, Law]) -> dict[str, float]:
    found = {name: p_value(counts[name], laws[name]) for name in counts}
    print(found)
    return found


def test_every_setting_follows_the_llm(tree, laws):
    """Without replacement, all settings in one batch. False alarm: FALSE_ALARM for the whole test."""
    before = tree.collective_rpc("tree_stats")[0]
    found = p_values(pairs(tree, SETTINGS), laws)
    assert min(found.values()) > FALSE_ALARM / len(found), found
    after = tree.collective_rpc("tree_stats")[0]
    accepted = after["accepted"] - before["accepted"]
    assert accepted > SAMPLES * len(SETTINGS) / 8  # trees decided tokens, not only roots
    assert after["accepted_by"]["ssm0"] > before["accepted_by"].get("ssm0", 0)
    assert after["undrafted"] == before["undrafted"] == {}


@pytest.fixture
def naive(tree, monkeypatch):
    """The same engine with the rule that is used when none is asked for."""
    monkeypatch.setattr(runner_of(tree).drafter, "rule", RULES["naive"])


def test_naive_sampling_follows_the_llm(tree, naive, laws):
    chosen = {name: SETTINGS[name] for name in ("none at 1.0", "top_p at 0.7", "repetition_penalty at 1.0")}
    found = p_values(pairs(tree, chosen, seed=1000), laws)
    assert min(found.values()) > FALSE_ALARM / len(found), found


def caught(llm: LLM, laws: dict[str, Law], seed: int | None = None) -> bool:
    """Whether the chi-square of twice SAMPLES requests at temperature 1 fails."""
    name = "none at 1.0"
    settings = {f"{name} {i}": SETTINGS[name] for i in range(2)}
    counts = pairs(llm, settings, seed)
    return p_value(sum(counts.values(), Counter()), laws[name]) < FALSE_ALARM


def test_preferring_drafted_tokens_is_caught(tree, naive, laws, monkeypatch):
    """Negative control of the naive rule: a law that leans towards the first child by a fifth."""
    original = sampling.RowLaws._laws

    def leaning(self, rows):
        law = original(self, rows)
        for i, row in enumerate(rows.tolist()):
            children = torch.nonzero((self.trees.parent == row) & (self.trees.depth > 0)).view(-1)
            if len(children):
                law[i] *= 0.8
                law[i, self.trees.tokens[children[0]]] += 0.2
        return law

    monkeypatch.setattr(sampling.RowLaws, "_laws", leaning)
    assert caught(tree, laws, seed=5000)


def test_accepting_every_draw_is_caught(tree, laws, monkeypatch):
    """Negative control: a drafted token stays whenever the LLM does not rule it out, as r < d/d has it."""
    original = rejection.coins

    def generous(seed, position, purpose, index=0):
        return original(seed, position, purpose, index) * (purpose != ACCEPT)

    monkeypatch.setattr(rejection, "coins", generous)
    assert caught(tree, laws)


def sampled(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": 32, "ignore_eos": True, **params})


def test_a_seed_gives_the_same_output_alone_and_in_any_batch(tree):
    params = sampled(seed=11, n=3)
    alone = answers(tree.generate([PROMPT], params, use_tqdm=False))
    others = [sampled(temperature=t, seed=i) for i, t in enumerate((0.0, 0.5, 1.0, 1.2))]
    crowd = tree.generate([PROMPT, *["Once upon a time"] * 4], [params, *others], use_tqdm=False)
    assert [each.tokens for each in answers(crowd[:1])] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in alone}) == 3


def test_trees_do_not_change_what_a_seed_gives(tree, naive, monkeypatch):
    """Coins are keyed by position: with and without drafts the same tokens come out."""
    params = [sampled(seed=3, top_p=0.9), sampled(seed=4, top_k=20), sampled(seed=5)]
    with_trees = answers(tree.generate([PROMPT] * 3, params, use_tqdm=False))
    monkeypatch.setattr(type(runner_of(tree).drafter), "draft", lambda self, ids, batch, requests: None)
    without = answers(tree.generate([PROMPT] * 3, params, use_tqdm=False))
    assert [each.tokens for each in with_trees] == [each.tokens for each in without]


@pytest.mark.parametrize("name", ["naive", "without_replacement"])
def test_mixed_batches_give_each_request_what_it_gets_alone(tree, name, monkeypatch):
    """Greedy, sampled, penalised, under a grammar, without drafts; among requests without a seed."""
    monkeypatch.setattr(runner_of(tree).drafter, "rule", RULES[name])
    kinds = [
        sampled(temperature=0.0),
        sampled(seed=1, repetition_penalty=1.3),
        sampled(seed=2, top_p=0.8, logprobs=3),
        sampled(temperature=0.0, presence_penalty=0.5),
        sampled(seed=3, min_tokens=8, min_p=0.05),
        sampled(seed=4, extra_args={"nobody": "reads this"}),
        sampled(seed=5, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="(red|blue) (green )+end")),
    ]
    alone = [answers(tree.generate([PROMPT], each, use_tqdm=False))[0].tokens for each in kinds]
    rng = random.Random(0)
    for _ in range(3):
        order = [*rng.sample(range(len(kinds)), len(kinds)), -1, -1, -1]  # -1 = no seed
        rng.shuffle(order)
        params = [sampled(repetition_penalty=1.1) if i < 0 else kinds[i] for i in order]
        mixed = answers(tree.generate([PROMPT] * len(order), params, use_tqdm=False))
        assert [each.tokens for each, i in zip(mixed, order, strict=True) if i >= 0] == [
            alone[i] for i in order if i >= 0
        ]


def test_a_seed_gives_the_same_output_to_a_request_that_comes_late(tree, naive):
    """Its prompt is read, in chunks, beside requests that draft: its first token is drawn as if it were alone."""
    params = sampled(seed=21)
    text = "Once there was a king who had three daughters. " * 12
    alone = answers(tree.generate([text], params, use_tqdm=False))[0].tokens
    core = tree.llm_engine
    for i in range(60):
        core.add_request(f"early-{i}", PROMPT, sampled(temperature=0.0, max_tokens=24))
    found = None
    for step in itertools.count():
        if step == 5:
            core.add_request("late", text, params)
        for output in core.step():
            if output.finished and output.request_id == "late":
                found = list(output.outputs[0].token_ids)
        if step > 5 and not core.has_unfinished_requests():
            break
    assert found == alone


def test_logprobs_of_chosen_tokens_leave_the_neighbours_alone(tree, naive):
    """logprob_token_ids: its own row says them, and the other requests keep their trees and seeds."""
    seeded, asks = sampled(seed=8), SamplingParams(temperature=0, max_tokens=8, logprob_token_ids=[10, 2654])
    alone = answers(tree.generate([PROMPT], seeded, use_tqdm=False))[0].tokens
    first, second = tree.generate([PROMPT] * 2, [asks, seeded], use_tqdm=False)
    assert list(second.outputs[0].token_ids) == alone
    assert all({10, 2654} <= set(position) for position in first.outputs[0].logprobs)


def test_odd_parameters_are_served_or_refused_by_name(tree):
    """Nothing stops the engine: what vLLM refuses it refuses, the rest has a result."""
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        tree.generate([PROMPT], sampled(allowed_token_ids=[]), use_tqdm=False)
    odd = [
        sampled(temperature=1e-6),
        sampled(top_k=10**6, seed=1),
        sampled(top_p=1e-9, temperature=1.5),
        sampled(min_p=1.0),
        sampled(allowed_token_ids=[2654]),
        sampled(logit_bias={2654: 100.0}, repetition_penalty=2.0),
    ]
    greedy = answers(tree.generate([PROMPT], sampled(temperature=0.0), use_tqdm=False))[0].tokens
    found = [each.tokens for each in answers(tree.generate([PROMPT] * len(odd), odd, use_tqdm=False))]
    assert all(len(tokens) == 32 for tokens in found)
    assert found[0] == found[2] == found[3] == greedy  # one token is left to each
    assert set(found[4]) == {2654}


def test_an_unseeded_request_varies(tree):
    outputs = answers(tree.generate([PROMPT] * 4, sampled(temperature=1.0), use_tqdm=False))
    assert len({tuple(each.tokens) for each in outputs}) > 1


@pytest.mark.parametrize("seed", [9, None], ids=["seed", "no seed"])
def test_logprobs_of_sampled_tokens_come_from_their_own_row(tree, seed):
    """Processed logprobs: what vLLM's own sampler says behind the same prefix, for a request that gets no drafts."""
    asked = {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 5}
    output = tree.generate([PROMPT], sampled(seed=seed, **asked), use_tqdm=False)[0]
    tokens = list(output.outputs[0].token_ids)
    stock = SamplingParams(**asked, max_tokens=1, extra_args={"nobody": "reads this"})
    prefixes = [{"prompt_token_ids": [*output.prompt_token_ids, *tokens[:i]]} for i in range(len(tokens))]
    for i, plain in enumerate(tree.generate(prefixes, stock, use_tqdm=False)):
        said, expected = output.outputs[0].logprobs[i], plain.outputs[0].logprobs[0]
        for token in set(said) & set(expected):
            assert said[token].logprob == pytest.approx(expected[token].logprob, abs=1e-3)
        assert tokens[i] in said and len(set(said) & set(expected)) >= 5
