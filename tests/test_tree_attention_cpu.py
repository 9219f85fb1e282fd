# SPDX-License-Identifier: Apache-2.0
"""The masked attention of the CPU backend, compiled and in torch, against a dense float64 softmax."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specinfer_vllm.attention import cpu as tree_cpu
from specinfer_vllm.attention.cpu_kernel import kernel
from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout
from specinfer_vllm.attention.tree_mask import TreeMask
from specinfer_vllm.propose.ssm import pack_bits

HEADS, KV_HEADS = 6, 2


@pytest.fixture(scope="module", autouse=True)
def kernels():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def random_tree(rng, rows):
    """Parents and depths of a random tree of `rows` rows, row 0 the root."""
    parent = np.array([-1, *(rng.integers(0, i) for i in range(1, rows))])
    depth = np.zeros(rows, int)
    visible = np.eye(rows, dtype=bool)
    for i in range(1, rows):
        depth[i] = depth[parent[i]] + 1
        visible[i] |= visible[parent[i]]
    return depth, visible


class Case:
    """Random requests whose K/V stands in a poisoned paged cache."""

    def __init__(self, seed, tree_rows, prefix, block=32, dim=32, dtype=torch.float32, isa="vec", last=None):
        rng = np.random.default_rng(seed)
        self.dim, self.block = dim, block
        requests, width = len(tree_rows), max(last or max(tree_rows), 1)
        tree = max(tree_rows)
        blocks = [-(-(p + n) // block) for p, n in zip(prefix, tree_rows, strict=True)]
        order = torch.from_numpy(rng.permutation(sum(blocks)) + 1)
        self.cache = torch.full((sum(blocks) + 1, KV_HEADS, block, 2 * dim), float("nan"), dtype=dtype)
        self.table = torch.full((requests, max(blocks)), 0, dtype=torch.int32)
        self.layout = CpuKvLayout.probe(block, dim, dtype, isa)
        flat = self.cache.view(len(self.cache), KV_HEADS, -1)
        self.keys, self.values, visible, depths = [], [], [], []
        for r, (n, p) in enumerate(zip(tree_rows, prefix, strict=True)):
            self.table[r, : blocks[r]] = order[: blocks[r]].to(torch.int32)
            order = order[blocks[r] :]
            k, v = torch.randn(2, p + n, KV_HEADS, dim).to(dtype)
            for t in range(p + n):
                at = self.table[r, t // block]
                flat[at][:, self.layout.key[t % block]] = k[t]
                flat[at][:, self.layout.value[t % block]] = v[t]
            self.keys.append(k.double())
            self.values.append(v.double())
            depth, seen = random_tree(rng, n)
            visible.append(seen)
            depths.append(depth)
        self.first = [max(0, n - width) for n in tree_rows]  # query rows are the last `width` nodes of each tree
        counts = [n - f for n, f in zip(tree_rows, self.first, strict=True)]
        starts = np.cumsum([0, *counts])
        self.rows = torch.zeros(requests, width, dtype=torch.int64)
        valid = torch.zeros(requests, width, dtype=torch.bool)
        bits = torch.zeros(requests, width, tree, dtype=torch.bool)
        position = torch.zeros(requests, width, dtype=torch.int64)
        depth = torch.zeros(requests, tree, dtype=torch.int64)
        for r, n in enumerate(tree_rows):
            c = counts[r]
            self.rows[r, :c] = torch.arange(c) + int(starts[r])
            valid[r, :c] = True
            bits[r, :c, :n] = torch.from_numpy(visible[r][self.first[r] :])
            depth[r, :n] = torch.from_numpy(depths[r])
            position[r, :c] = prefix[r] + torch.from_numpy(depths[r][self.first[r] :])
        self.visible, self.depths, self.prefix, self.counts = visible, depths, prefix, counts
        self.mask = TreeMask(
            rows=self.rows,
            valid=valid,
            words=pack_bits(bits),
            position=position,
            tree_depth=depth,
            prefix_len=torch.tensor(prefix),
            tree_len=torch.tensor(tree_rows),
            batch=torch.arange(requests),
            covers_all=True,
        )
        self.query = torch.randn(int(starts[-1]), HEADS, dim).to(dtype)

    def impl(self, compiled, window=-1, soft_cap=0.0):
        found = object.__new__(tree_cpu.TreeCPUAttentionImpl)
        vars(found).update(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            num_queries_per_kv=HEADS // KV_HEADS,
            head_size=self.dim,
            scale=self.dim**-0.5,
            logits_soft_cap=soft_cap,
            sliding_window=window,
            layout=self.layout,
            compiled=kernel() if compiled else None,
            alibi_slopes=None,
            sinks=None,
        )
        return found

    def run(self, compiled, **kwargs):
        output = torch.full_like(self.query, 7.0)
        tree = tree_cpu.TreePass.of(self.mask, self.table, self.block)
        self.impl(compiled, **kwargs).tree_forward(SimpleNamespace(isa="vec"), self.query, self.cache, tree, output)
        return output

    def dense(self, window=-1, soft_cap=0.0):
        result, at = [], 0
        for r, k in enumerate(self.keys):
            p, n = self.prefix[r], len(self.depths[r])
            position = np.concatenate([np.arange(p), p + self.depths[r]])
            for i in range(self.first[r], n):
                see = np.concatenate([np.ones(p, bool), self.visible[r][i]])
                if window > 0:
                    see &= position[p + i] - position < window
                q = self.query[at].double()
                at += 1
                heads = []
                for h in range(HEADS):
                    kv = h // (HEADS // KV_HEADS)
                    s = (k[:, kv] @ q[h]) * self.dim**-0.5
                    s = torch.tanh(s / soft_cap) * soft_cap if soft_cap else s
                    s[~torch.from_numpy(see)] = float("-inf")
                    heads.append(s.softmax(0) @ self.values[r][:, kv])
                result.append(torch.stack(heads))
        return torch.stack(result)


SHAPES = {
    "one small tree": ([4], [5]),
    "empty prefix": ([6], [0]),
    "block boundary": ([9, 3], [27, 32]),
    "mixed sizes": ([1, 17, 2, 9], [40, 3, 64, 31]),
    "two words": ([70, 5], [33, 90]),
    "three words": ([150], [10]),
}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=list(SHAPES))
@pytest.mark.parametrize("extra", [{}, {"window": 7}, {"soft_cap": 5.0}], ids=["plain", "window", "soft cap"])
def test_tree_rows_see_prefix_and_ancestors_only(compiled, shape, extra):
    if compiled and kernel() is None:
        pytest.skip("no compiler")
    case = Case(1, *SHAPES[shape])
    torch.testing.assert_close(case.run(compiled, **extra).double(), case.dense(**extra), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_a_level_reads_slots_of_the_levels_above(compiled):
    case = Case(2, [12, 12, 12], [20, 45, 1], last=4)
    torch.testing.assert_close(case.run(compiled).double(), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim,block", [(64, 128), (80, 32), (128, 64)])
def test_other_head_and_block_sizes(dim, block):
    case = Case(3, [7, 9], [130, 11], block=block, dim=dim, isa="vec" if dim % 32 == 0 else "vec16")
    torch.testing.assert_close(case.run(True).double(), case.dense(), rtol=1e-5, atol=1e-5)


def test_bfloat16_takes_the_torch_path():
    case = Case(4, [7, 9], [40, 11], dtype=torch.bfloat16)
    impl = case.impl(True)
    assert not impl.fits_kernel(case.query, case.cache)
    torch.testing.assert_close(case.run(False).double(), case.dense(), rtol=1e-2, atol=1e-2)


def test_a_row_that_sees_its_sibling_is_caught():
    """Negative control: with every tree slot visible the comparison above must fail."""
    case = Case(5, [8], [20])
    case.mask.words.fill_(-1)
    assert not torch.allclose(case.run(True).double(), case.dense(), rtol=1e-3, atol=1e-3)


def test_rows_outside_the_trees_are_left_alone():
    case = Case(6, [5, 4], [8, 9])
    extra = torch.randn(3, HEADS, case.dim)
    case.query = torch.cat([extra, case.query])
    case.mask.rows.add_(3)
    output = case.run(True)
    assert (output[:3] == 7.0).all()


def test_layout_probe_refuses_what_it_cannot_invert(monkeypatch):
    def lossy(key, value, key_cache, value_cache, *args, **kwargs):
        key_cache.zero_()
        value_cache.zero_()

    monkeypatch.setattr("specinfer_vllm.attention.cpu_kv_layout.ops.cpu_attn_reshape_and_cache", lossy)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        CpuKvLayout.probe(32, 32, torch.float32, "vec")


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_attention_that_trees_do_not_know_is_refused_by_name(name):
    found = object.__new__(tree_cpu.TreeCPUAttentionImpl)
    vars(found).update(alibi_slopes=None, sinks=None)
    found.check()
    setattr(found, name, torch.zeros(2))
    with pytest.raises(NotImplementedError, match=f"'tree' cannot verify this LLM yet, .* uses {name}"):
        found.check()
