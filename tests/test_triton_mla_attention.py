# SPDX-License-Identifier: Apache-2.0
"""Latent attention in Triton's interpreter against a dense float64 softmax over latents that were never paged."""

import os
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from test_triton_tree_attention import TOLERANCE, WORD_BITS, error, see_and_depth, storage, words_of  # noqa: E402
from triton_cases import chain, comb, mapped, random_tree, star  # noqa: E402

from specinfer_vllm.triton_kernels import tree_attention, tuning  # noqa: E402
from specinfer_vllm.triton_kernels.mla_attention import mla_attention, plan_for, workspace_size  # noqa: E402
from specinfer_vllm.triton_kernels.tuning import MlaPlan  # noqa: E402

ONE_PASS = MlaPlan(block_rows=16, block_keys=16, splits=1, num_warps=4, num_stages=1)
SPLIT = MlaPlan(block_rows=32, block_keys=16, splits=4, num_warps=4, num_stages=1)
IN_PARTS = MlaPlan(block_rows=16, block_keys=32, splits=2, num_warps=4, num_stages=1, part=16)
PLANS = {"one pass": ONE_PASS, "split": SPLIT, "in parts": IN_PARTS, "table": None}


@dataclass
class Case:
    """Requests with their latents in a cache that is NaN wherever no row looks, and the dense truth.

    trees: parents of each request's tree slots; prefix: committed tokens of each; gaps: room between all neighbours of
    the cache; last: only so many last rows of each tree are queries; causal: no bits.
    """

    trees: list
    prefix: list
    block: int = 16
    latent: int = 32
    rope: int = 16
    heads: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    gaps: bool = False
    last: int | None = None
    causal: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        torch.manual_seed(0)
        sizes = [len(tree) for tree in self.trees]
        self.lengths = [p + n for p, n in zip(self.prefix, sizes, strict=True)]
        self.fill_cache()
        first = [max(0, n - (self.last if self.last is not None else n)) for n in sizes]
        self.see = [see_and_depth(tree)[0][f:] for tree, f in zip(self.trees, first, strict=True)]
        counts = [len(see) for see in self.see]
        self.query_start = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        self.tree_start = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32)
        words = max(1, -(-max([*sizes, 1]) // WORD_BITS))
        self.bits = torch.cat([words_of(see, words) for see in self.see])
        self.query = torch.randn(sum(counts), self.heads, self.latent + self.rope).to(self.dtype)
        self.max_rows, self.max_keys = max(counts), max(self.lengths)

    def fill_cache(self):
        """Random latents of every key, in blocks in random order; NaN elsewhere, and block numbers that are none."""
        store, width = self.cache_dtype or self.dtype, self.latent + self.rope
        blocks = [-(-length // self.block) for length in self.lengths]
        order = (torch.randperm(sum(blocks)) + 1).to(torch.int32)
        if self.gaps:
            cache = torch.empty(sum(blocks) + 2, 2 * self.block, width + 5)[1:, ::2, :width]
        else:
            cache = torch.empty(sum(blocks) + 1, self.block, width)
        storage(cache).fill_(float("nan"))
        self.table = torch.full((len(blocks), max(blocks) + 2), 2**31 - 1, dtype=torch.int32)
        self.latents = []
        for r, (length, mine) in enumerate(zip(self.lengths, order.split(blocks), strict=True)):
            self.table[r, : blocks[r]] = mine
            slots = torch.arange(length)
            rows = torch.randn(length, width).to(store).float()
            cache[mine[slots // self.block].long(), slots % self.block] = rows
            self.latents.append(rows.double())
        # Converting all of the storage keeps strides and poison.
        self.cache = torch.as_strided(storage(cache).to(store), cache.shape, cache.stride(), cache.storage_offset())

    def slot(self, request, key):
        """The cache's row of a key."""
        return self.cache[int(self.table[request, key // self.block]), key % self.block]

    def run(self, plan=None, **more):
        arguments = {"latent_dim": self.latent, "rope_dim": self.rope, "scale": self.latent**-0.5, **self.options}
        if not self.causal:
            arguments["ancestors"] = self.bits
        if self.last is not None:
            arguments["tree_start"] = self.tree_start
        return mla_attention(
            self.query,
            self.cache,
            self.table,
            self.query_start,
            torch.tensor(self.prefix, dtype=torch.int32),
            max_rows=self.max_rows,
            max_keys=self.max_keys,
            plan=plan,
            **{**arguments, **more},
        )

    def dense(self):
        """Output [rows, heads, latent_dim] and lse [rows, heads] in float64."""
        scale = self.options.get("cache_scale", torch.ones(1)).double()
        outputs, sums = [], []
        for r, prefix in enumerate(self.prefix):
            start, end = self.query_start[r : r + 2]
            see = torch.from_numpy(self.see[r])
            see = torch.cat([torch.ones(len(see), prefix, dtype=torch.bool), see], dim=1)
            keys = self.latents[r] * scale
            s = torch.einsum("qhd,kd->qhk", self.query[start:end].double(), keys) * self.latent**-0.5
            s = s.masked_fill(~see[:, None], float("-inf"))
            outputs.append(torch.einsum("qhk,kd->qhd", s.softmax(2), keys[:, : self.latent]))
            sums.append(s.logsumexp(2))
        return torch.cat(outputs), torch.cat(sums)

    def check(self, plan=None):
        lse = torch.full(self.query.shape[:2], 7.0)
        output = self.run(plan, lse=lse)
        expected, sums = self.dense()
        assert error(output, expected) <= TOLERANCE[self.dtype]
        assert error(lse, sums) <= TOLERANCE[self.dtype]


RNG = np.random.default_rng(6)
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


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_see_the_prefix_and_their_ancestors_only(shape, plan):
    Case(*SHAPES[shape]).check(plan)


@pytest.mark.parametrize("plan", [SPLIT, IN_PARTS], ids=["split", "in parts"])
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_and_strided_caches(dtype, gaps, plan):
    Case([random_tree(RNG, 9), star(4)], [19, 5], dtype=dtype, gaps=gaps).check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(1, 128), (6, 16)])
def test_the_size_of_deepseek(rows, heads, dtype):
    Case([random_tree(RNG, rows), chain(1)], [70, 13], latent=512, rope=64, heads=heads, dtype=dtype, block=64).check()


@pytest.mark.parametrize(("latent", "rope"), [(32, 16), (64, 16), (64, 64), (256, 32), (32, 64)])
@pytest.mark.parametrize("plan", [SPLIT, IN_PARTS], ids=["split", "in parts"])
def test_sizes_of_rows(latent, rope, plan):
    Case([random_tree(RNG, 7)], [21], latent=latent, rope=rope).check(plan)


@pytest.mark.parametrize("block", [1, 8, 24, 64, 128])
def test_block_sizes(block):
    Case([random_tree(RNG, 7), chain(2)], [50, 47], block=block).check(SPLIT)


@pytest.mark.parametrize("heads", [1, 2, 5, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
def test_heads_and_nodes_share_tiles(heads, causal):
    trees = [chain(7), chain(3)] if causal else [random_tree(RNG, 7), chain(3)]
    for plan in (ONE_PASS, SPLIT):
        Case(trees, [20, 33], heads=heads, causal=causal).check(plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows", [1, 17])
def test_the_chain_needs_no_bits(rows, plan):
    trees, prefix = [chain(rows), chain(1), []], [30, 16, 4]
    case = Case(trees, prefix, causal=True)
    case.check(plan)
    assert error(case.run(plan), Case(trees, prefix).run(plan).double()) <= 1e-6


def test_a_level_reads_the_slots_of_the_levels_above():
    Case([random_tree(RNG, 12), random_tree(RNG, 3), star(9)], [20, 45, 1], last=4).check(SPLIT)
    Case([chain(12), chain(3)], [20, 45], last=4, causal=True).check(SPLIT)


@pytest.mark.parametrize("rows", [63, 64, 65, 300])
def test_large_trees(rows):
    plan = MlaPlan(block_rows=256, block_keys=256, splits=2, num_warps=4, num_stages=1)
    Case([random_tree(RNG, rows), chain(2)], [10, 3], heads=1).check(plan)


@pytest.mark.parametrize(("block_keys", "prefix"), [(32, 1), (32, 63), (128, 0), (128, 1), (128, 64), (128, 100)])
def test_tiles_and_words_need_not_meet(block_keys, prefix):
    plan = MlaPlan(block_rows=64, block_keys=block_keys, splits=2, num_warps=4, num_stages=1)
    Case([random_tree(RNG, 150)], [prefix], heads=2, last=40).check(plan)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("options", [{}, {"cache_scale": torch.tensor([0.25])}], ids=["plain", "scaled"])
@pytest.mark.parametrize(("dtype", "plan"), [(torch.float32, IN_PARTS), (torch.bfloat16, SPLIT)], ids=["fp32", "bf16"])
def test_fp8_caches_with_one_scale(dtype, plan, options, cache):
    Case([random_tree(RNG, 9)], [20], dtype=dtype, cache_dtype=cache, options=options).check(plan)


def test_slots_that_no_row_sees_may_hold_anything():
    """An unreferenced tree slot is NaN, between slots that are seen."""
    case = Case([[-1, 0, 0, 1, 2, 0]], [40])
    hidden = 4
    case.bits[hidden] = case.bits[0]  # the row of slot 4 sees the root instead of itself
    case.see[0][hidden] = case.see[0][0]
    case.slot(0, 40 + hidden).fill_(float("nan"))
    for plan in PLANS.values():
        case.check(plan)


def test_bits_past_the_tree_do_not_count():
    case = Case([random_tree(RNG, 6), random_tree(RNG, 70)], [20, 3], heads=1)
    case.bits[:6] |= torch.tensor([-64, -1])
    case.check(SPLIT)


def test_a_row_that_sees_its_sibling_is_caught():
    """Negative control: with every slot visible, the comparison of these tests fails."""
    case = Case([random_tree(RNG, 8)], [20])
    case.bits.fill_(-1)
    for plan in PLANS.values():
        assert error(case.run(plan), case.dense()[0]) > 1e-3


def test_a_poisoned_slot_that_is_seen_is_caught():
    """Negative control: the poison is such that reading one slot too many shows."""
    case = Case([chain(4)], [20])
    longer = torch.tensor([0, 5], dtype=torch.int32)
    for plan in PLANS.values():
        assert case.run(plan).isfinite().all()
        assert case.run(plan, ancestors=case.bits | 16, tree_start=longer).isnan().any()


def test_swapped_parts_of_a_row_are_caught():
    """Negative control: the rotary numbers count in the scores, and they are not V."""
    case = Case([random_tree(RNG, 8)], [20], latent=32, rope=32)
    expected, _ = case.dense()
    case.cache.copy_(case.cache.roll(32, dims=2))
    case.query.copy_(case.query.roll(32, dims=2))
    assert error(case.run(SPLIT), expected) > 1e-3
    case.query.copy_(case.query.roll(32, dims=2))
    assert error(case.run(SPLIT), expected) > 1e-3


def test_a_row_without_keys_gives_zero():
    case = Case([chain(2)], [0])
    case.bits.zero_()
    for plan in PLANS.values():
        lse = torch.zeros(2, 4)
        assert (case.run(plan, lse=lse) == 0).all()
        assert (lse == float("-inf")).all()


@pytest.mark.parametrize("plan", [ONE_PASS, SPLIT], ids=["one pass", "split"])
def test_rows_past_the_last_request_are_left_alone(plan):
    case = Case([random_tree(RNG, 5)], [20])
    expected = case.run(plan)
    case.query = torch.cat([case.query, torch.full((3, 4, 48), float("nan"))])
    case.bits = torch.cat([case.bits, torch.full((3, 1), -1)])
    output, lse = torch.full((8, 4, 32), 7.0), torch.full((8, 4), 7.0)
    assert case.run(plan, output=output, lse=lse) is output
    assert torch.equal(output[:5], expected) and (output[5:] == 7.0).all() and (lse[5:] == 7.0).all()


def test_the_caller_may_keep_every_buffer():
    case = Case([random_tree(RNG, 8)], [600])
    plan = plan_for(case.query, case.cache, case.table, case.max_rows, case.max_keys, case.latent, case.rope)
    assert plan.splits > 1
    wide = torch.full((8, 6, 32), 7.0)
    workspace = torch.full((workspace_size(8, 4, 32, plan.splits),), float("nan"))
    case.run(plan, output=wide[:, 1:5], workspace=workspace)
    assert error(wide[:, 1:5], case.dense()[0]) <= 1e-5
    assert (wide[:, [0, 5]] == 7.0).all()
    with pytest.raises(ValueError, match="workspace"):
        case.run(plan, workspace=workspace[1:])


def test_a_request_gives_the_same_alone_and_in_a_batch():
    trees, prefix = [random_tree(RNG, 9), chain(3), star(6)], [33, 70, 2]
    case = Case(trees, prefix)
    together = case.run(SPLIT)
    query, bits, table, starts = case.query, case.bits, case.table, case.query_start.tolist()
    for r in range(3):
        rows = slice(starts[r], starts[r + 1])
        case.query, case.bits, case.table, case.prefix = query[rows], bits[rows], table[r : r + 1], prefix[r : r + 1]
        case.query_start = torch.tensor([0, len(trees[r])], dtype=torch.int32)
        assert torch.equal(case.run(SPLIT), together[rows])


def test_one_kv_head_of_tree_attention_gives_the_same():
    """Across the two kernels: K the whole row, V its latents padded with what is cut off again."""
    case = Case([random_tree(RNG, 9), star(4)], [40, 7], latent=64, rope=64)
    both = case.cache[:, :, None]
    arguments = {"max_rows": 9, "max_keys": 49, "scale": 64**-0.5, "ancestors": case.bits}
    prefix = torch.tensor(case.prefix, dtype=torch.int32)
    wide = tree_attention.tree_attention(case.query, both, both, case.table, case.query_start, prefix, **arguments)
    assert error(case.run(SPLIT), wide[..., :64].double()) <= 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved without being backed")
def test_offsets_past_31_bits():
    """Blocks 2^30 elements apart: block 3 starts past 2^31, and a product in 32 bits would miss it."""
    case = Case([random_tree(RNG, 5)], [40], dtype=torch.float16)
    view = torch.as_strided(mapped(4 * 2**30, torch.float16), case.cache.shape, (2**30, *case.cache.stride()[1:]))
    view.copy_(case.cache)
    case.cache = view
    assert int(case.table[0, :3].max()) * view.stride(0) > 2**31
    for plan in (SPLIT, IN_PARTS):
        case.check(plan)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"ancestors": torch.zeros(4, 1, dtype=torch.int32)}, "ancestors"),
        ({"ancestors": torch.zeros(2, 1, dtype=torch.int64)}, "ancestors"),
        ({"latent_dim": 48, "rope_dim": 0}, "latent_dim"),
        ({"latent_dim": 64}, "query"),
        ({"latent_dim": 40, "rope_dim": 8}, "latent_dim"),
        ({"rope_dim": 8}, "rope_dim"),
        ({"cache_scale": torch.ones(2)}, "cache_scale"),
        ({"lse": torch.zeros(4)}, "lse"),
        ({"output": torch.zeros(4, 4, 48)}, "output"),
        ({"output": torch.zeros(4, 4, 32, dtype=torch.float16)}, "output"),
    ],
)
def test_errors_name_what_is_at_fault(broken, named):
    with pytest.raises(ValueError, match=f"^{named}:"):
        Case([chain(4)], [3]).run(**broken)


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(3, 16, 1, 48), torch.zeros(3, 16, 656, dtype=torch.uint8), torch.zeros(3, 16, 48).half()],
    ids=["with a head", "fp8_ds_mla", "another dtype"],
)
def test_other_caches_are_refused(cache):
    case = Case([chain(4)], [3])
    case.cache = cache
    with pytest.raises(ValueError, match="^cache:"):
        case.run()


def test_rows_too_wide_for_the_table_are_refused_by_name():
    arguments = {"requests": 1, "heads": 16, "max_rows": 1, "max_keys": 100, "query_size": 2, "cache_size": 2}
    assert tuning.mla_plan("sm_90", latent_dim=512, rope_dim=64, **arguments).block_rows == 16
    with pytest.raises(ValueError, match=r"latent_dim.*sm_90"):
        tuning.mla_plan("sm_90", latent_dim=1024, rope_dim=64, **arguments)


@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_103", "sm_120", "gfx950"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (4, 4), (4, 1)], ids=["16-bit", "FP8", "fp32", "fp32 and FP8"])
def test_every_chip_has_a_plan(chip, sizes):
    for rows, heads in ((1, 1), (1, 16), (1, 128), (64, 128)):
        plan = tuning.mla_plan(chip, 4, heads, 512, 64, rows, 8192, *sizes)
        assert plan.splits >= 1 and plan.block_rows in (16, 32, 64)
