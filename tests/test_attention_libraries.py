# SPDX-License-Identifier: Apache-2.0
"""Tree attention through torch, FlashInfer and xFormers against the kernel's float64 reference.

The two libraries need GPUs: stand-ins check that what they are given is what their sources ask for, see
attention_stand_ins.py.
"""

import ast
import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import attention_stand_ins as stand_ins
import pytest
import torch

pytest.importorskip("triton")

from specinfer_vllm.attention import flashinfer_masks  # noqa: E402
from specinfer_vllm.attention.libraries import LIBRARIES, AttentionKind  # noqa: E402
from specinfer_vllm.attention.tree_call import TreeCall  # noqa: E402
from specinfer_vllm.bench.kernels.measure import relative_error  # noqa: E402
from specinfer_vllm.bench.kernels.tree_attention import inputs  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_attention as reference  # noqa: E402

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PLAIN = {"contexts": (0, 17, 40, 5), "nodes": (3, 9, 1, 70), "head_dim": 64, "group": 2}


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Every option has something to run, and small buffers."""
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(flashinfer_masks, "WORKSPACE", 1 << 10)
    flashinfer_masks.workspace_of.cache_clear()
    yield
    flashinfer_masks.workspace_of.cache_clear()


def made(case, **more) -> TreeCall:
    """A call over a cache that is NaN, and a block table that points nowhere, behind what each request has."""
    arguments = inputs(CPU, **case)
    table, size = arguments["block_table"], arguments["key"].shape[1]
    for request, (context, nodes) in enumerate(zip(case["contexts"], case["nodes"], strict=True)):
        table[request, -(-(context + nodes) // size) :] = 2**31 - 1
    return TreeCall(**arguments, output=torch.full_like(arguments["query"], 7.0), **more)


def expected(call: TreeCall) -> torch.Tensor:
    """The reference's output, float64."""
    return reference.tree_attention(**{name: value for name, value in vars(call).items() if name not in OURS})


OURS = ("output", "shared", "kept")


def error(library: str, call: TreeCall) -> float:
    LIBRARIES[library].attend(call)
    return relative_error(call.output, expected(call))


def random_case(seed: int) -> dict:
    """Any trees, heads, cache, window, soft cap and sinks."""
    chance = random.Random(seed)
    requests = chance.randrange(1, 6)
    nodes = [chance.choice([0, 1, 5, 20]) for _ in range(requests - 1)]
    nodes.insert(chance.randrange(requests), chance.choice([1, 9, 65]))
    case = {
        "contexts": [chance.choice([0, 1, 15, 16, 17, 60]) for _ in nodes],
        "nodes": nodes,
        "group": chance.choice([1, 2, 3]),
        "kv_heads": chance.choice([1, 2]),
        "head_dim": chance.choice([64, 64, 128]),
        "block_size": chance.choice([1, 16, 24]),
        "dtype": chance.choice(list(TOLERANCE)),
        "layout": chance.choice(["NHD", "HND", "interleaved"]),
        "last": chance.choice([None, None, 4]),
        "sinks": chance.random() < 0.3,
        "scales": chance.random() < 0.3,
        "seed": seed,
    }
    if chance.random() < 0.4:
        case["window"] = chance.choice([1, 6, 30])
    if chance.random() < 0.3:
        case["soft_cap"] = 2.0
    if case["scales"]:
        case["cache_dtype"] = chance.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    return case


def kind(case: dict) -> AttentionKind:
    return AttentionKind(case["head_dim"], case["dtype"], case["sinks"], "soft_cap" in case, case["scales"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_trees_give_what_the_reference_gives(library):
    cases = [case for case in map(random_case, range(48)) if not LIBRARIES[library].unknown(kind(case))]
    assert len(cases) >= 10
    for case in cases:
        assert error(library, made(case)) <= TOLERANCE[case["dtype"]], case


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_behind_the_trees_are_left_alone(library):
    call = made(PLAIN | {"dtype": torch.float16})
    wanted, more = expected(call), torch.zeros(5, *call.query.shape[1:], dtype=torch.float16)
    padded = replace(call, query=torch.cat([call.query, more]), output=torch.cat([call.output, more + 7]))
    padded = replace(padded, ancestors=torch.cat([call.ancestors, call.ancestors[:5]]))
    LIBRARIES[library].attend(padded)
    assert relative_error(padded.output[:-5], wanted) <= 2e-3
    assert (padded.output[-5:] == 7).all()


def test_a_row_that_sees_nothing_is_zero():
    call = made({"contexts": (0,), "nodes": (2,), "dtype": torch.float32})
    call.ancestors[1] = 0
    LIBRARIES["torch"].attend(call)
    assert (call.output[1] == 0).all() and relative_error(call.output[:1], expected(call)[:1]) <= 1e-5


def test_torch_does_not_read_what_no_row_sees():
    """Keys out of the window, and a slot that no row has for an ancestor, hold NaN."""
    call = made({"contexts": (40,), "nodes": (6,), "dtype": torch.float32, "window": 6, "layout": "HND"})
    call.ancestors[:, 0] = torch.tensor([1, 3, 5, 11, 21, 1])  # the last row sees the root instead of itself
    call.depth.copy_(torch.tensor([0, 1, 1, 2, 2, 1]))
    call.query_depth.copy_(call.depth)
    for index in (45, *range(30)):
        at = call.block_table[0, index // 16], index % 16
        call.key[at] = call.value[at] = torch.nan
    assert error("torch", call) <= 1e-5


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("wrong", ["a chain", "slots for depths", "another prefix", "a neighbour's tree"])
def test_a_wrong_mask_is_caught(library, wrong):
    """Negative control."""
    call = made({"contexts": (30, 50), "nodes": (20, 20), "dtype": torch.float16, "window": 12, "head_dim": 64})
    wanted, local = expected(call), torch.arange(20).repeat(2)
    changed = {
        "a chain": {"ancestors": ((2 << local) - 1)[:, None]},
        "slots for depths": {"depth": local.int(), "query_depth": local.int()},
        "another prefix": {"prefix_len": call.prefix_len - 1},
        "a neighbour's tree": {"ancestors": call.ancestors.roll(20, 0)},
    }[wrong]
    LIBRARIES[library].attend(replace(call, **changed, shared={}))
    assert relative_error(call.output, wanted) > 2e-2


def test_layers_and_steps_share_plans():
    kept: dict = {}
    for step in range(2):
        shared: dict = {}
        for window in (0, 6, 0, 6):  # layers of two kinds, in turn
            case = PLAIN | {"dtype": torch.float16, "window": window, "seed": step}
            call = made(case, shared=shared, kept=kept)
            assert error("flashinfer", call) <= 2e-3
    wrappers = list(kept.values())
    assert [each.plans for each in wrappers] == [2, 2]


def test_flashinfer_is_not_given_more_than_it_can_count(monkeypatch):
    monkeypatch.setattr(flashinfer_masks, "MAX_MASK", 100)
    with pytest.raises(ValueError, match="tree_attention: 'flashinfer' takes masks of up to 100 entries.*triton"):
        LIBRARIES["flashinfer"].attend(made(PLAIN | {"dtype": torch.float16}))


@pytest.mark.parametrize(
    ("library", "change", "reason"),
    [
        ("flashinfer", {"head_size": 80}, "heads of 80"),
        ("flashinfer", {"dtype": torch.float32}, "dtype torch.float32"),
        ("flashinfer", {"has_sinks": True}, "sinks"),
        ("flashinfer", {"is_quantised": True}, "quantised K/V"),
        ("flashinfer", {"is_amd": True}, "AMD GPUs"),
        ("xformers", {"head_size": 84}, "heads of 84"),
        ("xformers", {"has_sinks": True}, "sinks"),
        ("xformers", {"has_soft_cap": True}, "a soft cap"),
        ("xformers", {"is_quantised": True}, "quantised K/V"),
        ("xformers", {"is_amd": True}, "AMD GPUs"),
        ("xformers", {"capability": (10, 0)}, "a device of compute capability 10.0"),
    ],
)
def test_what_a_library_does_not_know_is_named(library, change, reason):
    known = AttentionKind(64, torch.float16, capability=(9, 0))
    assert [each.unknown(known) for each in LIBRARIES.values()] == [[], [], []]
    assert LIBRARIES[library].unknown(replace(known, **change)) == [reason]
    assert LIBRARIES["torch"].unknown(replace(known, **change)) == []


@pytest.mark.parametrize(
    ("module", "file", "path"),
    [
        ("flashinfer", "prefill.py", ("BatchPrefillWithPagedKVCacheWrapper", "__init__")),
        ("flashinfer", "prefill.py", ("BatchPrefillWithPagedKVCacheWrapper", "plan")),
        ("flashinfer", "prefill.py", ("BatchPrefillWithPagedKVCacheWrapper", "run")),
        ("xformers", "ops/fmha/__init__.py", ("memory_efficient_attention_forward",)),
    ],
)
def test_the_libraries_have_the_parameters_of_the_stand_ins(monkeypatch, module, file, path):
    """In the sources of a library that is installed, which is not imported. The last may stand further behind."""
    monkeypatch.delitem(sys.modules, module)
    spec = importlib.util.find_spec(module)
    if spec is None:
        pytest.skip(f"{module} is not installed")
    found = parameters(Path(spec.origin).parent / file, path)
    *first, last = parameters(Path(stand_ins.__file__), path)
    assert found[: len(first)] == first and last in found


def parameters(file: Path, path: tuple[str, ...]) -> list[str]:
    """Of a function in a source, the last of those with its name."""
    found = ast.parse(file.read_text(encoding="utf-8"))
    for name in path:
        found = [each for each in found.body if getattr(each, "name", None) == name][-1]
    return [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]
