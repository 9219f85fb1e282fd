# SPDX-License-Identifier: Apache-2.0
"""Token trees on the V2 runner give plain V2's tokens: greedy and seeded sampled, whatever happens to a request.

Runs on a CPU in Triton's interpreter with a model of random weights, whose texts fall into loops now and then, so that
draft-free trees hit; tests/test_runner_v2.py runs this file, and the real model.
"""

import json
import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("runs in a process of its own, see test_runner_v2.py", allow_module_level=True)

import graphs  # noqa: E402
import tiny_model  # noqa: E402
import torch  # noqa: E402
from engines import engine  # noqa: E402
from scipy.stats import chisquare  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

from specinfer_vllm.attention import dense_masks  # noqa: E402
from specinfer_vllm.attention.libraries import LIBRARIES  # noqa: E402
from specinfer_vllm.bench.engines import runner_of, tree_stats  # noqa: E402
from specinfer_vllm.engine.device_draws import SampledDraws  # noqa: E402
from specinfer_vllm.engine.device_trees import DeviceTrees  # noqa: E402
from specinfer_vllm.engine.draft_inputs import DraftInputs  # noqa: E402

LENGTH = 128
SETTINGS = {
    "max_model_len": LENGTH,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 24,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
}
NODES, DEPTH = 5, 3


def prompts() -> list[list[int]]:
    """Short, repetitive, longer than a step's tokens, close to the limit, and two that share a prefix."""
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(3, tiny_model.VOCAB, (count,), generator=generator).tolist()

    shared = some(32)
    return [some(3), some(7) * 5, some(60), some(LENGTH - 9), [*shared, *some(2)], [*shared, *some(5)], some(5) * 3]


def requests(*params: dict) -> list[tuple[list[int], SamplingParams]]:
    """The prompts, each with its own parameters, or all with the only ones."""
    lengths = [16, 16, 10, 20, 12, 14, 1]
    params = params * len(lengths) if len(params) == 1 else params
    sampling = [
        SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **each)
        for length, each in zip(lengths, params, strict=True)
    ]
    return list(zip(prompts(), sampling, strict=True))


KINDS = {
    "greedy": requests({"temperature": 0}),
    "every parameter": requests(
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "seed": 12, "top_p": 0.8},
        {"temperature": 0.9, "seed": 13, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.7, "seed": 14, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 0.8},
        {"temperature": 0.6, "seed": 15, "logit_bias": {7: 4.0, 9: -50.0}},
        {"temperature": 0.9, "seed": 16, "n": 2},
    ),
    "logprobs": requests({"temperature": 0, "logprobs": 3, "prompt_logprobs": 1})[1::2],
}


def answers(llm, asked) -> list:
    """Token ids of every completion, and logprobs of every token where they were asked for."""
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    outputs = llm.generate(inputs, [params for _, params in asked], use_tqdm=False)
    return [
        [(tuple(each.token_ids), each.logprobs and [sorted(entry) for entry in each.logprobs]) for each in one.outputs]
        for one in outputs
    ]


@pytest.fixture(scope="module", autouse=True)
def interpretable():
    """Twins in torch of the two kernels of vLLM's that Triton's interpreter cannot run; one is vLLM's own."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    topk_topp_sampler.HAS_TRITON = False
    StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask


def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask) -> None:
    """As StructuredOutputsWorker.apply_grammar_bitmask."""
    from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping

    drafts = input_batch.num_draft_tokens_per_req
    arguments = (input_batch.req_ids, grammar_req_ids, input_batch.cu_num_logits_np, drafts)
    mapping = _build_grammar_mapping(*arguments, self.num_bonus_tokens, self.mask_stride)
    bits = np.unpackbits(grammar_bitmask.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    for row, place in zip(bits, mapping, strict=True):
        request, position = divmod(place, self.mask_stride)
        logits[input_batch.cu_num_logits_np[request] + position, ~torch.from_numpy(row).bool()] = -torch.inf


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    llm = tiny_model.make(folder / "llm", layers=3)
    return {
        "llm": llm,
        "ssm": tiny_model.cut(llm, folder / "ssm", 2),
        "other": tiny_model.cut(llm, folder / "other", 1),
    }


@pytest.fixture(scope="module")
def plain(models) -> dict[str, list]:
    """Plain V2's answers; made first, since a process holds one engine at a time."""
    with engine(models["llm"], **SETTINGS) as llm:
        return {kind: answers(llm, asked) for kind, asked in KINDS.items()}


def tree(models, **options):
    """Options of a tree; SSMs by their names in `models`."""
    ssms = [{"model": str(models[each.pop("name")]), **each} for each in options.pop("ssms", [])]
    return {"method": "tree", "num_nodes": NODES, "depth": DEPTH, **options, **({"ssms": ssms} if ssms else {})}


@contextmanager
def serving(models, plain, settings=None, **options):
    with engine(models["llm"], **(SETTINGS | (settings or {})), speculative_config=tree(models, **options)) as llm:
        yield llm


@pytest.fixture(scope="module")
def recycling(models, plain):
    with serving(models, plain) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_plain_ones(recycling, plain, kind):
    assert answers(recycling, KINDS[kind]) == plain[kind]


def test_the_greedy_tokens_are_told(plain, capsys):
    """For test_runner_v2.py, which asks the V1 runner for the same."""
    told = [
        (prompt, params.max_tokens, list(one[0][0]))
        for (prompt, params), one in zip(KINDS["greedy"], plain["greedy"], strict=True)
    ]
    with capsys.disabled():
        print("\n" + json.dumps({"greedy": told, "settings": SETTINGS}))


def test_trees_were_verified(recycling):
    """Random weights say nothing twice, so that none of these nodes is right; the real model's are, below."""
    stats = tree_stats(recycling)
    assert stats["drafted_steps"] > 0
    assert stats["nodes"] > 0


def test_a_prompt_that_the_cache_knows_gives_the_same(recycling, plain):
    """A prompt and what followed it: the scheduler pads such a request with drafts that nobody proposed."""
    first = answers(recycling, KINDS["greedy"])
    longer = [
        ([*prompt, *one[0][0][:4]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False))
        for (prompt, _), one in zip(KINDS["greedy"], first, strict=True)
        if len(one[0][0]) >= 12
    ]
    assert [one[0][0] for one in answers(recycling, longer)] == [
        one[0][0][4:12] for one in first if len(one[0][0]) >= 12
    ]


SSMS = {
    "chain": {
        "ssms": [{"name": "ssm", "expansion": [1, 1, 1]}],
        "proposers": ["ngram"],
        "merge": "first",
        "num_nodes": 3,
        "depth": 3,
    },
    "two and all draft-free": {
        "ssms": [{"name": "ssm"}, {"name": "other", "width": 2}],
        "proposers": ["ngram", "recycling"],
        "primer": "{answers}",
    },
    "static": {"ssms": [{"name": "ssm", "tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}], "depth": 3},
    "seventy nodes": {"ssms": [{"name": "ssm", "width": 12}], "num_nodes": 70, "depth": 7},
}


@pytest.mark.parametrize("name", SSMS)
def test_ssms_leave_the_tokens_plain(models, plain, name, tmp_path):
    options, settings = SSMS[name], {"max_num_batched_tokens": 300 if "seventy" in name else 48}
    if "primer" in options:  # it knows what the LLM says; these texts say nothing twice
        texts = [[*prompt, *one[0][0]] for (prompt, _), one in zip(KINDS["greedy"], plain["greedy"], strict=True)]
        options = options | {"primer": str(tiny_model.primer(tmp_path / "primer.npz", texts))}
    with serving(models, plain, settings, **options) as llm:
        assert answers(llm, KINDS["greedy"]) == plain["greedy"]
        stats = tree_stats(llm)
        assert stats["accepted_by"]["ssm0"] > 0
        if options.get("merge") == "first":  # the SSM has a tree for everybody
            assert stats["proposed_by"]["ngram"] == 0
        if "primer" in options:
            assert set(stats["proposed_by"]) == {"ssm0", "ssm1", "ngram", "recycling"}
            assert stats["accepted_by"]["recycling"] > stats["accepted_by"]["ssm0"]
            assert answers(llm, KINDS["every parameter"]) == plain["every parameter"]


@pytest.fixture(scope="module")
def own(models, plain):
    """The LLM as its own SSM: whole paths are accepted, and with the likeliest child last every one of them moves."""
    write = DeviceTrees.write

    def likeliest_last(self, slots, nodes):
        score = torch.where(nodes.score > -torch.inf, -nodes.score, nodes.score)
        return write(self, slots, replace(nodes, score=score))

    ssm = {"name": "llm", "expansion": [2, 1, 1]}
    with pytest.MonkeyPatch.context() as patch, serving(models, plain, ssms=[ssm], num_nodes=6) as llm:
        patch.setattr(DeviceTrees, "write", likeliest_last)
        warm_up(llm)
        yield llm


def warm_up(llm) -> None:
    """As vLLM does on a GPU: a profile, and steps made by hand, whose drafts nobody proposed and nobody verified."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.model_runner.profile_run()
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


def test_an_ssm_that_is_the_llm_is_always_right(own, plain):
    """Its K/V is right after acceptance, prefix hits and chunked prompts, or some node would be refused."""
    before = tree_stats(own)
    for _ in range(2):  # the second time prompts are in the cache
        assert answers(own, KINDS["greedy"]) == plain["greedy"]
    after = tree_stats(own)
    accepted, moved, steps = (after[name] - before[name] for name in ("accepted", "moved", "drafted_steps"))
    # Nodes behind a request's last token are verified and cannot be accepted; none of the others may be refused.
    assert accepted > 0.75 * DEPTH * steps
    assert moved > 0.8 * accepted


def test_without_compaction_texts_differ(own, plain, monkeypatch):
    own.reset_prefix_cache()
    monkeypatch.setattr(type(runner_of(own)), "_compact", lambda self, walked: None)
    assert answers(own, KINDS["greedy"]) != plain["greedy"]
    own.reset_prefix_cache()


def test_with_the_rows_as_positions_texts_differ(own, plain, monkeypatch):
    own.reset_prefix_cache()
    written = DeviceTrees.write

    def flat(self, slots, nodes):
        tokens = written(self, slots, nodes)
        self.depth[slots] = torch.arange(self.rows, dtype=torch.int32)
        return tokens

    monkeypatch.setattr(DeviceTrees, "write", flat)
    assert answers(own, KINDS["greedy"]) != plain["greedy"]
    own.reset_prefix_cache()


def test_preempted_requests_give_the_same(models, plain):
    """A pool of 12 blocks does not hold four requests."""
    with serving(
        models, plain, {"num_gpu_blocks_override": 13}, ssms=[{"name": "ssm"}], proposers=["recycling"]
    ) as llm:
        assert answers(llm, KINDS["greedy"]) == plain["greedy"]


def test_an_ssm_that_fails_is_left_out(models, plain, monkeypatch):
    from specinfer_vllm.propose.device_ssm import DeviceSsm

    read = DeviceSsm.read_level
    calls = []

    def fails_once(self, *args):
        calls.append(self)
        if len(calls) == 8:
            raise RuntimeError("out of memory")
        return read(self, *args)

    monkeypatch.setattr(DeviceSsm, "read_level", fails_once)
    with serving(models, plain, ssms=[{"name": "ssm", "expansion": [1, 1, 1]}], num_nodes=3) as llm:
        assert answers(llm, KINDS["greedy"]) == plain["greedy"]
        stats = tree_stats(llm)
    assert stats["proposer_failures"] == {"ssm0": 1}
    assert stats["accepted_by"]["ssm0"] > 0  # requests that came later drafted


def test_asynchronous_scheduling_gives_the_same(models, plain, monkeypatch):
    """vLLM switches it off on a CPU, and again whenever a configuration is copied, as an SSM's is."""
    from specinfer_vllm.engine import launch, scheduler

    check_runner = launch.check_runner

    def asynchronous(config):
        config.scheduler_config.async_scheduling = True
        check_runner(config)

    monkeypatch.setattr(launch, "check_runner", asynchronous)
    with serving(models, plain) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler, scheduler.TreeAsyncScheduler)
        assert core.batch_queue is not None
        assert answers(llm, KINDS["every parameter"]) == plain["every parameter"]


# -- rules that weigh sampled draws ------------------------------------------------------------------------------------

SAMPLES, LIKELY, FALSE_ALARM = 128, 6, 1e-4
WIDE = {"max_num_seqs": 32, "max_num_batched_tokens": 320, "max_logprobs": tiny_model.VOCAB}


def law_behind(llm, prompts: list[list[int]]) -> np.ndarray:
    """Plain vLLM's law of the next token behind each prompt, [prompts, vocab]."""
    params = SamplingParams(max_tokens=1, logprobs=tiny_model.VOCAB, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    laws = np.zeros((len(prompts), tiny_model.VOCAB))
    for law, output in zip(laws, outputs, strict=True):
        for token, entry in output.outputs[0].logprobs[0].items():
            law[token] = np.exp(entry.logprob)
    return laws


@pytest.fixture(scope="module")
def law(models):
    """(prompt, its likely first token, law of the two behind it): {(second, third): probability} of likely ones.

    The first token comes with the prompt, before anything is drafted: of many prompts one whose first is nearly sure.
    """
    generator = torch.Generator().manual_seed(6)
    some = torch.randint(3, tiny_model.VOCAB, (48, 4), generator=generator).tolist()
    with engine(models["llm"], **(SETTINGS | WIDE)) as llm:
        first = law_behind(llm, some)
        chosen = int(first.max(axis=1).argmax())
        prompt, token = some[chosen], int(first[chosen].argmax())
        second = law_behind(llm, [[*prompt, token]])[0]
        likely = second.argsort()[::-1][:LIKELY].tolist()
        third = law_behind(llm, [[*prompt, token, each] for each in likely])
    pairs = {
        (each, int(other)): float(second[each] * behind[other])
        for each, behind in zip(likely, third, strict=True)
        for other in behind.argsort()[::-1][:LIKELY]
    }
    return prompt, token, pairs


def p_value(llm, law) -> float:
    """Chi-square of what is sampled behind the first token, pairs that are too rare taken together."""
    prompt, token, pairs = law
    params = [SamplingParams(max_tokens=3, seed=i, ignore_eos=True, detokenize=False) for i in range(SAMPLES)]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * SAMPLES, params, use_tqdm=False)
    found = [tuple(each.outputs[0].token_ids) for each in outputs]
    found = [each[1:] for each in found if each[0] == token]
    assert len(found) > SAMPLES / 2
    often = [pair for pair, probability in pairs.items() if probability * len(found) >= 5]
    assert len(often) >= 3
    counts = [found.count(pair) for pair in often]
    expected = [pairs[pair] * len(found) for pair in often]
    return chisquare([*counts, len(found) - sum(counts)], [*expected, len(found) - sum(expected)]).pvalue


RULES = {
    "mss": {"ssms": [{"name": "ssm", "expansion": [2, 2]}], "num_nodes": 6, "depth": 2},
    "without_replacement": {
        "ssms": [{"name": "ssm", "expansion": [2, 2]}, {"name": "other", "expansion": [2, 1]}],
        "num_nodes": 12,
        "depth": 2,
    },
    "top_k_plus_one": {"ssms": [{"name": "ssm", "expansion": [3, 2]}], "num_nodes": 9, "depth": 2},
    "traversal": {"ssms": [{"name": "ssm", "expansion": [2, 1]}], "num_nodes": 4, "depth": 2},
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_follow_the_llm(models, plain, law, rule, monkeypatch):
    with serving(models, plain, WIDE, verifier=rule, **RULES[rule]) as llm:
        assert p_value(llm, law) > FALSE_ALARM
        assert tree_stats(llm)["accepted_by"]["ssm0"] > 0
        if rule in (
            "mss",
            "traversal",
        ):  # draws that are said to come from another law are accepted too often or too rarely
            rows = SampledDraws.rows
            flat = torch.full((1, tiny_model.VOCAB), 1 / tiny_model.VOCAB)
            wrong = lambda self, *args: rows(replace(self, laws=flat.expand_as(self.laws).contiguous()), *args)  # noqa: E731
            monkeypatch.setattr(SampledDraws, "rows", wrong)
            assert p_value(llm, law) < FALSE_ALARM


# -- the real model ----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
REAL = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def real_answers(llm) -> list[str]:
    """A text that repeats, one that ends at a stop string, and JSON."""
    grammar = {"structured_outputs": StructuredOutputsParams(json={**SCHEMA, "required": ["name", "age"]})}
    asked = {
        "List three fruits, one per line:": {"temperature": 0, "stop": ["2."]},
        "Describe a person as JSON.": {"temperature": 0, **grammar},
    }
    chats = [[{"role": "user", "content": text}] for text in asked]
    params = [SamplingParams(max_tokens=9, **each) for each in asked.values()]
    looping = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate(["Repeat: a b c a b c a b c"], looping, use_tqdm=False)
    return [each.outputs[0].text for each in [*outputs, *llm.chat(chats, params, use_tqdm=False)]]


def test_the_real_model_writes_the_same_under_grammars_and_stop_strings(plain):
    from specinfer_vllm.bench import smollm2

    model = smollm2.model_path()
    with engine(model, **REAL) as llm:
        wanted = real_answers(llm)
    options = {"ssms": [str(smollm2.ssms()[0])], "proposers": ["recycling"], "num_nodes": 6}
    with engine(model, **REAL, speculative_config={"method": "tree", **options}) as llm:
        assert real_answers(llm) == wanted
        assert real_answers(llm) == wanted  # prompts are in the cache, and requests begin with padded drafts
        stats = tree_stats(llm)
    assert wanted[2].lstrip().startswith("{")
    assert stats["tokens_per_step"] > 1.2
    assert stats["accepted_by"]["recycling"] > 0


@pytest.fixture
def gpu_parts(monkeypatch):
    """The backend and the kernel that GPUs take, in the place of the CPU's, for SSM levels, trees and prompts."""
    from specinfer_vllm.engine.runner_v2 import TreeCPUModelRunnerV2, TreeGPUModelRunnerV2
    from specinfer_vllm.patches import cpu_attention, triton_attention

    triton_attention.register()
    monkeypatch.setattr(cpu_attention, "BACKEND", triton_attention.BACKEND)
    monkeypatch.setattr(TreeCPUModelRunnerV2, "_compaction", TreeGPUModelRunnerV2._compaction)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))  # vLLM's K/V store asks


def replace_length(params: SamplingParams, length: int) -> SamplingParams:
    shorter = params.clone()
    shorter.max_tokens = length
    return shorter


def accepted(llm, asked) -> tuple[list, int]:
    """The answers, and how many nodes were accepted for them; nothing of them is in the cache before."""
    llm.reset_prefix_cache()
    before = tree_stats(llm)["accepted"]
    found = answers(llm, asked)
    return found, tree_stats(llm)["accepted"] - before


def test_attention_compaction_and_graphs_of_a_gpu_give_the_same(models, plain, gpu_parts, monkeypatch):
    """Graphs read what a step wrote where it was captured: as many nodes are accepted as without."""
    asked = [(prompt, replace_length(params, 8)) for prompt, params in KINDS["greedy"][1::4]]
    wanted = [[(tokens[:8], None)] for ((tokens, _),) in plain["greedy"][1::4]]
    proposers = {"ssms": [{"name": "llm", "expansion": [2, 1, 1]}], "proposers": ["recycling"]}
    with serving(models, plain, **proposers, num_nodes=6) as llm:
        kinds = {type(each.impl).__name__ for each in runner_of(llm).compilation_config.static_forward_context.values()}
        assert kinds == {"TreeTritonAttentionImpl"}
        eager = accepted(llm, asked)
        stats = tree_stats(llm)
        assert eager == (wanted, stats["accepted"])
        assert stats["accepted"] > 0.6 * DEPTH * stats["drafted_steps"]
        # Through what the option tree_attention names, which a CPU's launch refuses.
        calls, attend = [], dense_masks.attend
        with monkeypatch.context() as patch:
            patch.setattr(dense_masks, "attend", lambda call: calls.append(len(call.query)) or attend(call))
            for layer in runner_of(llm).compilation_config.static_forward_context.values():
                patch.setattr(layer.impl, "library", LIBRARIES["torch"])
            assert answers(llm, asked[:1]) == wanted[:1]
        assert calls
        eager = accepted(llm, asked[-1:])
        captured = graphs.capture(runner_of(llm), sizes=[4])
        assert accepted(llm, asked[-1:]) == eager
        assert all(each.replays for each in captured)
        # The control: a step's values stand where no graph looks for them.
        inputs = runner_of(llm).speculator.inputs
        written = DraftInputs.write

        def elsewhere(self, *args):
            inputs.numbers = inputs.numbers.clone()
            written(self, *args)

        monkeypatch.setattr(DraftInputs, "write", elsewhere)
        found, count = accepted(llm, asked[-1:])
        assert found == eager[0]
        assert count < eager[1]


def test_graphs_draw_what_is_drawn_without(models, plain, gpu_parts):
    """A rule that weighs sampled draws: a request with a top-p is drafted without graphs."""
    sampling = [{"temperature": 0.9}, {"temperature": 0}, {"temperature": 0.7}]
    asked = [
        (prompt, SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, detokenize=False, **each))
        for seed, (prompt, each) in enumerate(zip(prompts()[:2] * 2, [*sampling, {"top_p": 0.7}], strict=True))
    ]
    with serving(models, plain, verifier="mss", ssms=[{"name": "ssm", "expansion": [2, 1]}], num_nodes=4) as llm:
        eager = [accepted(llm, asked[:3]), accepted(llm, asked)]
        runner_of(llm).speculator.ssms.max_rows = 2  # passes of few requests each
        captured = graphs.capture(runner_of(llm), sizes=[4])
        assert [accepted(llm, asked[:3]), accepted(llm, asked)] == eager
        assert all(each.replays for each in captured)
        assert sum(count for _, count in eager) > 0
