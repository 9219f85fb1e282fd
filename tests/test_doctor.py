# SPDX-License-Identifier: Apache-2.0
"""What `specinfer doctor` says of a command line is what vLLM would make of it, without reading weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.config import ModelConfig  # noqa: E402
from vllm.model_executor.model_loader import base_loader  # noqa: E402

from specinfer_vllm import cli, doctor, plugin  # noqa: E402
from specinfer_vllm.engine import launch  # noqa: E402
from specinfer_vllm.engine.outlook import outlook, serve_words  # noqa: E402

COMMAND = Path(sys.executable).with_name("specinfer")
SMALL = ("--max-model-len", "256", "--max-num-seqs", "8")
TREE = ("--speculative-config", "tree")


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Nothing here may get as far as reading weights."""

    def load(*args, **kwargs):
        raise AssertionError("weights are read")

    plugin.register()
    monkeypatch.setattr(base_loader.BaseModelLoader, "load_model", load)


@pytest.fixture
def gpu(monkeypatch):
    """A vLLM that takes this machine for one with a GPU and Triton."""
    import vllm.config.vllm
    import vllm.triton_utils
    from vllm.platforms import current_platform

    platform = type(current_platform)
    for name, value in {
        "is_cpu": lambda self: False,
        "is_cuda_alike": lambda self: True,
        "device_name": "cuda",
        "support_static_graph_mode": lambda self: True,
        "check_and_update_config": classmethod(lambda cls, config: None),  # a CPU's takes the graphs away
    }.items():
        monkeypatch.setattr(platform, name, value)
    for module in (vllm.triton_utils, vllm.config.vllm):
        monkeypatch.setattr(module, "HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


# -- a tree ------------------------------------------------------------------------------------------------------------


def test_a_tree_is_described(model_path):
    line = ["vllm", "serve", str(model_path), *TREE, *SMALL]
    said = outlook(line)
    assert (said.command_line, said.is_tree, said.refusals) == (tuple(line), True, ())
    assert (said.model, said.device) == (str(model_path), "cpu")
    assert (said.runner, said.runner_reason) == ("V1", "Triton does not run on this device")
    assert (said.worker, said.scheduler, said.is_async) == (launch.CPU_WORKER, launch.SCHEDULER, False)
    assert (said.tree_attention, said.attention) == ("TreeCPUAttentionBackend", "CPU_ATTN")
    assert (said.graph_mode, said.tree_graphs, said.other_graphs) == ("NONE",) * 3
    assert (said.nodes, said.depth, said.lookahead_slots) == (8, 8, 0)
    assert (said.proposers, said.verifier) == (("recycling",), "naive (auto)")


def test_a_trees_options_are_in_what_is_said(model_path, ssm_path):
    tree = {"method": "tree", "ssms": [str(ssm_path)], "expansion": [2, 1], "proposers": ["ngram"], "verifier": "mss"}
    said = outlook([str(model_path), "--speculative-config", json.dumps(tree), *SMALL])
    assert (said.nodes, said.depth, said.lookahead_slots) == (4, 2, 3)
    assert (said.proposers, said.primer, said.verifier) == ((str(ssm_path), "ngram"), None, "mss")


@pytest.mark.parametrize(
    ("placement", "ranks", "told"),
    [
        ("sharded", "3", "sharded over 3 ranks"),
        ("replicated", "3", "replicated on 3 ranks"),
        ("one_per_rank", "3", "ssms[0] on rank 0, ssms[1] on rank 1, ssms[2] on rank 2, ssms[3] on rank 0"),
        ("one_per_rank", "1", None),
    ],
)
def test_where_ssms_are_is_said(gpu, model_path, ssm_path, monkeypatch, placement, ranks, told):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "device_count", lambda: 4, raising=False)
    tree = {"method": "tree", "ssms": [str(ssm_path)] * 4, "ssm_placement": placement}
    words = [str(model_path), "--speculative-config", json.dumps(tree), *SMALL, "--tensor-parallel-size", ranks]
    assert outlook(words).placement == told


def test_what_the_checks_warn_of_is_said(model_path):
    said = outlook([str(model_path), *TREE, "--max-num-batched-tokens", "512", "--max-num-seqs", "100"])
    assert not said.refusals
    assert any(
        "max_num_batched_tokens=512 is less than a full batch with its trees needs (900" in x for x in said.notes
    )


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "MODEL"],
        ["/opt/bin/vllm", "serve", "MODEL"],
        ["serve", "MODEL"],
        ["MODEL"],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "MODEL"],
    ],
)
def test_every_way_to_write_the_command_is_read(words):
    assert serve_words(words) == ["MODEL"]


def test_the_model_may_be_an_option_as_vllm_takes_it(model_path):
    assert outlook(["vllm", "serve", "--model", str(model_path), *TREE, *SMALL]).model == str(model_path)


# -- the V2 runner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ((), ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE")),
        (("-cc.cudagraph_mode=FULL",), ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE")),
        (("-cc.cudagraph_mode=PIECEWISE",), ("PIECEWISE", "PIECEWISE", "PIECEWISE")),
        (("--enforce-eager",), ("NONE", "NONE", "NONE")),
    ],
)
def test_a_gpu_gets_the_v2_runner_its_backend_and_graphs(gpu, model_path, flags, graphs):
    said = outlook([str(model_path), *TREE, *SMALL, *flags])
    assert said.refusals == ()
    assert (said.runner, said.runner_reason) == ("V2", "VLLM_USE_V2_MODEL_RUNNER=1")
    assert (said.worker, said.scheduler, said.is_async) == (launch.GPU_WORKER, launch.ASYNC_SCHEDULER, True)
    assert (said.tree_attention, said.attention) == ("TREE_TRITON", "TRITON_ATTN")
    assert (said.graph_mode, said.tree_graphs, said.other_graphs) == graphs


def test_the_reason_without_a_variable_is_triton(gpu, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert outlook(None).runner_reason == "vLLM's choice where Triton runs, as it does here"


def test_on_a_gpu_nothing_is_said_of_graphs_without_a_model(gpu):
    said = outlook(None)
    assert (said.runner, said.tree_attention, said.graph_mode) == ("V2", "TREE_TRITON", None)


def with_attention(name: str) -> tuple[str, ...]:
    return "--speculative-config", json.dumps({"method": "tree", "tree_attention": name})


@pytest.mark.parametrize(
    ("flags", "graphs"), [((), "PIECEWISE"), (("-cc.cudagraph_mode=FULL_DECODE_ONLY", "-cc.mode=0"), "NONE")]
)
def test_what_attends_in_the_kernels_place_is_said_and_takes_no_full_graphs(gpu, model_path, flags, graphs):
    said = outlook([str(model_path), *with_attention("torch"), *SMALL, *flags])
    assert said.refusals == ()
    assert (said.tree_attention, said.attention) == ("TREE_TRITON through torch", "TRITON_ATTN")
    assert (said.graph_mode, said.tree_graphs, said.other_graphs) == (graphs,) * 3


def test_the_configured_graphs_are_what_vllm_makes_of_them(gpu, model_path):
    """By its own words: the builder's answer is never, and vLLM's resolution of it is what was said."""
    from specinfer_vllm.attention import triton
    from specinfer_vllm.engine.outlook import configure, parse

    builder = triton.TreeTritonAttentionMetadataBuilder
    for name, graphs in (("torch", "PIECEWISE"), ("triton", "FULL_AND_PIECEWISE")):
        config = configure(parse([str(model_path), *with_attention(name), *SMALL]))
        support = builder.get_cudagraph_support(config, None)
        assert (triton.library_of(config) is None) == (support.name == "UNIFORM_BATCH") == (name == "triton")
        resolve = config.compilation_config.resolve_cudagraph_mode_and_sizes
        assert resolve(support, "TREE_TRITON", 9, use_v2_model_runner=True).name == graphs


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("xformers", "xformers")])
def test_a_library_is_refused_where_it_is_not_installed(gpu, model_path, monkeypatch, name, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    (refusal,) = outlook([str(model_path), *with_attention(name), *SMALL]).refusals
    wanted = f"tree_attention: '{name}' needs the package {package}, which is not installed here; install it, or use"
    assert wanted in refusal


def test_what_a_library_does_not_know_is_refused_before_weights_are_read(gpu, model_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    line = [str(model_path), *with_attention("flashinfer"), *SMALL]
    assert outlook([*line, "--dtype", "float16"]).refusals == ()
    (refusal,) = outlook([*line, "--dtype", "float32"]).refusals
    assert "tree_attention: 'flashinfer' does not know dtype torch.float32; use tree_attention='triton'" in refusal
    monkeypatch.setattr(ModelConfig, "get_head_size", lambda self: 96)
    (refusal,) = outlook([*line, "--dtype", "float16"]).refusals
    assert "'flashinfer' does not know heads of 96" in refusal


def test_full_graphs_of_mixed_batches_are_refused_with_a_library(gpu, model_path):
    line = [str(model_path), *with_attention("torch"), *SMALL, "-cc.cudagraph_mode=FULL"]
    (refusal,) = outlook(line).refusals
    assert "cudagraph_mode=FULL: " in refusal and "use cudagraph_mode=PIECEWISE or tree_attention='triton'" in refusal


def test_heads_that_the_gpu_backend_refuses_are_named(gpu, model_path, monkeypatch):
    monkeypatch.setattr(ModelConfig, "get_head_size", lambda self: 512)
    said = outlook([str(model_path), *TREE, *SMALL])
    assert said.refusals == ("attention_backend: no tree attention for heads of 512; use another method",)


def test_the_v1_runner_on_a_gpu_is_refused(gpu, model_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    report = doctor.examine([str(model_path), *TREE, *SMALL])
    assert not report.is_healthy and report.outlook.runner == "V1"
    assert any("on a GPU 'tree' runs on vLLM's V2 runner only; unset it" in each for each in report.problems)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in report.outlook.refusals[0]


def test_a_hook_of_the_other_runner_is_named_and_no_problem(monkeypatch):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "take_draft_token_ids")
    report = doctor.examine()
    assert [(each.target.rpartition(".")[2], each.runner) for each in report.hooks if each.state == "missing"] == [
        ("take_draft_token_ids", "V2")
    ]
    assert report.is_healthy and report.outlook.runner == "V1"


def test_a_hook_of_the_runner_that_is_taken_is_a_problem(gpu, monkeypatch):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "take_draft_token_ids")
    assert any("GPUModelRunner.take_draft_token_ids: not found" in each for each in doctor.examine().problems)


# -- no tree -----------------------------------------------------------------------------------------------------------


def test_a_command_line_without_a_tree_is_plain_vllms(model_path):
    said = outlook(["vllm", "serve", str(model_path), *SMALL, "--port", "8001"])
    assert (said.is_tree, said.refusals, said.tree_attention, said.nodes) == (False, (), None, None)
    assert said.worker == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert said.scheduler == "vllm.v1.core.sched.scheduler.Scheduler"
    assert (said.runner, said.attention, said.graph_mode) == ("V1", "CPU_ATTN", "NONE")


def test_a_plain_gpu_backend_is_vllms_to_choose(gpu, model_path):
    assert "chosen by vLLM" in outlook([str(model_path), *SMALL]).attention
    assert outlook([str(model_path), *SMALL, "--attention-backend", "FLASH_ATTN"]).attention == "FLASH_ATTN"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_all_settings_that_are_in_the_way_are_named(model_path):
    said = outlook([str(model_path), *TREE, "--enable-lora", "--pipeline-parallel-size", "2", "--async-scheduling"])
    assert said.is_tree and said.nodes is None
    assert [each.partition(":")[0] for each in said.refusals] == [
        "pipeline_parallel_size=2",
        "enable_lora",
        "async_scheduling",
    ]
    assert all("not supported with method 'tree'" in each for each in said.refusals)


@pytest.mark.parametrize(
    ("words", "is_tree", "message"),
    [
        (["--speculative-config", '{"method": "tree", "nodes": 3}'], True, "did you mean 'num_nodes'"),
        (["--speculative-config", "tre"], None, "'tre' is no method; did you mean 'tree'"),
        ([*TREE, "--no-such-flag"], None, "unrecognized arguments: --no-such-flag"),
        ([*TREE, "--max-model-len", "4"], True, "never fits max_model_len=4"),
        (["--max-model-len", "100000000"], False, "vllm: "),
    ],
)
def test_a_refusal_is_one_line(model_path, words, is_tree, message):
    said = outlook(["vllm", "serve", str(model_path), *words])
    assert said.is_tree is is_tree and len(said.refusals) == 1
    assert message in said.refusals[0] and "\n" not in said.refusals[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vllm", "bench", "latency"], "vllm bench: only command lines of `vllm serve` are known here"),
        (["VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve"], "put variables of the environment in front of"),
    ],
)
def test_a_command_that_serves_nothing_is_refused(words, message):
    said = outlook(words)
    assert said.is_tree is None and message in said.refusals[0]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_reads_a_line_and_prints_json(model_path):
    line = ["vllm", "serve", str(model_path), *TREE, *SMALL, "--port", "8001"]
    done = subprocess.run([COMMAND, "doctor", "--json", "--", *line], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"], said["outlook"]["command_line"]) == (0, True, line), done.stderr
    assert (said["outlook"]["runner"], said["outlook"]["nodes"]) == ("V1", 8)


def test_the_command_ends_with_1_and_no_traceback_when_a_line_is_refused(model_path):
    line = ["vllm", "serve", str(model_path), *TREE, "--enable-lora"]
    done = subprocess.run([COMMAND, "doctor", "--", *line], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    *_, refusal, verdict = done.stdout.splitlines()
    assert refusal.startswith("refused: enable_lora: not supported with method 'tree'")
    assert verdict == "this command line is refused"


def test_every_line_of_the_outlook_is_printed(model_path, capsys):
    words = [str(model_path), *TREE, *SMALL]
    assert cli.main(["doctor", "--", *words]) == 0
    said = capsys.readouterr().out
    assert "V1 (Triton does not run on this device)" in said and "8, at most 8 levels" in said
    assert f"{launch.SCHEDULER}, not asynchronous" in said
    assert said.rstrip().endswith("this command line serves token trees")


def test_without_a_command_line_the_tree_alone_is_described(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "--speculative-config tree\n" in said and launch.CPU_WORKER in said
    assert said.rstrip().endswith("trees can be served here")


def test_a_plain_line_is_said_to_be_plain(model_path, capsys):
    assert cli.main(["doctor", str(model_path), *SMALL]) == 0
    said = capsys.readouterr().out
    assert "plain vLLM: it asks for no tree" in said
    assert said.rstrip().endswith("this command line is plain vLLM's")
