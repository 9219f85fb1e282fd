# SPDX-License-Identifier: Apache-2.0
"""With tensor parallelism every rank takes the same decisions: tokens, trees, accepted counts, seeds, at every step.

vLLM asks one rank for the drafts and another's would be verified against them: ranks that differ give wrong texts, or
wait for each other for ever. Runs itself once per runner, in a process each; the V2 runner's kernels are interpreted.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton_cpu

pytest.importorskip("vllm")

SWITCH = "SPECINFER_TEST_RANKS"
RUNNER = os.environ.get(SWITCH)
inside = pytest.mark.skipif(RUNNER is None, reason="runs in a process of its own")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a split embedding is compiled otherwise, in seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would ask for a NUMA node of its own for each rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",  # ranks that wait for each other fail
}
RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", **triton_cpu.environment()}}


@pytest.mark.engine
@pytest.mark.skipif(RUNNER is not None, reason="starts the others")
@pytest.mark.parametrize("runner", RUNNERS)
def test_two_ranks(runner):
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", Path(__file__).name]
    environment = os.environ | ENVIRONMENT | RUNNERS[runner] | {SWITCH: runner}
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=900
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


# -- one runner --------------------------------------------------------------------------------------------------------

SETTINGS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 1 << 24,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
}
# Prompt, length of the answer, parameters. The first two end in one step, and two others take their slots. After the
# repeated ones this model repeats itself, too, so that draft-free trees hit.
PROMPTS = [
    ([8, 5], 1, {"temperature": 0}),
    ([9, 5], 1, {"temperature": 0}),
    ([58, 60] * 4, 8, {"temperature": 0}),
    ([9, 10] * 4, 5, {"temperature": 0.8, "seed": 11, "top_p": 0.9}),
    ([41, 42] * 29, 7, {"temperature": 0}),  # longer than a step's tokens
    ([9, 9] * 4, 4, {"temperature": 0.9}),
]
LONG = [2, 4]  # the long greedy ones
FEW = 4  # of them are enough where SSMs are placed otherwise
KINDS = {
    "recycling": {"num_nodes": 3, "depth": 2},
    "ssm": {"ssms": ["llm"], "expansion": [2, 1]},
    "both": {"ssms": ["ssm"], "proposers": ["recycling"], "num_nodes": 4, "depth": 2},
}
# Two SSMs whose trees differ in shape. Three heads cannot be divided between two ranks.
TWO = {
    "ssms": [{"model": "three heads", "expansion": [2, 1]}, {"model": "ssm", "width": 2}],
    "num_nodes": 5,
    "depth": 2,
}
KINDS["replicated"] = TWO | {"ssm_placement": "replicated"}
if RUNNER == "V1":  # the ranks draw children from the SSM's law, and weigh it against the LLM's
    KINDS["drawn"] = {"ssms": ["ssm"], "verifier": "mss", "num_nodes": 4, "depth": 2}
if RUNNER == "V2":
    KINDS["one per rank"] = TWO | {"ssm_placement": "one_per_rank"}
    drawn = {"ssms": ["ssm", "narrow"], "expansion": [2, 1], "ssm_placement": "one_per_rank", "verifier": "mss"}
    KINDS["drawn one per rank"] = drawn
PLACED = [name for name, options in KINDS.items() if "ssm_placement" in options]
DRAWN = [name for name, options in KINDS.items() if "verifier" in options]
SPREAD = [name for name, options in KINDS.items() if options.get("ssm_placement") == "one_per_rank"]
on_v2 = pytest.mark.skipif(RUNNER != "V2", reason="on the V2 runner")


def answers(llm, prompts=PROMPTS) -> list[list[int]]:
    """Tokens of every answer."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **each) for _, n, each in prompts]
    inputs = [{"prompt_token_ids": prompt} for prompt, _, _ in prompts]
    return [list(each.outputs[0].token_ids) for each in llm.generate(inputs, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import tiny_model
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # Triton's interpreter cannot run this kernel of vLLM's; the twin is its own
    folder = tmp_path_factory.mktemp("models")
    llm = tiny_model.make(folder / "llm", layers=3)
    three = tiny_model.with_three_heads(llm, folder / "three")
    narrow = tiny_model.cut(llm, folder / "narrow", 3)
    np.save(narrow / "draft_vocab.npy", np.arange(8, tiny_model.VOCAB - 8))
    return {"llm": llm, "ssm": tiny_model.cut(llm, folder / "ssm", 2), "three heads": three, "narrow": narrow}


def with_paths(options: dict, models: dict) -> dict:
    """The options of a kind with paths for the names of its SSMs."""
    ssms = [each if isinstance(each, dict) else {"model": each} for each in options.get("ssms", [])]
    return {"method": "tree", **options, "ssms": [each | {"model": str(models[each["model"]])} for each in ssms]}


@pytest.fixture(scope="module")
def plain(models) -> list[list[int]]:
    import ranks

    with ranks.engine(models["llm"], **SETTINGS) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def found(models, plain):
    """(answers, decisions of both ranks, counters of both ranks) of every kind, of `both` disturbed, and deaf.

    held  SSMs of each rank, by kind
    """
    import ranks

    found = {"held": {}}
    for name, options in KINDS.items():
        with ranks.engine(models["llm"], **SETTINGS, speculative_config=with_paths(options, models)) as llm:
            texts = answers(llm, PROMPTS[:FEW] if name in PLACED else PROMPTS)
            found[name] = texts, ranks.decisions(llm), llm.collective_rpc("tree_stats")
            found["held"][name] = llm.collective_rpc("ssms_held")
            if name == "both":
                texts = {str(len(PROMPTS) + i): plain[at] for i, at in enumerate(LONG)}
                llm.collective_rpc("disturb", args=(1, texts))
                found["disturbed"] = answers(llm, [PROMPTS[at] for at in LONG]), ranks.decisions(llm), None
            if name == "drawn one per rank":
                llm.collective_rpc("deafen")
                found["deaf"] = answers(llm, PROMPTS[2:3]), ranks.decisions(llm), None
    return found


@inside
@pytest.mark.parametrize("name", KINDS)
def test_every_rank_decides_alike(found, name):
    import ranks

    _, decided, stats = found[name]
    trees = [state for step in decided[0] for state in step.values() if max(state[1], default=-1) >= 0]
    assert len(trees) >= 3
    assert stats[0]["accepted"] > 0
    assert ranks.parted(decided) == []
    assert stats[0] == stats[1]


@inside
@pytest.mark.parametrize("name", KINDS)
def test_texts_are_plain_ones(found, plain, name):
    """Sampled ones too on the V2 runner; on the V1 runner these have plain vLLM's law, and do not tell who drafted."""
    texts = found[name][0]
    for (_, _, params), mine, wanted, others in zip(PROMPTS, texts, plain, found["both"][0], strict=False):
        if RUNNER == "V1" and params["temperature"] > 0:
            assert mine == others or name in DRAWN
        elif name not in DRAWN or params["temperature"] == 0:
            assert mine == wanted


@inside
def test_a_sharded_ssm_that_is_the_llm_is_right(found):
    """Attention and compaction on each rank's own heads: whole paths of a greedy request are accepted, step by step."""
    _, (first, _), _ = found["ssm"]
    (request,) = {each for step in first for each in step if each.startswith("4")}
    lengths = [len(step[request][0]) for step in first if request in step]
    assert lengths[lengths.index(1) :] == [1, 4, 7]


@inside
def test_unseeded_requests_have_the_same_seed_on_every_rank(found):
    _, (first, second), _ = found["both"]
    seeds = [{request: state[3] for step in rank for request, state in step.items()} for rank in (first, second)]
    assert seeds[0] == seeds[1] and len(seeds[0]) == len(PROMPTS)
    drawn = [seed for request, seed in seeds[0].items() if request.startswith("5")]
    assert drawn and abs(drawn[0]) > 1 << 32


@inside
def test_a_rank_that_drafts_differently_is_seen_where_the_texts_are_right(found, plain):
    import ranks

    texts, decided, _ = found["disturbed"]
    assert texts == [plain[at] for at in LONG]
    assert len(ranks.parted(decided)) == 1


# -- SSMs that are not sharded -----------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("name", PLACED)
def test_ssms_stand_where_they_were_placed(found, name):
    both = [0, 1], {"ssm0", "ssm1"}
    apart = [([0], {"ssm0"}), ([1], {"ssm1"})]
    assert found["held"][name] == (apart if name in SPREAD else [both, both])


@inside
@pytest.mark.parametrize("name", PLACED)
def test_trees_hold_what_every_ssm_drafts(found, name):
    _, _, (stats, _) = found[name]
    assert all(stats["accepted_by"][ssm] > 0 for ssm in ("ssm0", "ssm1"))


@inside
@on_v2
def test_ssms_apart_draft_what_whole_ones_on_every_rank_do(found):
    """No two passes of an SSM differ by where the others stand, so that all trees are equal, whoever drafts."""
    (_, (first, _), _), (_, (second, _), _) = found["replicated"], found["one per rank"]

    def trees(steps):
        return [{request.split("-")[0]: state for request, state in step.items()} for step in steps]

    assert trees(first) == trees(second)


@inside
@on_v2
def test_ranks_that_do_not_hear_of_each_other_are_seen(found):
    import ranks

    _, decided, _ = found["deaf"]
    assert ranks.parted(decided)
