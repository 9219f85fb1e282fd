# SPDX-License-Identifier: Apache-2.0
"""The kernels compile without a GPU, as their Python faces launch them; registers, spills, shared memory counted."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are not compiled in the interpreter's mode", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

from specinfer_vllm.triton_kernels import (  # noqa: E402
    kv_compact,
    mla_attention,
    recycle,
    tree_attention,
    tree_build,
    tree_counts,
    tree_traversal,
    tree_verify,
    tree_walk,
    tuning,
)

REGISTERS = 65_536  # of a multiprocessor
L2 = 50 * 2**20  # of sm_90
BASELINE = Path(__file__).with_name("triton_registers.json")
SLACK = 8  # registers that another build of the same release may take more


class Recorder:
    """Stands in a kernel's place and keeps how it was launched."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))

    def source(self, launch=0):
        """The source and options that Triton would compile for a launch."""
        _, args, kwargs = self.launches[launch]
        names, fixed = self.kernel.arg_names, {p.name for p in self.kernel.params if p.do_not_specialize}
        unaligned = {p.name for p in self.kernel.params if p.do_not_specialize_on_alignment}
        options = {name: value for name, value in kwargs.items() if name not in names}
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        signature, constants, hints = {}, {}, {}
        for i, name in enumerate(names):
            value = values[name]
            special = name not in fixed and isinstance(value, int) and not isinstance(value, bool)
            if value is None or self.kernel.params[i].is_constexpr or (special and value == 1):
                signature[name], constants[(i,)] = "constexpr", value
                continue
            signature[name] = mangle_type(value)
            if (isinstance(value, torch.Tensor) and name not in unaligned) or (special and value % 16 == 0):
                hints[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, hints), options


def record(monkeypatch, module, *kernels):
    recorders = []
    for name in kernels:
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    return recorders


def compiled(recorder, chip):
    source, options = recorder.source()
    target = GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip[3:]), 32)
    try:
        return triton.compile(source, target=target, options=options)
    except (FileNotFoundError, RuntimeError) as error:
        if "Cannot find" in str(error):
            pytest.skip(f"this triton lacks a tool to compile for {chip}: {error}")
        raise


def usage(kernel, folder):
    """Registers per thread, bytes of stack and local memory (where spills go), shared memory of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text)}
        return found["vgpr_count"], found["vgpr_spill_count"], kernel.metadata.shared
    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", folder / "cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared


def hold_to_baseline(case, registers):
    """No more registers than when the baseline was written, for the releases of Triton that it knows.

    SPECINFER_REGISTERS=write writes the baseline of this release anew.
    """
    baseline = json.loads(BASELINE.read_text())
    release = ".".join(triton.__version__.split(".")[:2])
    if os.environ.get("SPECINFER_REGISTERS") == "write":
        baseline.setdefault(release, {})[case] = registers
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n")
    elif release in baseline:
        assert registers <= baseline[release].get(case, 0) + SLACK, f"{case}: more registers than {BASELINE.name} says"


def check(recorder, chip, folder, capsys, label):
    """Compile, print what the compiler reports, and hold it to the chip's limits."""
    kernel = compiled(recorder, chip)
    registers, spilled, shared = usage(kernel, folder)
    warps = kernel.metadata.num_warps
    with capsys.disabled():
        print(f"\n{recorder.kernel.__name__:13} {chip:7} {label:14} {warps=} {registers=} {spilled=} {shared=}", end="")
    hold_to_baseline(f"{recorder.kernel.__name__} {chip} {label}", registers)
    assert spilled == 0
    assert shared <= tuning.chip(chip).shared_memory
    if not chip.startswith("gfx"):
        assert registers * 32 * warps <= REGISTERS
    return kernel


def tensor_cores(kernel):
    """Whether the kernel multiplies with tensor cores."""
    code = kernel.asm["amdgcn" if "amdgcn" in kernel.asm else "ptx"]
    return re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma", code)


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_attention(chip, rows, dim, dtype, cache=None, group=4, keys=8192, requests=8, **options):
    """Call the kernel's face on tensors without storage, planned for the chip. Returns the plan."""
    kv_heads, block = 8, 16
    size = max((cache or dtype).itemsize, dtype.itemsize)
    plan = tuning.attention_plan(chip, requests, kv_heads, group, dim, rows, keys, size)
    key, value = meta(1000, 2, block, kv_heads, dim, dtype=cache or dtype).unbind(1)
    tree_attention.tree_attention(
        meta(requests * rows, kv_heads * group, dim, dtype=dtype),
        key,
        value,
        meta(requests, keys // block),
        meta(requests + 1),
        meta(requests),
        max_rows=rows,
        max_keys=keys,
        scale=0.1,
        plan=plan,
        **options,
    )
    return plan


def bits(rows, words=1, requests=8):
    return meta(requests * rows, words, dtype=torch.int64)


def floats(*shape):
    return meta(*shape, dtype=torch.float32)


EVERYTHING = dict(
    rows=16,
    dim=64,
    dtype=torch.bfloat16,
    ancestors=bits(16, 4),
    depth=meta(128),
    window=4096,
    soft_cap=30.0,
    sinks=floats(32),
    lse=floats(128, 32),
)
ATTENTION = {
    "one row": dict(rows=1, dim=128, dtype=torch.bfloat16),
    "16 nodes": dict(rows=16, dim=128, dtype=torch.bfloat16, ancestors=bits(16)),
    "64 nodes, fp16": dict(rows=64, dim=128, dtype=torch.float16, ancestors=bits(64)),
    "head 256": dict(rows=16, dim=256, dtype=torch.bfloat16, ancestors=bits(16)),
    "fp32": dict(rows=16, dim=64, dtype=torch.float32, ancestors=bits(16)),
    "FP8": dict(
        rows=16,
        dim=128,
        dtype=torch.bfloat16,
        cache=torch.float8_e4m3fn,
        ancestors=bits(16),
        k_scale=floats(1),
        v_scale=floats(8),
    ),
    "everything": EVERYTHING,
}
COMPILED = [
    *(("sm_90", case) for case in ATTENTION),
    *(("sm_80", case) for case in ("16 nodes", "head 256", "fp32")),
    *(("sm_100", case) for case in ("16 nodes", "everything")),
    *(("gfx942", case) for case in ("one row", "16 nodes", "everything")),
]


@pytest.mark.parametrize(("chip", "case"), COMPILED)
def test_attention_compiles_without_spills(case, chip, monkeypatch, tmp_path, capsys):
    attend, merge = record(monkeypatch, tree_attention, "_attend", "_merge_splits")
    launch_attention(chip, **ATTENTION[case])
    kernel = check(attend, chip, tmp_path, capsys, case)
    if merge.launches:
        check(merge, chip, tmp_path, capsys, case)
    assert tensor_cores(kernel), "no tensor-core product"


def launch_mla(monkeypatch, chip, rows, heads, dtype, cache=None, keys=8192, requests=8, block=64, **options):
    """Call latent attention's face on tensors without storage, planned for the chip. Returns the plan."""
    if chip.startswith("gfx"):  # as where torch is built for ROCm, which decides how fp32 is multiplied
        monkeypatch.setattr(torch.version, "hip", "7.0")
    sizes = dtype.itemsize, (cache or dtype).itemsize
    plan = tuning.mla_plan(chip, requests, heads, 512, 64, rows, keys, *sizes)
    mla_attention.mla_attention(
        meta(requests * rows, heads, 576, dtype=dtype),
        meta(1000, block, 576, dtype=cache or dtype),
        meta(requests, keys // block),
        meta(requests + 1),
        meta(requests),
        max_rows=rows,
        max_keys=keys,
        scale=0.1,
        plan=plan,
        **options,
    )
    return plan


MLA = {
    "1 x 16": dict(rows=1, heads=16, dtype=torch.bfloat16),
    "1 x 128": dict(rows=1, heads=128, dtype=torch.bfloat16),
    "16 x 16": dict(rows=16, heads=16, dtype=torch.bfloat16, ancestors=bits(16)),
    "64 x 128, fp16": dict(rows=64, heads=128, dtype=torch.float16, ancestors=bits(64), lse=floats(512, 128)),
    "16 x 20": dict(rows=16, heads=20, dtype=torch.bfloat16, ancestors=bits(16)),
    "16 x 16, fp32": dict(rows=16, heads=16, dtype=torch.float32, ancestors=bits(16)),
    "16 x 16, FP8": dict(
        rows=16,
        heads=16,
        dtype=torch.bfloat16,
        cache=torch.float8_e5m2,  # sm_80 has no e4m3
        ancestors=bits(16),
        cache_scale=floats(1),
    ),
}


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("case", MLA)
def test_mla_compiles_without_spills(case, chip, monkeypatch, tmp_path, capsys):
    (attend,) = record(monkeypatch, mla_attention, "_attend_latent")
    (merge,) = record(monkeypatch, tree_attention, "_merge_splits")
    plan = launch_mla(monkeypatch, chip, **MLA[case])
    kernel = check(attend, chip, tmp_path, capsys, case)
    assert bool(merge.launches) == (plan.splits > 1)
    if merge.launches:
        check(merge, chip, tmp_path, capsys, case)
    assert tensor_cores(kernel), "no tensor-core product"
    halves = re.findall(r"tt\.load .*tensor<\d+x256x!tt\.ptr", kernel.asm["ttir"])
    assert len(halves) == 4 + 2 * (plan.part == 0), "a tile once in each of two loops, for K and V, and the query once"


@pytest.mark.parametrize(("chip", "most"), [("sm_86", 101_376), ("gfx90a", 65_536)])
@pytest.mark.parametrize("case", ["1 x 16", "16 x 16"])
def test_mla_fits_the_smaller_relatives(case, chip, most, monkeypatch, tmp_path, capsys):
    (attend,) = record(monkeypatch, mla_attention, "_attend_latent")
    record(monkeypatch, tree_attention, "_merge_splits")
    launch_mla(monkeypatch, chip, **MLA[case])
    assert check(attend, chip, tmp_path, capsys, case).metadata.shared <= most


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compaction_compiles_without_spills(chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, kv_compact, "_compact")
    geometry = kv_compact.CacheGeometry(meta(60, kv_compact.FIELDS, dtype=torch.int64), 16, 8, 256)
    kv_compact.compact(geometry, bits(9, 1).view(8, 9), meta(8), meta(8, 512))
    check(recorder, chip, tmp_path, capsys, "bf16, 8 x 128")


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("rows", [16, 1024])
def test_building_compiles_without_spills(rows, chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_build, "_build")
    tree_build.build(meta(8 * rows), meta(9), meta(8), max_rows=rows, block_table=meta(8, 512), block_size=16)
    check(recorder, chip, tmp_path, capsys, f"{rows} rows")


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("rows", [16, 64, 1024])
def test_depth_first_order_compiles_without_spills(rows, chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_build, "_depth_first")
    lists = meta(8 * rows), meta(8 * rows), floats(8 * rows)
    tree_build.depth_first(*lists, meta(9), meta(8), max_rows=rows, block_table=meta(8, 512), block_size=16)
    check(recorder, chip, tmp_path, capsys, f"{rows} rows")


def draft_rows(vocab, dtype):
    """1024 draws from 512 laws."""
    return tree_verify.DraftRows(
        meta(65), meta(1024), meta(1024), meta(512, vocab, dtype=dtype), meta(512, dtype=torch.float64), meta(512)
    )


WALKS = {
    "greedy": dict(),
    "naive": dict(seed=8, greedy=8),
    "mss": dict(seed=8, greedy=8, draws=draft_rows(151_936, torch.bfloat16)),
    "w/o replac.": dict(seed=8, draws=draft_rows(151_936, torch.float32), drawing="without_replacement"),
}


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("rule", WALKS)
def test_the_walk_compiles_without_spills(rule, chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_verify, "_verify")
    monkeypatch.setattr(tuning, "architecture", lambda _: chip)
    options = dict(WALKS[rule])
    if "seed" in options:
        options |= {"seed": bits(1)[:, 0], "position": bits(8)[:, 0]}
    if "greedy" in options:
        options["greedy"] = meta(8, dtype=torch.bool)
    logits = meta(64, 151_936, dtype=torch.bfloat16)
    tree_verify.verify(logits, meta(64), meta(64), meta(9), max_depth=7, **options)
    check(recorder, chip, tmp_path, capsys, rule)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("max_depth", [5])
def test_traversal_compiles_without_spills(max_depth, chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_traversal, "_traverse")
    monkeypatch.setattr(tuning, "architecture", lambda _: chip)
    logits, draws = meta(64, 151_936, dtype=torch.bfloat16), draft_rows(151_936, torch.float32)
    keys = {"seed": bits(1)[:, 0], "position": bits(8)[:, 0], "greedy": meta(8, dtype=torch.bool)}
    tree_traversal.traverse(logits, meta(64), meta(64), meta(9), max_depth=max_depth, draws=draws, **keys)
    check(recorder, chip, tmp_path, capsys, f"{max_depth} levels")


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_walk_along_chosen_tokens_compiles_without_spills(chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_walk, "_walk")
    tree_walk.walk(meta(72, dtype=torch.int64), meta(72), meta(72), meta(9), max_depth=8)
    check(recorder, chip, tmp_path, capsys, "8 nodes")


COUNTS = {"2 proposers": 2, "31 proposers": 31, "no trees": None}


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("case", COUNTS)
def test_counting_compiles_without_spills(case, chip, monkeypatch, tmp_path, capsys):
    (recorder,) = record(monkeypatch, tree_counts, "_count")
    owners, trees = COUNTS[case] or 2, None
    if COUNTS[case]:
        trees = tree_counts.CountedTrees(bits(9, 1).view(8, 9), meta(9), meta(72), meta(72))
    sums = meta(len(tree_counts.SUMS), dtype=torch.int64), meta(2, owners, dtype=torch.int64)
    tree_counts.count(*sums, meta(8), trees)
    check(recorder, chip, tmp_path, capsys, case)


def launch_ngram(nodes):
    """Call its face on tensors without storage."""
    slots, weight, out = 65, floats(recycle.CONTEXT), recycle.Grown.empty(8, nodes, "meta")
    slot = meta(8, dtype=torch.int64)
    recycle.ngram(meta(slots, 8192), meta(slots), slot, meta(slots), meta(slots), weight, max_depth=8, out=out)


def launch_recycling(nodes, primer=None):
    """As launch_ngram."""
    slots, ring, width = 65, recycle.WINDOW, 8
    recycle.recycle(
        meta(slots, 8192),
        meta(slots),
        meta(8, dtype=torch.int64),
        meta(slots, ring),
        meta(slots, ring, width),
        floats(slots, ring, width),
        meta(slots),
        meta(slots),
        floats(recycle.CONTEXT),
        max_depth=8,
        out=recycle.Grown.empty(8, nodes, "meta"),
        primer=primer,
    )


def launch_primed(nodes):
    """Recycling with a primer of 40,000 contexts, as launch_ngram."""
    rows, width = 40_000, 8
    table = meta(65_537), meta(rows, dtype=torch.int64), meta(rows, width), floats(rows, width), floats(rows)
    launch_recycling(nodes, recycle.Primer(*table))


DRAFT_FREE = {"recycling": launch_recycling, "primed": launch_primed, "ngram": launch_ngram}


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        *(("recycling", nodes) for nodes in (1, 8, 64, 300, 1024)),
        *(("primed", nodes) for nodes in (8, 1024)),
        *(("ngram", nodes) for nodes in (8, 1024)),
    ],
)
def test_draft_free_trees_compile_without_spills(kind, nodes, chip, monkeypatch, tmp_path, capsys):
    """Up to the most nodes that config.py allows: the candidates stay in registers, as does the window."""
    (recorder,) = record(monkeypatch, recycle, "_grow")
    DRAFT_FREE[kind](nodes)
    check(recorder, chip, tmp_path, capsys, f"{kind} {nodes} nodes")


@pytest.mark.parametrize(("rows", "group"), [(1, 8), (16, 4), (64, 1), (8, 8)])
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_each_key_is_read_once_per_kv_head(rows, group, requests, monkeypatch):
    """Counted from the launch: K/V once per KV head, queries and outputs within 5% of the least possible bytes.

    Partial results come on top: at most a quarter, and few enough to stay in the L2 cache between the two stages.
    """
    keys, dim, kv_heads = 8192, 128, 8
    (attend, merge) = record(monkeypatch, tree_attention, "_attend", "_merge_splits")
    plan = launch_attention(
        "sm_90", rows, dim, torch.bfloat16, group=group, requests=requests, ancestors=bits(rows, requests=requests)
    )
    grid, _, _ = attend.launches[0]
    tiles = grid[0] // plan.splits
    assert grid == (tiles * plan.splits, kv_heads, requests)
    assert tiles * plan.block_rows >= rows * group > (tiles - 1) * plan.block_rows
    kv = 2 * keys * kv_heads * dim * 2 * requests
    ends = 2 * requests * rows * kv_heads * group * dim * 2
    assert tiles * kv + ends <= 1.05 * (kv + ends)
    partial = 4 * tree_attention.workspace_size(requests * rows, kv_heads * group, dim, plan.splits)
    assert bool(merge.launches) == (partial > 0)
    assert 2 * partial <= 0.26 * kv and partial <= L2 / 2


def test_more_registers_than_the_baseline_are_caught(monkeypatch, tmp_path):
    """Negative control: a kernel that takes 9 registers more than it did."""
    file, release = tmp_path / "registers.json", ".".join(triton.__version__.split(".")[:2])
    file.write_text(json.dumps({release: {"kernel": 40}}))
    monkeypatch.setattr("test_triton_compile.BASELINE", file)
    monkeypatch.delenv("SPECINFER_REGISTERS", raising=False)
    hold_to_baseline("kernel", 48)
    with pytest.raises(AssertionError, match="more registers"):
        hold_to_baseline("kernel", 49)


def test_a_plan_that_reads_keys_twice_is_caught(monkeypatch):
    """Negative control for the count: tiles of 16 rows read K and V four times for 64 packed rows."""
    plan = tuning.AttentionPlan(block_rows=16, block_keys=64, splits=1, num_warps=4, num_stages=3)
    monkeypatch.setattr(tuning, "attention_plan", lambda *_: plan)
    with pytest.raises(AssertionError):
        test_each_key_is_read_once_per_kv_head(16, 4, 64, monkeypatch)


@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (1, 128), (16, 16), (64, 128)])
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_each_latent_is_read_once_per_tile(rows, heads, requests, monkeypatch):
    """Counted from the launch: as few tiles as the table's heights allow, no chip half idle for want of splits.

    Partial results come on top, few enough to stay in the L2 cache between the two stages.
    """
    (attend,) = record(monkeypatch, mla_attention, "_attend_latent")
    (merge,) = record(monkeypatch, tree_attention, "_merge_splits")
    ancestors = bits(rows, requests=requests)
    plan = launch_mla(monkeypatch, "sm_90", rows, heads, torch.bfloat16, requests=requests, ancestors=ancestors)
    grid, _, _ = attend.launches[0]
    tiles = -(-rows * heads // 32)
    assert grid == (tiles * plan.splits, requests)
    assert 2 * grid[0] * requests > 132 or plan.splits * 128 >= 8192
    partial = 4 * tree_attention.workspace_size(requests * rows, heads, 512, plan.splits)
    assert bool(merge.launches) == (partial > 0)
    assert partial <= L2 / 2


def test_low_tiles_of_latents_are_caught(monkeypatch):
    """Negative control for the count: tiles of 16 rows read the latents eight times for 128 heads, instead of four."""
    plan = tuning.MlaPlan(block_rows=16, block_keys=32, splits=1, num_warps=4, num_stages=5)
    monkeypatch.setattr(tuning, "mla_plan", lambda *_: plan)
    with pytest.raises(AssertionError):
        test_each_latent_is_read_once_per_tile(1, 128, 64, monkeypatch)
