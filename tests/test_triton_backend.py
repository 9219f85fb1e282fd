# SPDX-License-Identifier: Apache-2.0
"""The Triton attention backend in Triton's interpreter, other rows in vLLM's own kernel, against dense float64."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

import triton_cpu

triton_cpu.register()  # before vLLM is imported

import attention_stand_ins  # noqa: E402
from triton_cases import chain, comb, random_tree, star  # noqa: E402
from vllm.config import AttentionConfig, CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends import triton_attn  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from specinfer_vllm.attention import triton as tree_triton  # noqa: E402
from specinfer_vllm.attention.libraries import LIBRARIES  # noqa: E402
from specinfer_vllm.attention.tree_batch import TreeBatch  # noqa: E402
from specinfer_vllm.patches import triton_attention  # noqa: E402
from specinfer_vllm.triton_kernels import tuning  # noqa: E402

WORD_BITS = 64
BLOCK, DIM = 16, 32
MAX_BLOCKS = 24  # of a request: block tables of all batches are alike
RNG = np.random.default_rng(7)


def see_and_depth(parent):
    """Dense visibility [rows, rows] bool and depths [rows] of a tree given by its parents."""
    see, depth = np.eye(len(parent), dtype=bool), np.zeros(len(parent), np.int32)
    for i, p in enumerate(parent):
        if p >= 0:
            see[i] |= see[p]
            depth[i] = depth[p] + 1
    return see, depth


class Batch:
    """Tree requests [(parents, prefix)] and others [(context, rows)] over a paged cache that is NaN where unused."""

    def __init__(self, trees, others=(), heads=4, kv_heads=2, dtype=torch.float32, cache=None, scales=(1.0, 1.0)):
        torch.manual_seed(len(trees) + 7 * len(others))
        self.heads, self.kv_heads, self.dtype, self.cache_dtype = heads, kv_heads, dtype, cache or dtype
        self.scales = scales
        shapes = [see_and_depth(parents) for parents, _ in trees]
        shapes += [see_and_depth(chain(rows)) for _, rows in others]
        self.see, self.depth = [see for see, _ in shapes], [depth for _, depth in shapes]
        self.prefix = [prefix for _, prefix in trees] + [context for context, _ in others]
        self.rows = [len(depth) for depth in self.depth]
        self.lengths = [p + n for p, n in zip(self.prefix, self.rows, strict=True)]
        self.fill_cache()
        starts = np.cumsum([0, *self.rows])
        self.query = torch.randn(starts[-1], heads, DIM).to(dtype)
        self.common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            num_reqs=len(self.rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(self.rows),
            max_seq_len=max(self.lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.arange(starts[-1]),
        )
        self.tree = self.tree_batch(len(trees)) if trees else None

    def fill_cache(self):
        blocks = [-(-length // BLOCK) for length in self.lengths]
        order = (torch.randperm(sum(blocks)) + 1).to(torch.int32)
        # Token-major in memory, as GPUs have it; kv_cache is vLLM's logical view.
        tokens = torch.full((sum(blocks) + 1, BLOCK, self.kv_heads, 2 * DIM), float("nan"))
        self.table = torch.zeros(len(blocks), MAX_BLOCKS, dtype=torch.int32)
        self.keys, self.values = [], []
        for r, (length, mine) in enumerate(zip(self.lengths, order.split(blocks), strict=True)):
            self.table[r, : blocks[r]] = mine
            both = torch.randn(length, self.kv_heads, 2 * DIM).to(self.cache_dtype).float()
            slots = torch.arange(length)
            tokens[mine[slots // BLOCK].long(), slots % BLOCK] = both
            self.keys.append(both[..., :DIM].double() * self.scales[0])
            self.values.append(both[..., DIM:].double() * self.scales[1])
        stored = tokens.to(self.cache_dtype)
        self.kv_cache = (stored.view(torch.uint8) if stored.element_size() == 1 else stored).transpose(1, 2)

    def tree_batch(self, count):
        words = max(1, -(-max(self.rows[:count]) // WORD_BITS))
        bits = np.zeros((sum(self.rows[:count]), words * WORD_BITS), bool)
        starts = np.cumsum([0, *self.rows[:count]])
        for r, see in enumerate(self.see[:count]):
            bits[starts[r] : starts[r + 1], : see.shape[1]] = see
        return TreeBatch(
            num_requests=count,
            num_rows=int(starts[-1]),
            max_rows=max(self.rows[:count]),
            query_start=torch.tensor(starts, dtype=torch.int32),
            prefix_len=torch.tensor(self.prefix[:count], dtype=torch.int32),
            ancestors=torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int64).copy()),
            depth=torch.from_numpy(np.concatenate(self.depth[:count])),
        )

    def builder(self, device="cpu", head_size=DIM):
        spec = FullAttentionSpec(BLOCK, num_kv_heads=self.kv_heads, head_size=head_size, dtype=self.dtype)
        model = SimpleNamespace(
            get_num_attention_heads=lambda parallel: self.heads,
            get_num_kv_heads=lambda parallel: self.kv_heads,
            get_head_size=lambda: DIM,
            rswa_window=None,
        )
        config = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, static_forward_context={}),
        )
        return tree_triton.TreeTritonAttentionMetadataBuilder(spec, [], config, torch.device(device))

    def impl(self, window=None, soft_cap=None, sinks=None):
        fp8 = self.cache_dtype == torch.float8_e4m3fn
        impl = tree_triton.TreeTritonAttentionImpl(
            self.heads, DIM, DIM**-0.5, self.kv_heads, None, window, "fp8" if fp8 else "auto", soft_cap, sinks=sinks
        )
        impl.process_weights_after_loading(self.dtype)
        return impl

    def layer(self):
        k_scale, v_scale = (torch.tensor(scale) for scale in self.scales)
        return SimpleNamespace(_q_scale=torch.tensor(1.0), _k_scale=k_scale, _v_scale=v_scale)

    def forward(self, metadata, impl=None):
        output = torch.full_like(self.query, 7.0)
        new = torch.full((len(self.query), self.kv_heads, DIM), float("nan"))  # in the cache already
        result = (impl or self.impl()).forward(
            self.layer(), self.query, new, new, self.kv_cache, metadata, output=output
        )
        assert result is output
        return output

    def run(self, tree="own", **options):
        builder = self.builder()
        builder.tree = self.tree if tree == "own" else tree
        return self.forward(builder.build(0, self.common), self.impl(**options))

    def dense(self, window=None, soft_cap=None, sinks=None):
        outputs, group = [], self.heads // self.kv_heads
        queries = self.query.double().split(self.rows)
        for r, prefix in enumerate(self.prefix):
            see = torch.from_numpy(self.see[r])
            see = torch.cat([torch.ones(len(see), prefix, dtype=torch.bool), see], dim=1)
            if window:
                position = torch.from_numpy(np.concatenate([np.arange(prefix), prefix + self.depth[r]]))
                see &= position[prefix:, None] - position < window
            keys, values = (kv[r].repeat_interleave(group, dim=1) for kv in (self.keys, self.values))
            scores = torch.einsum("qhd,khd->qhk", queries[r], keys) * DIM**-0.5
            if soft_cap:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            scores = scores.masked_fill(~see[:, None], float("-inf"))
            if sinks is not None:
                column = sinks.double()[None, :, None].expand(len(see), -1, 1)
                scores = torch.cat([scores, column], dim=2)
            outputs.append(torch.einsum("qhk,khd->qhd", scores.softmax(2)[..., : len(keys)], values))
        return torch.cat(outputs)


def error(result, expected):
    """Largest distance, relative to the largest expected magnitude; infinite where a result is NaN."""
    distance = (result.double() - expected.double()).abs().max() / expected.abs().max()
    return float(distance.nan_to_num(nan=float("inf")))


def mixed(**options):
    """Trees, then a decoding request, a prefill in one chunk, and a later chunk."""
    trees = [(random_tree(RNG, 9), 21), (star(5), 33), (comb(12), 3), (chain(1), 17)]
    return Batch(trees, [(19, 1), (0, 11), (18, 7)], **options)


OPTIONS = {
    "plain": {},
    "window": {"window": 6},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 1.0, 0.0])},
    "together": {"window": 12, "soft_cap": 3.0, "sinks": torch.tensor([0.5, -2.0, 1.0, 0.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trees_and_other_requests_share_a_batch(options):
    batch = mixed()
    assert error(batch.run(**options), batch.dense(**options)) <= 1e-5


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_attends_to_the_trees_rows(name, options, monkeypatch):
    """In the place of our kernel, and with the kernel's result; others' rows are not its."""
    attention_stand_ins.install(monkeypatch)
    monkeypatch.setattr(tree_triton, "tree_attention", None)
    monkeypatch.setattr(tree_triton, "library_of", lambda config: LIBRARIES[name])
    dtype, trees = torch.float32 if name == "torch" else torch.float16, [(random_tree(RNG, 9), 21), (star(5), 33)]
    batch = mixed(dtype=dtype) if (name, options) == ("torch", "together") else Batch(trees, dtype=dtype)
    options = OPTIONS[options]
    if LIBRARIES[name].unknown(replace(batch.impl(**options).kind(), head_size=64)):
        pytest.skip("refused, see test_what_a_library_does_not_know_is_refused")
    assert batch.builder().get_cudagraph_support(None, None) == AttentionCGSupport.NEVER
    assert error(batch.run(**options), batch.dense(**options)) <= (1e-5 if name == "torch" else 2e-3)


def test_a_librarys_mask_that_is_wrong_is_caught(monkeypatch):
    """Negative control: with a chain's bits the comparison fails."""
    monkeypatch.setattr(tree_triton, "library_of", lambda config: LIBRARIES["torch"])
    batch = Batch([(star(5), 33), (comb(12), 3)])
    batch.tree.ancestors[:, 0] = (2 << torch.cat([torch.arange(5), torch.arange(12)])) - 1
    assert error(batch.run(), batch.dense()) > 1e-2


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2)])
def test_groups_of_heads(heads, kv_heads):
    batch = mixed(heads=heads, kv_heads=kv_heads)
    assert error(batch.run(), batch.dense()) <= 1e-5


def test_sixteen_bit_sinks_are_widened():
    batch, sinks = mixed(), torch.tensor([0.5, -2.0, 1.0, 0.3], dtype=torch.bfloat16)
    assert error(batch.run(sinks=sinks), batch.dense(sinks=sinks)) <= 1e-5


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_batches_of_trees_only(rows):
    batch = Batch([(random_tree(RNG, rows), 30), (chain(2), 5)])
    assert error(batch.run(), batch.dense()) <= 1e-5


def test_fp8_caches_are_read_with_the_layers_scales():
    batch = Batch([(random_tree(RNG, 9), 21), (star(4), 0)], cache=torch.float8_e4m3fn, scales=(0.5, 0.25))
    assert not batch.impl().supports_quant_query_input
    assert error(batch.run(), batch.dense()) <= 1e-5


@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=["plain", "window"])
def test_a_chain_gives_what_causal_attention_gives(options):
    batch = Batch([(chain(8), 20), (chain(3), 33)], [(4, 5)])
    assert error(batch.run(**options), batch.run(tree=None, **options)) <= 1e-5


def test_rows_that_see_their_siblings_are_caught():
    """Negative control: with a chain's bits the comparison of these tests fails, for trees and for nothing else."""
    batch, rows = mixed(), 27
    for start, end in zip(batch.tree.query_start, batch.tree.query_start[1:], strict=False):
        batch.tree.ancestors[start:end, 0] = (2 << torch.arange(end - start)) - 1
    output, expected = batch.run(), batch.dense()
    assert error(output[:rows], expected[:rows]) > 1e-2
    assert error(output[rows:], expected[rows:]) <= 1e-5


def test_a_window_by_slot_is_caught():
    """Negative control: a window that counts slots instead of levels."""
    batch = Batch([(star(20), 30)])
    assert error(batch.run(window=5), batch.dense(window=5)) <= 1e-5
    batch.tree.depth.copy_(torch.arange(20))
    assert error(batch.run(window=5), batch.dense(window=5)) > 1e-2


def test_without_trees_everything_is_upstreams(monkeypatch):
    batch = Batch([], [(19, 1), (0, 11)])
    monkeypatch.setattr(tree_triton, "tree_attention", None)
    metadata = batch.builder().build(0, batch.common)
    assert metadata.tree is None
    assert metadata.query_start_loc is batch.common.query_start_loc
    assert error(batch.forward(metadata), batch.dense()) <= 1e-5


def test_trees_alone_never_reach_upstreams_kernel(monkeypatch):
    monkeypatch.setattr(triton_attn, "unified_attention", None)
    batch = Batch([(star(6), 9)])
    assert error(batch.run(), batch.dense()) <= 1e-5


def test_the_other_requests_look_like_a_batch_of_their_own():
    batch, alone = mixed(), Batch([], [(19, 1), (0, 11), (18, 7)])
    batch.common.causal = torch.tensor([1] * 4 + [1, 0, 1])
    batch.common.positions = torch.arange(100, 100 + len(batch.query))
    rest = tree_triton.without_trees(batch.common, batch.tree)
    for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens"):
        assert torch.equal(getattr(rest, name), getattr(alone.common, name)), name
    assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (3, 19, 11)
    assert rest.causal.tolist() == [1, 0, 1]
    assert rest.positions.tolist() == list(range(127, 146)) and rest.slot_mapping.tolist() == list(range(27, 46))
    assert torch.equal(rest.block_table_tensor, batch.table[4:])
    only_decode = Batch([(chain(9), 3)], [(19, 1), (5, 1)])
    assert tree_triton.without_trees(only_decode.common, only_decode.tree).max_query_len == 1


def test_what_a_graph_was_captured_with_holds_for_other_trees():
    """Like a replay: the metadata of the capture, later buffers' contents, and rows of padding behind."""
    first, later = Batch([(chain(7), 90), (chain(7), 2)]), Batch([(random_tree(RNG, 7), 21), (star(7), 40)])
    builder = first.builder()
    builder.tree = first.tree
    first.common.max_seq_len = MAX_BLOCKS * BLOCK  # of the model: vLLM captures with the worst case
    metadata = builder.build_for_cudagraph_capture(first.common)
    assert (first.tree.prefix_len == 0).all()
    first.table.copy_(later.table)
    for name in ("query_start", "prefix_len", "ancestors", "depth"):
        getattr(first.tree, name).copy_(getattr(later.tree, name))
    impl = later.impl()
    output = later.forward(metadata, impl)
    assert error(output, later.dense()) <= 1e-5
    assert metadata.tree.launches[torch.float32][0].splits > 1  # so that the workspace is part of it
    # The second request becomes padding: no rows of its own.
    first.tree.query_start[2] = 7
    output = later.forward(metadata, impl)
    assert error(output[:7], later.dense()[:7]) <= 1e-5
    assert (output[7:] == 7.0).all()


def test_buffers_may_be_longer_than_the_batch():
    batch = mixed()
    longer = {
        name: torch.cat([value, torch.full_like(value[:3], 2**31 - 1)])
        for name, value in vars(batch.tree).items()
        if isinstance(value, torch.Tensor)
    }
    output = batch.run(tree=TreeBatch(**{**vars(batch.tree), **longer}))
    assert error(output, batch.dense()) <= 1e-5


def test_a_graph_is_not_captured_over_trees_and_other_requests():
    batch = mixed()
    builder = batch.builder()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    builder.build_for_cudagraph_capture(batch.common)  # without trees all is upstream's
    builder.tree = batch.tree
    with pytest.raises(ValueError, match="4 of 7 requests"):
        builder.build_for_cudagraph_capture(batch.common)


def test_an_ssm_may_have_larger_heads_than_the_llm():
    """vLLM's kernel splits the keys of single rows into a buffer that is sized by the LLM's heads."""
    batch = Batch([(chain(3), 5)])
    sizes = [batch.builder(head_size=size).softmax_segm_output.shape[-1] for size in (DIM // 2, DIM, 4 * DIM)]
    assert sizes == [DIM, DIM, 4 * DIM]


def test_layers_and_steps_share_plans_and_workspaces():
    batch = Batch([(chain(5), 300)], heads=1, kv_heads=1)
    builder = batch.builder()
    builder.tree = batch.tree
    metadata = builder.build(0, batch.common)
    for _ in range(2):
        batch.forward(metadata)
    ((plan, workspace),) = metadata.tree.launches.values()
    assert plan.splits > 1
    workspace.fill_(float("nan"))
    batch.common.max_seq_len += 1  # a step later
    again = builder.build(0, batch.common)
    assert error(batch.forward(again), batch.dense()) <= 1e-5
    assert next(iter(again.tree.launches.values()))[1] is workspace
    assert list(builder.workspaces.values()) == [workspace]


def test_no_contents_of_the_device_reach_the_host(monkeypatch):
    """Tensors without contents stand for the GPU's: whoever reads one fails."""
    batch = mixed()
    rows = {"tree": batch.tree.num_rows, "rest": len(batch.query) - batch.tree.num_rows}
    called = {}
    monkeypatch.setattr(tuning, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tree_triton, "tree_attention", lambda query, *args, **kwargs: called.update(tree=len(query)))
    monkeypatch.setattr(triton_attn, "unified_attention", lambda q, **kwargs: called.update(rest=len(q)))
    common = batch.common
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(common, name, getattr(common, name).to("meta"))
    tensors = {name: value.to("meta") for name, value in vars(batch.tree).items() if isinstance(value, torch.Tensor)}
    builder = batch.builder("meta")
    builder.tree = TreeBatch(**{**vars(batch.tree), **tensors})
    batch.query, batch.kv_cache = batch.query.to("meta"), batch.kv_cache.to("meta")
    metadata = builder.build(0, common)
    batch.forward(metadata)
    assert called == rows


REFUSED = {
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "attn_type": {"attn_type": "encoder_only"},
    "lookback": {"chunk_lookback": 1},
    "per token": {"_is_per_token_head_quant": True},
    "float8_e4m3fnuz": {"kv_cache_dtype": "fp8", "fp8_dtype": torch.float8_e4m3fnuz},
    "heads of 512": {"head_size": 512},
    "image": {"model_config": SimpleNamespace(is_mm_prefix_lm=True, rswa_window=None)},
    "reference": {"model_config": SimpleNamespace(is_mm_prefix_lm=False, rswa_window=64)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_attention_that_the_kernel_does_not_know_is_refused(reason):
    impl = Batch([(chain(2), 3)]).impl(window=5, soft_cap=3.0, sinks=torch.zeros(4))
    impl.check()
    vars(impl).update(REFUSED[reason])
    with pytest.raises(NotImplementedError, match=reason):
        impl.check()


@pytest.mark.parametrize("name", ["flashinfer", "xformers"])
def test_what_a_library_does_not_know_is_refused(name, monkeypatch):
    batch = Batch([(chain(2), 3)])
    impl = batch.impl(sinks=torch.zeros(4))
    impl.check()
    monkeypatch.setattr(tree_triton, "library_of", lambda config: LIBRARIES[name])
    wanted = f"tree_attention: '{name}' does not know .*sinks, which this LLM.*; use tree_attention='triton'"
    with pytest.raises(NotImplementedError, match=wanted):
        batch.impl(sinks=torch.zeros(4)).check()
    monkeypatch.setattr(tree_triton, "library_of", lambda config: LIBRARIES["torch"])
    batch.impl(soft_cap=3.0, sinks=torch.zeros(4)).check()


def test_the_backend_says_what_it_does_not_support():
    asked = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    reasons = tree_triton.TreeTritonAttentionBackend.validate_configuration
    assert reasons(**asked) == []
    assert reasons(**asked | {"kv_cache_dtype": "fp8"}) == []
    for name, value in {
        "head_size": 512,
        "kv_cache_dtype": "float16",
        "use_mm_prefix": True,
        "use_rswa": True,
        "use_non_causal": True,
        "use_batch_invariant": True,
        "attn_type": "encoder_decoder",
        "device_capability": SimpleNamespace(major=7, minor=5),
    }.items():
        assert len(reasons(**asked | {name: value})) == 1, name
    assert reasons(**asked | {"kv_cache_dtype": "int8_per_token_head"})


ELSEWHERE = """
import pickle, sys
from triton.backends import backends
assert "cpu" in backends
chosen = pickle.loads(bytes.fromhex(sys.argv[1]))
assert chosen.name == "TREE_TRITON", chosen
from vllm.triton_utils import HAS_TRITON
assert HAS_TRITON
"""


def test_the_backend_is_chosen_by_name_in_every_process():
    for hook in triton_attention.HOOKS:
        hook.check()
    member = triton_attention.register()
    assert member is triton_attention.register()
    assert member.name == tree_triton.TreeTritonAttentionBackend.get_name() == triton_attention.NAME
    assert member.get_class() is tree_triton.TreeTritonAttentionBackend
    assert AttentionConfig(backend="tree_triton").backend is member
    # A spawned engine gets its configuration before it loads plug-ins.
    command = [sys.executable, "-c", ELSEWHERE, pickle.dumps(member).hex()]
    done = subprocess.run(command, env=os.environ | triton_cpu.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
