# SPDX-License-Identifier: Apache-2.0
"""Greedy output is plain vLLM's, token for token in fp32, whatever the engine is put through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from engines import Answer, answers, bytes_held, differences, engine, greedy, real_chats, shuffled, with_aborts
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from specinfer_vllm.bench import prompts as prompt_sets
from specinfer_vllm.propose.ensemble import Ensemble
from specinfer_vllm.tree.expand import prune
from specinfer_vllm.tree.merge import merge
from specinfer_vllm.tree.topology import from_arrays

pytestmark = pytest.mark.engine

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}
SMALL_POOL = 32  # blocks of 32 tokens: eight growing requests do not fit, some are preempted


@dataclass
class Run:
    """Everything one engine answered, by the name of what it was put through, and its counters."""

    answers: dict[str, list[Answer]]
    stats: dict
    preemptions: int
    held: int  # bytes_held()


def chats(limit: int, seed: int) -> list:
    """`limit` prompts of each set, of those that leave room for an answer, in random order."""
    short = [[each for each in prompt_sets.load([name]) if len(each.text) <= 800] for name in ("humaneval", "mtbench")]
    return shuffled([prompt for prompts in short for prompt in prompts[:limit]], seed)


def generated_prefix(llm: LLM) -> list[Answer]:
    """Prompts that repeat a finished request's prompt and half of its output: hits on blocks of generated text."""
    first = llm.chat([prompt.messages for prompt in chats(2, 1)], greedy(72), use_tqdm=False)
    again = [
        {"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids][: len(each.prompt_token_ids) + 64]}
        for each in first
    ]
    return answers(first) + answers(llm.generate(again, greedy(24), use_tqdm=False))


def to_the_limit(llm: LLM) -> list[Answer]:
    """Requests that only max_model_len ends."""
    params = greedy(10_000, ignore_eos=True)
    return answers(llm.generate(["One, two, three,", "def f(x):\n" * 60], params, use_tqdm=False))


def stopped(llm: LLM) -> list[Answer]:
    """Stop strings, some in the middle of an accepted path, and stop token ids."""
    texts = ["Count: 1, 2, 3, 4,", "List three colours:\n", "a b c d e f g a b c d e f g a b c"]
    by_text = llm.generate(texts, greedy(48, stop=[" 9", "\n\n", "e f"]), use_tqdm=False)
    by_token = llm.generate(texts, greedy(48, stop_token_ids=[198, 28]), use_tqdm=False)
    return answers(by_text) + answers(by_token)


def json_schema(llm: LLM) -> list[Answer]:
    params = greedy(56, structured_outputs=StructuredOutputsParams(json=PERSON))
    choice = greedy(8, structured_outputs=StructuredOutputsParams(choice=["positive", "negative", "neutral"]))
    texts = ["A person as JSON: ", "Describe Ada Lovelace in JSON: ", "JSON for Bob, 33, with tags: "]
    return answers(llm.generate([*texts, "The film was great. Sentiment: "], [*[params] * 3, choice], use_tqdm=False))


def parameters(llm: LLM) -> list[Answer]:
    """Parameters that depend on the path, mixed with requests that have none."""
    params = [
        greedy(40, repetition_penalty=1.1),
        greedy(40, presence_penalty=0.3, frequency_penalty=0.1),
        greedy(40, bad_words=["blue", "green red"]),
        greedy(40, min_tokens=36),
        greedy(40, allowed_token_ids=list(range(1000, 9000))),
        greedy(40, logit_bias={4461: -2.0, 2654: 1.0}),
        greedy(40),
        SamplingParams(temperature=0, max_tokens=12, logprob_token_ids=[10, 20]),
    ]
    text = "red blue red green red blue red green red blue red red green red blue red"
    return answers(llm.generate([text] * len(params), params, use_tqdm=False))


def prompt_logprobs(llm: LLM) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=2)
    return answers(
        llm.generate(["The quick brown fox jumps over the lazy dog. The quick brown"], params, use_tqdm=False)
    )


EVERYTHING: dict[str, Callable[[LLM], list[Answer]]] = {
    "110 chats, 8 at once": lambda llm: real_chats(llm, chats(55, 0), tokens=[8, 24, 40, 16]),
    "generated prefix": generated_prefix,
    "aborts": lambda llm: with_aborts(llm, chats(5, 2), max_tokens=32),
    "max_model_len": to_the_limit,
    "stops": stopped,
    "json": json_schema,
    "parameters": parameters,
    "prompt logprobs": prompt_logprobs,
}
SHORT = {
    "chats": lambda llm: real_chats(llm, chats(5, 3), tokens=[8, 20]),
    "generated prefix": generated_prefix,
    "json": json_schema,
}


def run(model, workloads: dict, **options) -> Run:
    with engine(model, num_gpu_blocks_override=SMALL_POOL, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted, original = [], scheduler._preempt_request
        scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(1), original(*args, **kwargs))[1]
        found = {name: workload(llm) for name, workload in workloads.items()}
        if "speculative_config" not in options:
            return Run(found, {}, len(preempted), 0)
        return Run(found, llm.collective_rpc("tree_stats")[0], len(preempted), bytes_held(llm))


@pytest.fixture(scope="module")
def plain(model_path) -> Run:
    """Plain vLLM on everything; its answers serve all tests."""
    return run(model_path, {**EVERYTHING, **{f"short {name}": each for name, each in SHORT.items()}})


@pytest.fixture(scope="module")
def free(model_path) -> Run:
    """Draft-free proposers merged."""
    return run(model_path, EVERYTHING, speculative_config={"method": "tree", "proposers": ["ngram", "recycling"]})


@pytest.mark.parametrize("workload", EVERYTHING)
def test_draft_free_trees_change_nothing(plain, free, workload):
    assert differences(plain.answers[workload], free.answers[workload]) == []


def test_the_suite_exercised_what_it_names(plain, free):
    assert free.preemptions > 0 and plain.preemptions > 0
    assert free.stats["moved"] > 10
    assert free.stats["tokens_per_step"] > 1.1
    assert all(free.stats["accepted_by"][name] > 0 for name in ("ngram", "recycling"))
    assert free.stats["undrafted"] == {}
    hits = free.answers["generated prefix"][4:]
    assert all(answer.cached > 0 for answer in hits)


def weight_bytes(model) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def test_memory_between_steps_is_less_than_a_hundredth_of_the_weights(free, model_path):
    print(f"{free.held / 1e6:.2f} MB held beside {weight_bytes(model_path) / 1e6:.0f} MB of weights")
    assert (
        weight_bytes(model_path) // 1000 < free.held <= weight_bytes(model_path) // 100
    )  # the lower end: it was found


class WithDecoy(Ensemble):
    """Puts a child that is always refused in front of every tree's best one, so that every accepted path must move."""

    def propose(self, batch):
        trees = super().propose(batch)
        roots = batch.root_tokens()
        count = len(roots)
        decoy = from_arrays(
            offsets=2 * np.arange(count + 1),
            tokens=np.stack([roots, np.full(count, 1)], axis=1).reshape(-1),
            parent=np.tile([-1, 0], count),
        )
        return prune(merge([trees, decoy]), batch.max_nodes)


def test_paths_out_of_place_change_nothing(plain, model_path, monkeypatch):
    monkeypatch.setattr("specinfer_vllm.engine.drafter.Ensemble", WithDecoy)
    found = run(model_path, SHORT, speculative_config="tree")
    assert found.stats["moved"] > 50
    assert [line for name in SHORT for line in differences(plain.answers[f"short {name}"], found.answers[name])] == []


def test_compaction_is_what_keeps_it(plain, model_path, monkeypatch):
    """Negative control: without moving accepted K/V the same run must fail."""
    from specinfer_vllm.engine.runner_v1 import TreeRunnerMixin

    monkeypatch.setattr("specinfer_vllm.engine.drafter.Ensemble", WithDecoy)
    monkeypatch.setattr(TreeRunnerMixin, "_compact", lambda self, step: None)
    broken = run(model_path, SHORT, speculative_config="tree")
    assert any(differences(plain.answers[f"short {name}"], broken.answers[name]) for name in SHORT)


ALONE = 3


def seeded(llm: LLM) -> list[Answer]:
    """Sampled requests with seeds, some alone; then all at once, where the pool of blocks does not hold them."""
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=150, ignore_eos=True) for i in range(8)]
    texts = [f"{i} rivers and the mountains they come from:\n" for i in range(8)]
    alone = [llm.generate([text], each, use_tqdm=False)[0] for text, each in zip(texts[:ALONE], params, strict=False)]
    return answers(alone) + answers(llm.generate(texts, params, use_tqdm=False))


def check_ssms(plain: Run, model, options: dict, owners: list[str], **more) -> Run:
    found = run(model, SHORT | more, speculative_config={"method": "tree", **options})
    for name in SHORT:
        assert differences(plain.answers[f"short {name}"], found.answers[name]) == []
    assert all(found.stats["proposed_by"][owner] > 0 for owner in owners)
    assert set(found.stats["accepted_by"]) <= set(owners)
    assert found.held <= weight_bytes(model) // 100
    return found


def test_one_ssm(plain, model_path, ssm_path):
    check_ssms(plain, model_path, {"ssms": [str(ssm_path)], "expansion": [1, 2, 1]}, ["ssm0"])


def test_two_ssms_merged(plain, model_path, ssm_path, second_ssm_path):
    options = {"ssms": [str(ssm_path), {"model": str(second_ssm_path), "expansion": [3, 1]}], "expansion": [2, 1, 1]}
    found = check_ssms(plain, model_path, options, ["ssm0", "ssm1"], seeded=seeded)
    tokens = [each.tokens for each in found.answers["seeded"]]
    assert found.preemptions > 0
    assert tokens[:ALONE] == tokens[ALONE : 2 * ALONE]


def test_an_ssm_with_draft_free_proposers(plain, model_path, ssm_path):
    options = {
        "ssms": [{"model": str(ssm_path), "width": 2}],
        "proposers": ["ngram", "recycling"],
        "depth": 4,
        "num_nodes": 12,
    }
    check_ssms(plain, model_path, options, ["ssm0", "ngram", "recycling"])


@pytest.mark.parametrize(
    ("shape", "share"),  # of a full tree's nodes, or of what is left of it near the end of a text, if that is less
    [({"expansion": [1, 1, 2]}, 3 / 4), ({"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]}, 2 / 5)],
    ids=["expansion", "tree"],
)
def test_an_ssm_that_is_the_llm_is_always_right(plain, model_path, shape, share):
    """Its K/V must be valid after acceptance, chunked prefill, prefix hits and preemption, or it would be refused."""
    ssm = {"model": str(model_path), "dtype": "llm"}
    found = check_ssms(plain, model_path, {"ssms": [ssm], **shape}, ["ssm0"])
    assert found.stats["accepted"] >= 0.97 * share * found.stats["nodes"]


def test_a_narrowed_head_drafts_its_vocabulary_only(plain, model_path, tmp_path):
    """The LLM itself as the SSM, with a head of every other token: what it can draft is accepted."""
    for file in model_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    np.save(tmp_path / "draft_vocab.npy", np.arange(0, 49152, 2, dtype=np.int32))
    found = check_ssms(plain, model_path, {"ssms": [str(tmp_path)], "expansion": [1, 1]}, ["ssm0"])
    assert found.stats["accepted"] > found.stats["nodes"] / 5


def test_an_ssm_that_raises_costs_its_drafts_only(plain, model_path, ssm_path, monkeypatch, caplog):
    """Every fifth pass fails: requests go on, the error is logged once and counted, later requests draft again."""
    from specinfer_vllm.propose.ssm import SsmProposer

    passes, original = [], SsmProposer.run

    def fails_at_times(self, *args, **kwargs):
        passes.append(1)
        if len(passes) % 5 == 0:
            raise RuntimeError("out of luck")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SsmProposer, "run", fails_at_times)
    found = check_ssms(plain, model_path, {"ssms": [str(ssm_path)], "expansion": [2, 1]}, ["ssm0"])
    assert found.stats["proposer_failures"]["ssm0"] > 1
    assert sum("out of luck" in str(record.exc_info) for record in caplog.records) <= 1
