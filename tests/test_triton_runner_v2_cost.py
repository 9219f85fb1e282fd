# SPDX-License-Identifier: Apache-2.0
"""A step of the V2 runner launches as much for any tree and any batch, and the host never waits for the device.

Prints the launches (-s). launches.py says how a GPU's tensors are told from the host's.
"""

import os
from types import SimpleNamespace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("runs in a process of its own, see test_triton_interpreter.py", allow_module_level=True)

import graphs  # noqa: E402
import numpy as np  # noqa: E402
import tiny_model  # noqa: E402
import torch  # noqa: E402
from engines import engine  # noqa: E402
from launches import Meter  # noqa: E402
from test_device_draws import sampled  # noqa: E402
from test_draft_exchange import drafts_of  # noqa: E402
from test_triton_tree_verify import arguments  # noqa: E402
from test_verify_enumeration import no_replacement  # noqa: E402
from test_verify_rules import random_batch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.utils import torch_utils  # noqa: E402

from specinfer_vllm.bench.engines import runner_of  # noqa: E402
from specinfer_vllm.engine.device_trees import DeviceTrees  # noqa: E402
from specinfer_vllm.engine.draft_exchange import DraftExchange, DraftShape  # noqa: E402
from specinfer_vllm.engine.gpu_kv_compaction import GpuKvCompaction  # noqa: E402
from specinfer_vllm.engine.runner_v2 import StepRows, TreeRunnerV2Mixin  # noqa: E402
from specinfer_vllm.triton_kernels.tree_traversal import traverse  # noqa: E402
from specinfer_vllm.triton_kernels.tree_verify import Walk, verify  # noqa: E402

# -- whole steps -------------------------------------------------------------------------------------------------------

# (nodes, depth), each with the numbers of requests that are measured
BASE = (16, 5)
MEASURED = {BASE: (1, 4), (16, 2): (1,), (16, 8): (1,), (4, 4): (4,), (70, 5): (1,)}
PER_LEVEL = ("ssm levels", "ssm passes")


def steps(llm, requests: int, count: int = 1) -> list:
    """The last steps of some requests with trees; the first two are the prompts' and one that fills caches."""
    engine, meter = llm.llm_engine, Meter()
    with meter.installed():
        for request in range(requests):
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(str(request), {"prompt_token_ids": [3 + request, 4, 5, 6, 4, 5]}, params)
        for _ in range(2 + count):
            engine.step()
    engine.abort_request([str(request) for request in range(requests)])
    engine.step()
    seen = meter.steps[2:]
    assert len(seen) == count and all(step.requests == requests and step.drafts for step in seen)
    return meter.steps


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Steps by (nodes, depth, requests), and what the controls saw on the first engine."""
    folder = tmp_path_factory.mktemp("models")
    llm_path = tiny_model.make(folder / "llm", layers=2)
    ssm_path = tiny_model.cut(llm_path, folder / "ssm", layers=1)
    primer = tiny_model.primer(folder / "primer.npz", [[3, 4, 5, 6, 7]])
    found, controls = {}, {}
    for (nodes, depth), batches in MEASURED.items():
        tree = {
            "method": "tree",
            "num_nodes": nodes,
            "depth": depth,
            "ssms": [str(ssm_path)],
            "proposers": ["recycling", "ngram"],
            "primer": str(primer),
        }
        with engine(
            llm_path,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 24,
            skip_tokenizer_init=True,
            speculative_config=tree,
        ) as llm:
            for requests in batches:
                found[nodes, depth, requests] = steps(llm, requests)
            if (nodes, depth) == BASE:
                controls = {name: steps_with(control, llm) for name, control in CONTROLS.items()}
                graphs.capture(runner_of(llm), sizes=[2, 4])
                captured = [steps(llm, requests) for requests in (1, 3)]
    print(table(found | {"graphs, 1 request": captured[0], "graphs, 3 requests": captured[1]}))
    return SimpleNamespace(found=found, controls=controls, captured=captured)


def table(found: dict) -> str:
    """Launches of the last step, phase by configuration."""
    last = {name: each[-1].counts() for name, each in found.items()}
    phases = list(next(iter(last.values())))
    lines = ["", f"{'nodes, depth, requests':>24}" + "".join(f"{phase:>13}" for phase in phases)]
    lines += [
        f"{name!s:>24}" + "".join(f"{counts.get(phase, 0):13}" for phase in phases) for name, counts in last.items()
    ]
    return "\n".join(lines)


def test_launches_depend_on_neither_tree_nor_batch(measured):
    constant = [
        {phase: count for phase, count in each[-1].counts().items() if phase not in PER_LEVEL}
        for each in measured.found.values()
    ]
    assert {"prepare", "verify", "postprocess", "propose", "ssm"} <= set(constant[0])
    assert all(counts == constant[0] for counts in constant), table(measured.found)
    assert sum(constant[0].values()) < 145


def test_a_level_of_an_ssm_costs_as_much_as_the_next(measured):
    """One pass per level; draws and the rows around a pass take as many launches on every level but the first."""
    by_depth = {}
    for (_, depth, _), each in measured.found.items():
        step = each[-1]
        assert step.calls["ssm passes"] == depth
        by_depth.setdefault(depth, set()).add(tuple(step.counts()[phase] for phase in PER_LEVEL))
    assert all(len(counts) == 1 for counts in by_depth.values()), table(measured.found)
    (first,) = by_depth.pop(2)
    slopes = {
        tuple((now - then) / (depth - 2) for now, then in zip(counts, first, strict=True))
        for depth, (counts,) in by_depth.items()
    }
    assert len(slopes) == 1, table(measured.found)


def test_graphs_hold_all_drafting(measured):
    """What is left stages the step: two replays, of the SSM's reading and of all that follows it."""
    one, three = (each[-1].launches for each in measured.captured)
    assert one["propose"] == three["propose"]
    assert one["propose"]["graph"] == 2
    assert one["propose"].total() < 20
    assert not set(one) & {"ssm", *PER_LEVEL}


def test_the_host_never_waits(measured):
    """Prompts and first steps included, where caches are filled."""
    waits = {wait for each in (*measured.found.values(), *measured.captured) for step in each for wait in step.waits}
    assert not waits, "\n".join(sorted(waits))


# -- negative controls -------------------------------------------------------------------------------------------------


def steps_with(control, llm) -> list:
    """Steps of one request in which `control` sees what is drafted."""
    write = DeviceTrees.write

    def watched(trees, slots, nodes):
        control(nodes.token)
        return write(trees, slots, nodes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceTrees, "write", watched)
        return steps(llm, 1)


def loop(token) -> None:
    for node in range(token.shape[1]):
        token[:, node].clamp(min=0)


CONTROLS = {"wait": lambda token: token.max().item(), "loop": loop}


def test_a_wait_in_propose_is_caught(measured):
    waits = measured.controls["wait"][-1].waits
    assert waits and all(wait.startswith("propose: ") and "token.max().item()" in wait for wait in waits)


def test_a_loop_over_nodes_is_caught(measured):
    plain, looped = measured.found[*BASE, 1][-1], measured.controls["loop"][-1]
    assert looped.counts()["propose"] == plain.counts()["propose"] + BASE[0]


def with_host_index(tensor) -> None:
    tensor[torch.arange(2)]


def sent(tensor) -> None:
    torch.ones(3).to(tensor.device)


def listed(tensor) -> None:
    torch.tensor([1, 2], device=tensor.device)


WAITS = {
    "bool": lambda tensor: bool(tensor.any()),
    "copy to": lambda tensor: tensor.to("cpu"),
    "cpu": lambda tensor: tensor.cpu(),
    "float": lambda tensor: float(tensor[0]),
    "from a list": listed,
    "host index": with_host_index,
    "int as a bound": lambda tensor: range(tensor[0].int()),
    "list": lambda tensor: tensor.tolist(),
    "mask": lambda tensor: tensor[tensor > 0],
    "masked_select": lambda tensor: tensor.masked_select(tensor > 0),
    "nonzero": lambda tensor: tensor.nonzero(),
    "numpy": lambda tensor: tensor.numpy(),
    "repeat": lambda tensor: tensor.repeat_interleave(tensor.long()),
    "send and wait": sent,
    "unique": lambda tensor: tensor.unique(),
}


def looked_at(control):
    """The step in which a control sees a tensor of the device."""
    tensor = torch.arange(3.0)
    with torch.inference_mode(), Meter().watching("here") as step:
        control(tensor)
    return step


@pytest.mark.parametrize("control", WAITS)
def test_every_kind_of_wait_is_seen(control):
    assert looked_at(WAITS[control]).waits


def test_what_does_not_wait_is_not_taken_for_it():
    def control(tensor):
        index = torch_utils.async_tensor_h2d(np.array([0, 2]), device=tensor.device)
        tensor[index] += 1
        tensor.repeat_interleave(tensor.long(), output_size=5)
        host = torch.arange(4)
        assert int(host.max()) == 3 and host.tolist() and host[host > 1].numpy().sum() == 5
        tensor.masked_fill_(tensor > 1, 0)

    step = looked_at(control)
    assert not step.waits
    # The copy, a gather, a sum, a scatter, a cast, two for the repetition, a comparison, a fill.
    assert step.counts() == {"here": 9}, step.launches


def test_compaction_is_one_launch_for_all_layers():
    for layers, requests in ((1, 1), (3, 4)):
        compaction = GpuKvCompaction([torch.zeros(4, 2, 8, 16) for _ in range(layers)])
        path = torch.tensor([[0, 2]]).repeat(requests, 1)
        walked = Walk(path, path, torch.full((requests,), 2).int())
        table = torch.arange(4).int().view(-1, 1)
        with Meter().watching("compact") as step:
            compaction.compact(walked, torch.zeros(requests, dtype=torch.int32), table)
        assert step.counts() == {"compact": 1} and not step.waits


def test_groups_of_layers_are_a_launch_each_along_their_own_tables():
    """Group 0 has blocks of 8 slots, group 1 of 4: what stands at index 6 of the sequence moves to index 2."""
    caches = [torch.randn(4, 2, size, 16) for size in (8, 4)]
    expected = [cache.clone() for cache in caches]
    expected[0][1, :, 2] = caches[0][1, :, 6]
    expected[1][2, :, 2] = caches[1][3, :, 2]
    groups = [(group, GpuKvCompaction([cache])) for group, cache in enumerate(caches)]
    tables = torch.tensor([[1, 0]]).int(), torch.tensor([[2, 3]]).int()
    runner = SimpleNamespace(step=StepRows(tables, torch.tensor([1]).int(), ()), _compactions=lambda: groups)
    path = torch.tensor([[7, 12, -1]])
    with Meter().watching("compact") as step:
        TreeRunnerV2Mixin._compact(runner, Walk(path, path, torch.tensor([2]).int()))
    assert step.counts() == {"compact": 2} and not step.waits
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("weighed", [(), (3, 8)], ids=["draws", "draws and laws"])
def test_an_exchange_of_drafts_costs_as_much_for_any_batch_and_waits_for_nothing(weighed):
    counts = []
    for draws, requests in ((2, 1), (9, 4)):
        shape = DraftShape(draws, *weighed)
        exchange = DraftExchange([shape, shape], 1, 2, lambda words: words.repeat(2))
        drafts = drafts_of(shape, requests)
        with torch.inference_mode(), Meter().watching("exchange") as step:
            exchange.share([drafts], requests, torch.device("cpu"))
        assert not step.waits
        counts.append(step.counts()["exchange"])
    assert counts[0] == counts[1] < 12


@pytest.mark.parametrize("rule", ["mss", "without_replacement", "traversal"])
def test_draws_cost_as_much_however_many_there_are(rule):
    """From the speculator's draws to the walk; one launch of it."""
    seen = []
    for requests in (1, 6):
        rng = np.random.default_rng(1)
        batch = random_batch(rng, requests, no_replacement)
        (drawn, slots), given = sampled(batch, rng), arguments(batch, None)
        drawing = "iid" if rule == "mss" else "without_replacement"
        with Meter().watching("verify") as step:
            draws = drawn.rows(slots, slots >= 0, given["start"], given["tokens"], drawing)
            accept = traverse if rule == "traversal" else verify
            accept(**given, draws=draws, drawing=drawing)
        assert not step.waits, step.waits
        assert step.launches["verify"]["_traverse" if rule == "traversal" else "_verify"] == 1
        seen.append(step.launches)
    assert seen[0] == seen[1]
    assert seen[0]["verify"].total() < 40
