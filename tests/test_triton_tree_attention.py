# SPDX-License-Identifier: Apache-2.0
"""Tree attention in Triton's interpreter against a dense float64 softmax over keys that were never paged."""

import os
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import chain, comb, mapped, random_tree, star  # noqa: E402

from specinfer_vllm.triton_kernels.reference import tree_attention as reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_attention import (  # noqa: E402
    plan_for,
    tree_attention,
    workspace_size,
)
from specinfer_vllm.triton_kernels.tuning import AttentionPlan  # noqa: E402

WORD_BITS = 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ONE_PASS = AttentionPlan(block_rows=16, block_keys=16, splits=1, num_warps=4, num_stages=1)
SPLIT = AttentionPlan(block_rows=32, block_keys=16, splits=4, num_warps=4, num_stages=1)


def see_and_depth(parent):
    """Dense visibility [rows, rows] bool and depths [rows] of a tree given by its parents."""
    see, depth = np.eye(len(parent), dtype=bool), np.zeros(len(parent), np.int32)
    for i, p in enumerate(parent):
        if p >= 0:
            see[i] |= see[p]
            depth[i] = depth[p] + 1
    return see, depth


def words_of(see, words):
    """Bits [rows, words] int64 of dense visibility [rows, slots]."""
    padded = np.zeros((len(see), words * WORD_BITS), bool)
    padded[:, : see.shape[1]] = see
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int64).copy())


def nhd(blocks, size, heads, dim):
    return torch.empty(blocks, 2, size, heads, dim).unbind(1)


def hnd(blocks, size, heads, dim):
    key, value = torch.empty(2, blocks, heads, size, dim)
    return key.transpose(1, 2), value.transpose(1, 2)


def interleaved(blocks, size, heads, dim):
    both = torch.empty(blocks, heads, size, 2 * dim).transpose(1, 2)
    return both[..., :dim], both[..., dim:]


def strided(blocks, size, heads, dim):
    """Gaps between all neighbours, K with dimension before head, as no layout of today has it."""
    key = torch.empty(blocks + 1, size, dim + 3, heads + 1)[1:, :, :dim, :heads].transpose(2, 3)
    return key, torch.empty(blocks, 2 * size, heads, dim + 5)[:, ::2, :, :dim]


LAYOUTS = {"NHD": nhd, "HND": hnd, "interleaved": interleaved, "gaps": strided}


@dataclass
class Case:
    """Requests with K/V in a cache that is NaN wherever no row looks, and the dense truth.

    trees: parents of each request's tree slots; prefix: committed tokens of each; last: only so many last rows of each
    tree are queries; causal: no bits.
    """

    trees: list
    prefix: list
    block: int = 16
    dim: int = 64
    heads: int = 2
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "NHD"
    last: int | None = None
    causal: bool = False
    seed: int = 0
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        sizes = [len(tree) for tree in self.trees]
        self.lengths = [p + n for p, n in zip(self.prefix, sizes, strict=True)]
        self.fill_cache()
        seen = [see_and_depth(tree) for tree in self.trees]
        self.first = [max(0, n - (self.last if self.last is not None else n)) for n in sizes]
        self.see = [see[f:] for (see, _), f in zip(seen, self.first, strict=True)]
        self.depths = [depth for _, depth in seen]
        counts = [n - f for n, f in zip(sizes, self.first, strict=True)]
        self.query_start = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        self.tree_start = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32)
        words = max(1, -(-max([*sizes, 1]) // WORD_BITS))
        self.bits = torch.cat([words_of(see, words) for see in self.see])
        self.query = torch.randn(sum(counts), self.heads, self.dim).to(self.dtype)
        self.max_rows, self.max_keys = max(counts), max(self.lengths)

    def fill_cache(self):
        """Random K/V of every key, in blocks in random order; NaN elsewhere, and block numbers that point nowhere."""
        store = self.cache_dtype or self.dtype
        blocks = [-(-length // self.block) for length in self.lengths]
        order = (torch.randperm(sum(blocks)) + 1).to(torch.int32)
        caches = LAYOUTS[self.layout](sum(blocks) + 1, self.block, self.kv_heads, self.dim)
        for cache in caches:
            storage(cache).fill_(float("nan"))
        self.table = torch.full((len(blocks), max(blocks) + 2), 2**31 - 1, dtype=torch.int32)
        self.keys, self.values = [], []
        for r, (length, mine) in enumerate(zip(self.lengths, order.split(blocks), strict=True)):
            self.table[r, : blocks[r]] = mine
            slots = torch.arange(length)
            where = mine[slots // self.block].long(), slots % self.block
            for cache, truth in zip(caches, (self.keys, self.values), strict=True):
                rows = torch.randn(length, self.kv_heads, self.dim).to(store).float()
                cache[where] = rows
                truth.append(rows.double())
        # Converting all of the storage keeps strides and poison.
        self.key, self.value = (
            torch.as_strided(storage(cache).to(store), cache.shape, cache.stride(), cache.storage_offset())
            for cache in caches
        )

    def arguments(self):
        arguments = {"scale": self.dim**-0.5, **self.options}
        if not self.causal:
            arguments["ancestors"] = self.bits
        if self.last is not None:
            arguments["tree_start"] = self.tree_start
        if self.options.get("window") and not self.causal:
            depths = [torch.from_numpy(d) for d in self.depths]
            arguments["depth"] = torch.cat(depths)
            if self.last is not None:
                arguments["query_depth"] = torch.cat([d[f:] for d, f in zip(depths, self.first, strict=True)])
        return arguments

    def run(self, plan=None, attend=tree_attention, **more):
        return attend(
            self.query,
            self.key,
            self.value,
            self.table,
            self.query_start,
            torch.tensor(self.prefix, dtype=torch.int32),
            max_rows=self.max_rows,
            max_keys=self.max_keys,
            plan=plan,
            **{**self.arguments(), **more},
        )

    def dense(self):
        """Output [rows, heads, head_dim] and lse [rows, heads] in float64."""
        options, outputs, sums = self.options, [], []
        group, one = self.heads // self.kv_heads, torch.ones(1)
        k_scale, v_scale = (options.get(name, one).double()[:, None] for name in ("k_scale", "v_scale"))
        for r, prefix in enumerate(self.prefix):
            start, end = self.query_start[r : r + 2]
            see = torch.from_numpy(self.see[r])
            see = torch.cat([torch.ones(len(see), prefix, dtype=torch.bool), see], dim=1)
            if options.get("window"):
                position = torch.from_numpy(np.concatenate([np.arange(prefix), prefix + self.depths[r]]))
                see &= position[prefix + self.first[r] :, None] - position < options["window"]
            keys = (self.keys[r] * k_scale).repeat_interleave(group, dim=1)
            values = (self.values[r] * v_scale).repeat_interleave(group, dim=1)
            s = torch.einsum("qhd,khd->qhk", self.query[start:end].double(), keys) * self.dim**-0.5
            if cap := options.get("soft_cap"):
                s = torch.tanh(s / cap) * cap
            s = s.masked_fill(~see[:, None], float("-inf"))
            if (sinks := options.get("sinks")) is not None:
                s = torch.cat([s, sinks.double()[None, :, None].expand(len(see), -1, 1)], dim=2)
            outputs.append(torch.einsum("qhk,khd->qhd", s.softmax(2)[..., : len(keys)], values))
            sums.append(s.logsumexp(2))
        return torch.cat(outputs), torch.cat(sums)

    def check(self, plan=None):
        lse = torch.full(self.query.shape[:2], 7.0)
        output = self.run(plan, lse=lse)
        expected, sums = self.dense()
        assert error(output, expected) <= TOLERANCE[self.dtype]
        assert error(lse, sums) <= TOLERANCE[self.dtype]


def storage(tensor):
    """All elements of the tensor's storage as a flat tensor."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def error(result, expected):
    """Largest distance, relative to the largest expected magnitude; infinite where a result is NaN."""
    if not expected.numel():
        return 0.0
    distance = (result.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return float(distance.nan_to_num(nan=float("inf")))


RNG = np.random.default_rng(5)
SHAPES = {
    "root only, empty prefix": ([chain(1)], [0]),
    "root only": ([chain(1), chain(1)], [37, 1]),
    "empty prefix": ([random_tree(RNG, 6)], [0]),
    "chain": ([chain(9)], [20]),
    "star": ([star(12)], [16]),
    "comb": ([comb(15)], [33]),
    "block boundaries": ([random_tree(RNG, 9), random_tree(RNG, 3), random_tree(RNG, 16)], [31, 32, 16]),
    "forest": ([chain(1), random_tree(RNG, 17), star(5), [], comb(9), chain(4)], [40, 3, 64, 9, 0, 31]),
    "a request without rows at either end": ([[], chain(3), []], [0, 18, 5]),
}


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT, None], ids=["one pass", "split", "table"])
@pytest.mark.parametrize("shape", SHAPES, ids=list(SHAPES))
def test_rows_see_the_prefix_and_their_ancestors_only(shape, plan):
    Case(*SHAPES[shape]).check(plan)


TOGETHER = {"soft_cap": 3.0, "sinks": torch.tensor([0.5, -2.0, 1.0, 0.0]), "window": 12}
SCALES = {"k_scale": torch.tensor([0.25, 0.3]), "v_scale": torch.tensor([0.5])}


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("last", [None, 4])
@pytest.mark.parametrize("options", [{}, TOGETHER, SCALES], ids=["plain", "window, soft cap, sinks", "scales"])
def test_the_torch_reference_gives_the_same(options, last, causal):
    trees = [chain(5), [], chain(70)] if causal else [random_tree(RNG, 70), [], star(5)]
    case = Case(trees, [45, 3, 2], heads=4, kv_heads=2, layout="gaps", options=options, last=last, causal=causal)
    lse, sums = torch.zeros(case.query.shape[:2]), torch.zeros(case.query.shape[:2], dtype=torch.float64)
    expected = case.run(attend=reference.tree_attention, lse=sums)
    assert error(case.run(SPLIT, lse=lse), expected) <= 1e-5
    assert error(lse, sums) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_layout_and_dtype(layout, dtype):
    Case([random_tree(RNG, 9), star(4)], [19, 5], dtype=dtype, layout=layout, heads=4, kv_heads=2).check(SPLIT)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(dim):
    Case([random_tree(RNG, 7)], [21], dim=dim).check(SPLIT)


@pytest.mark.parametrize("block", [1, 8, 24, 32, 48, 128])
def test_block_sizes(block):
    Case([random_tree(RNG, 7), chain(2)], [50, 47], block=block).check(SPLIT)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (6, 2), (7, 1), (4, 4)])
def test_groups_of_heads(heads, kv_heads):
    Case([random_tree(RNG, 7), chain(3)], [20, 33], heads=heads, kv_heads=kv_heads).check(SPLIT)


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT], ids=["one pass", "split"])
@pytest.mark.parametrize("window", [1, 3, 17, 1000])
@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
def test_a_window_is_measured_in_positions(window, causal, plan):
    trees = [chain(7), chain(20)] if causal else [random_tree(RNG, 20), star(5)]
    Case(trees, [45, 2], options={"window": window}, causal=causal).check(plan)


def test_a_window_by_slot_is_caught():
    """Negative control: depths that count slots give another result."""
    case = Case([star(20)], [30], options={"window": 5})
    expected, _ = case.dense()
    assert error(case.run(SPLIT), expected) <= 1e-5
    slots = torch.arange(20, dtype=torch.int32)
    assert error(case.run(SPLIT, depth=slots, query_depth=slots), expected) > 1e-3


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT], ids=["one pass", "split"])
@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
def test_soft_cap_sinks_and_window_together(causal, plan):
    options = {"soft_cap": 3.0, "sinks": torch.tensor([0.5, -2.0]), "window": 12}
    Case([chain(5), chain(18)], [40, 3], options=options, causal=causal).check(plan)


def test_a_soft_cap_does_not_overflow():
    case = Case([random_tree(RNG, 5)], [20], options={"soft_cap": 0.5})
    case.query *= 1e4
    case.check(ONE_PASS)


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT, None], ids=["one pass", "split", "table"])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_chain_needs_no_bits(rows, plan):
    case = Case([chain(rows), chain(1), []], [30, 16, 4], causal=True)
    case.check(plan)
    with_bits = Case([chain(rows), chain(1), []], [30, 16, 4])
    assert error(case.run(plan), with_bits.run(plan).double()) <= 1e-6


@pytest.mark.parametrize("options", [{}, {"window": 4}], ids=["plain", "window"])
def test_a_level_reads_the_slots_of_the_levels_above(options):
    Case([random_tree(RNG, 12), random_tree(RNG, 3), star(9)], [20, 45, 1], last=4, options=options).check(SPLIT)
    Case([chain(12), chain(3)], [20, 45], last=4, options=options, causal=True).check(SPLIT)


@pytest.mark.parametrize("rows", [63, 64, 65, 200, 1024])
def test_large_trees(rows):
    Case([random_tree(RNG, rows), chain(2)], [10, 3], heads=1, kv_heads=1).check(
        AttentionPlan(block_rows=256, block_keys=256, splits=2, num_warps=4, num_stages=1)
    )


@pytest.mark.parametrize("block_keys", [32, 64, 128])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 100])
def test_tiles_and_words_need_not_meet(block_keys, prefix):
    Case([random_tree(RNG, 150)], [prefix], heads=1, kv_heads=1, last=40).check(
        AttentionPlan(block_rows=64, block_keys=block_keys, splits=2, num_warps=4, num_stages=1)
    )


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("heads", [1, 2], ids=["one scale", "a scale per head"])
def test_fp8_caches_with_scales(cache, heads):
    options = {"k_scale": torch.tensor([0.25, 0.3])[:heads], "v_scale": torch.tensor([0.5, 0.2])[:heads]}
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([random_tree(RNG, 9)], [20], heads=4, kv_heads=2, dtype=dtype, cache_dtype=cache, options=options)
        case.check(SPLIT)


def test_slots_that_no_row_sees_may_hold_anything():
    """An unreferenced tree slot, and in a window all blocks behind it, are NaN."""
    case = Case([[-1, 0, 0, 1, 2, 0]], [40], options={"window": 6})
    hidden = 5
    case.bits[hidden] = case.bits[0]  # the row of slot 5 sees the root instead of itself
    case.see[0][hidden] = case.see[0][0]
    for index in (40 + hidden, *range(30)):
        at = int(case.table[0, index // case.block])
        case.key[at, index % case.block] = float("nan")
        case.value[at, index % case.block] = float("nan")
    for plan in (ONE_PASS, SPLIT):
        case.check(plan)


def test_bits_past_the_tree_do_not_count():
    case = Case([random_tree(RNG, 6), random_tree(RNG, 70)], [20, 3], heads=1, kv_heads=1)
    case.bits[:6] |= torch.tensor([-64, -1])
    case.check(SPLIT)


def test_a_row_that_sees_its_sibling_is_caught():
    """Negative control: with every slot visible, the comparison of these tests fails."""
    case = Case([random_tree(RNG, 8)], [20])
    case.bits.fill_(-1)
    assert error(case.run(SPLIT), case.dense()[0]) > 1e-3


def test_a_poisoned_slot_that_is_seen_is_caught():
    """Negative control: the poison is such that reading one slot too many shows."""
    case = Case([chain(4)], [20])
    assert case.run(SPLIT, ancestors=case.bits).isfinite().all()
    longer = torch.tensor([0, 5], dtype=torch.int32)
    assert case.run(SPLIT, ancestors=case.bits | 16, tree_start=longer).isnan().any()


def test_a_row_without_keys_gives_zero():
    case = Case([chain(2)], [0])
    case.bits.zero_()
    for plan in (ONE_PASS, SPLIT):
        lse = torch.zeros(2, 2)
        assert (case.run(plan, lse=lse) == 0).all()
        assert (lse == float("-inf")).all()


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT], ids=["one pass", "split"])
def test_rows_past_the_last_request_are_left_alone(plan):
    case = Case([random_tree(RNG, 5)], [20])
    expected = case.run(plan)
    case.query = torch.cat([case.query, torch.full((3, 2, 64), float("nan"))])
    case.bits = torch.cat([case.bits, torch.full((3, 1), -1)])
    output = torch.full(case.query.shape, 7.0)
    assert case.run(plan, output=output) is output
    assert torch.equal(output[:5], expected) and (output[5:] == 7.0).all()


def test_the_caller_may_keep_every_buffer():
    case = Case([random_tree(RNG, 8)], [300])
    plan = plan_for(case.query, case.key, case.table, case.max_rows, case.max_keys)
    assert plan.splits > 1
    size = workspace_size(*case.query.shape, plan.splits)
    wide = torch.full((8, 4, 64), 7.0)
    workspace = torch.full((size,), float("nan"))
    case.run(plan, output=wide[:, 1:3], workspace=workspace)
    assert error(wide[:, 1:3], case.dense()[0]) <= 1e-5
    assert (wide[:, [0, 3]] == 7.0).all()
    with pytest.raises(ValueError, match="workspace"):
        case.run(plan, workspace=workspace[1:])


def test_a_request_gives_the_same_alone_and_in_a_batch():
    trees, prefix = [random_tree(RNG, 9), chain(3), star(6)], [33, 70, 2]
    together = Case(trees, prefix)
    result = together.run(SPLIT)
    for r in range(3):
        start, end = together.query_start[r], together.query_start[r + 1]
        alone = tree_attention(
            together.query[start:end],
            together.key,
            together.value,
            together.table[r : r + 1],
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor(prefix[r : r + 1], dtype=torch.int32),
            ancestors=together.bits[start:end],
            scale=64**-0.5,
            max_rows=9,
            max_keys=80,
            plan=SPLIT,
        )
        assert torch.equal(alone, result[start:end])


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved without being backed")
def test_offsets_past_31_bits():
    """Blocks 2^30 elements apart: block 3 starts past 2^31, and a product in 32 bits would miss it."""
    case = Case([random_tree(RNG, 5)], [40], dtype=torch.float16)
    case.check(SPLIT)
    far = mapped(4 * 2**30, torch.float16)
    for name, shift in (("key", 0), ("value", 2**20)):
        near = getattr(case, name)
        view = torch.as_strided(far, near.shape, (2**30, *near.stride()[1:]), shift)
        view.copy_(near)
        setattr(case, name, view)
    assert int(case.table[0, :3].max()) * case.key.stride(0) > 2**31
    case.check(SPLIT)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"ancestors": torch.zeros(4, 1, dtype=torch.int32)}, "ancestors"),
        ({"window": -1}, "window"),
        ({"window": 4, "depth": None}, "window"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"k_scale": torch.ones(3)}, "k_scale"),
        ({"lse": torch.zeros(4)}, "lse"),
        ({"output": torch.zeros(4, 2, 32)}, "output"),
    ],
)
def test_errors_name_what_is_at_fault(broken, named):
    with pytest.raises(ValueError, match=named):
        Case([chain(4)], [3]).run(**broken)


def test_other_kv_layouts_are_refused():
    case = Case([chain(4)], [3])
    case.key = case.key.unflatten(3, (8, 8))
    with pytest.raises(ValueError, match="key"):
        case.run()
