# SPDX-License-Identifier: Apache-2.0
"""Tree attention: checked against triton_kernels/reference/tree_attention.py, then timed against what else there is.

    python -m specinfer_vllm.bench.kernels.tree_attention [--tiny]

Timed is one layer: the tree's rows; one-token decode with the same kernel, whose K/V bytes are nearly the same, so that
the ratio says what the tree costs; torch's scaled dot product attention with a boolean mask, FlexAttention and the tree
attention of xFormers, all three over K/V that lie contiguously. The bytes that count are the least possible ones: K and
V once per KV head, queries and outputs once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.reference import tree_attention as reference
from specinfer_vllm.triton_kernels.reference.tree_build import build
from specinfer_vllm.triton_kernels.tree_attention import tree_attention

BLOCK_SIZE = 16
# Of a row's largest number. NVIDIA's chips multiply fp32 as three TF32 products. Weights and outputs are rounded to
# bfloat16 by compiled kernels, but truncated in the interpreter, each by up to 2^-7.
TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 2**-6 if triton.knobs.runtime.interpret else 1e-2,
}
# How [blocks, K and V, block_size, kv_heads, head_dim] are permuted in memory; each is its own inverse.
LAYOUTS = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4), "interleaved": (0, 3, 2, 1, 4)}


def inputs(
    device: torch.device,
    contexts: Sequence[int],
    nodes: Sequence[int],
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    causal: bool = False,
    last: int | None = None,
    scales: bool = False,
    sinks: bool = False,
    seed: int = 0,
    **options: object,
) -> dict[str, object]:
    """Arguments of tree_attention for requests with so many committed tokens and tree slots each.

    Blocks lie in random order. Everything behind a request's last slot is NaN, as is block 0, where the table points
    from there on. causal: no bits. last: only so many last slots of each tree are rows. options: as tree_attention's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)
    lengths = [context + count for context, count in zip(contexts, nodes, strict=True)]
    table, unused = shuffled_blocks(lengths, block_size)
    both = normal(int(table.max()) + 1, 2, block_size, kv_heads, head_dim)
    for block, offset in unused:
        both[block, :, offset:] = torch.nan
    both = both.permute(LAYOUTS[layout]).to(cache_dtype or dtype).contiguous().permute(LAYOUTS[layout])
    parent, start = measure.random_forest(nodes, seed)
    prefix = torch.tensor(contexts, dtype=torch.int32)
    arrays = build(parent, start, prefix, max_rows=max(nodes))
    first = [max(0, count - (count if last is None else last)) for count in nodes]
    rows = torch.cat([torch.arange(int(s) + f, int(s) + n) for s, f, n in zip(start, first, nodes, strict=False)])
    counts = torch.tensor([0, *(n - f for n, f in zip(nodes, first, strict=True))])
    optional: dict[str, torch.Tensor] = {}
    if not causal:
        optional |= {"ancestors": arrays.ancestors[rows], "depth": arrays.depth, "query_depth": arrays.depth[rows]}
    if last is not None:
        optional["tree_start"] = start
    if scales:
        optional |= {"k_scale": normal(kv_heads).abs() + 0.2, "v_scale": normal(1).abs() + 0.2}
    if sinks:
        optional["sinks"] = normal(group * kv_heads)
    return {
        "query": normal(len(rows), kv_heads * group, head_dim).to(dtype),
        "key": both[:, 0],
        "value": both[:, 1],
        "block_table": table.to(device),
        "query_start": counts.cumsum(0, dtype=torch.int32).to(device),
        "prefix_len": prefix.to(device),
        "max_rows": int(counts.max()),
        "max_keys": max(lengths),
        "scale": head_dim**-0.5,
        **{name: tensor.to(device) for name, tensor in optional.items()},
        **options,
    }


def shuffled_blocks(lengths: Sequence[int], block_size: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Blocks 1, 2, ... in random order for requests of so many keys: (block table, unused slots).

    The table [requests, max_blocks] int32 points to block 0 behind a request's last block. Unused: (block, offset)
    stands for the block's slots from the offset on.
    """
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1
    table, unused = torch.zeros(len(counts), max(counts), dtype=torch.int32), [(0, 0)]
    for request, mine in enumerate(order.split(counts)):
        table[request, : len(mine)] = mine
        if lengths[request] % block_size:
            unused.append((int(mine[-1]), lengths[request] % block_size))
    return table, unused


def attention_error(attend: measure.Call, expect: measure.Call, device: torch.device, **arguments: object) -> float:
    """Relative error of a kernel's output to its reference's, or that of lse, if larger: a logarithm has no scale."""
    shape = arguments["query"].shape[:2]
    lse, sums = torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.float64, device=device)
    made, expected = attend(**arguments, lse=lse), expect(**arguments, lse=sums)
    # max() would lose a NaN.
    return max(measure.relative_error(made, expected), float((lse - sums).abs().max().nan_to_num(nan=torch.inf)))


def _error(device: torch.device, case: dict[str, object]) -> float:
    return attention_error(tree_attention, reference.tree_attention, device, **inputs(device, **case))


MIXED = {"contexts": (0, 17, 500, 4096, 2000), "nodes": (1, 16, 33, 64, 0)}
LONG = {"contexts": (9000, 33), "nodes": (24, 5)}
CHECKED: dict[str, dict[str, object]] = {
    "trees": MIXED | {"kv_heads": 8},
    "trees, no grouping, fp16": MIXED | {"group": 1, "dtype": torch.float16},
    "trees, groups of 8, fp32, HND": MIXED | {"group": 8, "dtype": torch.float32, "layout": "HND"},
    "one request": {"contexts": (20000,), "nodes": (16,)},
    "chain": LONG | {"causal": True},
    "window, soft cap, sinks": LONG | {"window": 300, "soft_cap": 20.0, "sinks": True},
    "chain, window, soft cap, sinks": LONG | {"causal": True, "window": 300, "soft_cap": 20.0, "sinks": True},
    "fp8 e4m3 with scales, interleaved": LONG
    | {"cache_dtype": torch.float8_e4m3fn, "scales": True, "layout": "interleaved"},
    "fp8 e5m2 with scales, HND": LONG | {"cache_dtype": torch.float8_e5m2, "scales": True, "layout": "HND"},
    "a level of each tree, window": LONG | {"last": 4, "window": 3000},
    "heads of 64, blocks of 1": LONG | {"head_dim": 64, "block_size": 1},
    "heads of 80, blocks of 24": LONG | {"head_dim": 80, "block_size": 24},
    "heads of 256, blocks of 128": LONG | {"head_dim": 256, "block_size": 128, "group": 2},
    "large trees": {"contexts": (700, 100), "nodes": (1024, 200)},
}


def shrunk(case: dict[str, object]) -> dict[str, object]:
    """The case with few keys, rows and heads, for the interpreter; large trees still need two words of bits."""
    nodes = [min(count, 9 if count <= 64 else 70) for count in case["nodes"]]
    small = {"contexts": [context % 41 for context in case["contexts"]], "nodes": nodes}
    if "window" in case:
        small["window"] = 6
    return case | small | {"kv_heads": 2}


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Errors of outputs and of lse, whichever is larger."""
    for name, case in CHECKED.items():
        tolerance = TOLERANCE[case.get("dtype", torch.bfloat16)]
        yield measure.checked(name, tolerance, _error, device, shrunk(case) if tiny else case)


@dataclass(frozen=True)
class Size:
    """What is timed: every combination; FlexAttention, which compiles for long, for some only."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    groups: tuple[int, ...]
    kv_heads: int
    head_dim: int
    flex: tuple[tuple[int, int, int, int], ...]  # context, batch, nodes, group


FULL = Size((1024, 8192, 32768), (1, 8, 64), (1, 16, 64), (1, 4, 8), 8, 128, ((8192, 8, 16, 4), (8192, 8, 64, 4)))
TINY = Size((20,), (1,), (1, 5), (2,), 2, 32, ())


@dataclass(frozen=True)
class Pool:
    """K and V for all copies of one context and batch, bf16; a copy's blocks lie together, in random order.

    key, value  [copies, batch, blocks, BLOCK_SIZE, kv_heads, head_dim]
    table       [copies, batch, blocks] int32
    """

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, size: Size, context: int, batch: int) -> Pool | None:
        """Random numbers; None where they do not fit into free memory."""
        blocks = -(-(context + max(size.nodes)) // BLOCK_SIZE)
        shape = (batch, blocks, BLOCK_SIZE, size.kv_heads, size.head_dim)
        one = 2 * 2 * batch * blocks * BLOCK_SIZE * size.kv_heads * size.head_dim
        copies = measure.copies_for(one, device)
        if 1.2 * copies * one + (1 << 30) > measure.free_bytes(device):
            return None
        key, value = (torch.empty(copies, *shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
        order = [torch.randperm(batch * blocks) + copy * batch * blocks for copy in range(copies)]
        return cls(key, value, torch.stack(order).view(copies, batch, blocks).to(device, torch.int32))

    def contiguous(self, copy: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as other kernels take them, each [batch, kv_heads, keys, head_dim]; not the same numbers."""
        key, value = (cache[copy].flatten(1, 2)[:, :keys].transpose(1, 2) for cache in (self.key, self.value))
        return key, value


@dataclass(frozen=True)
class Step:
    """One configuration: equal contexts, trees of equal size, the same for all copies.

    query [batch * nodes, heads, head_dim] bf16; ancestors [batch * nodes, words]; see [batch, nodes, nodes] bool.
    """

    pool: Pool
    context: int
    query: torch.Tensor
    ancestors: torch.Tensor
    see: torch.Tensor
    group: int

    @classmethod
    def of(cls, pool: Pool, context: int, nodes: int, group: int) -> Step:
        """Random trees and queries for a pool."""
        device, (_, batch, _, _, kv_heads, head_dim) = pool.key.device, pool.key.shape
        parent, start = measure.random_forest([nodes] * batch, seed=nodes)
        bits = build(parent, start, torch.zeros(batch, dtype=torch.int32), max_rows=nodes).ancestors
        slot = torch.arange(nodes)
        see = ((bits[:, slot // 64] >> (slot % 64)) & 1).bool().view(batch, nodes, nodes)
        query = torch.randn(batch * nodes, kv_heads * group, head_dim, device=device).to(torch.bfloat16)
        return cls(pool, context, query, bits.to(device), see.to(device), group)

    @property
    def bytes(self) -> int:
        """The least that must be moved: K and V once per KV head, queries and outputs."""
        _, batch, _, _, kv_heads, head_dim = self.pool.key.shape
        keys = self.context + self.see.shape[1]
        return 2 * (2 * batch * keys * kv_heads * head_dim + 2 * self.query.numel())

    def ours(self, causal: bool = False) -> measure.Timing:
        """Tree attention; causal: without bits, as decoding calls it."""
        batch, nodes, _ = self.see.shape
        device = self.query.device
        shared = {
            "query": self.query,
            "key": self.pool.key.flatten(0, 2),
            "value": self.pool.value.flatten(0, 2),
            "query_start": torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes,
            "prefix_len": torch.full((batch,), self.context, dtype=torch.int32, device=device),
            "max_rows": nodes,
            "max_keys": self.context + nodes,
            "scale": self.query.shape[2] ** -0.5,
            "ancestors": None if causal else self.ancestors,
        }
        return measure.graph_time([partial(tree_attention, **shared, block_table=table) for table in self.pool.table])

    def _dense(self) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Queries [batch, heads, nodes, head_dim] and each copy's K and V, [batch, kv_heads, keys, head_dim]."""
        batch, nodes, _ = self.see.shape
        query = self.query.view(batch, nodes, *self.query.shape[1:]).transpose(1, 2)
        return query, [self.pool.contiguous(copy, self.context + nodes) for copy in range(len(self.pool.table))]

    def sdpa(self) -> measure.Timing:
        """torch's attention with a boolean mask [batch, 1, nodes, keys]."""
        batch, nodes, _ = self.see.shape
        prefix = torch.ones(batch, nodes, self.context, dtype=torch.bool, device=self.query.device)
        mask = torch.cat([prefix, self.see], dim=2)[:, None]
        query, copies = self._dense()
        attend = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, enable_gqa=self.group > 1)
        return measure.graph_time([partial(attend, query, *each) for each in copies])

    def flex(self) -> measure.Timing:
        """FlexAttention, compiled, with a block mask of the trees."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, nodes, _ = self.see.shape
        see, context = self.see, self.context

        def visible(request, head, row, key):
            return (key < context) | see[request, row, (key - context).clamp(0, nodes - 1)]

        mask = create_block_mask(visible, batch, None, nodes, context + nodes, device=see.device)
        query, copies = self._dense()
        attend = partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=self.group > 1)
        return measure.graph_time([partial(attend, query, *each) for each in copies])

    def xformers(self) -> measure.Timing:
        """xFormers' tree attention: the prefix without a mask, one tree of all requests as a bias, both merged."""
        from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
        from xformers.ops.tree_attention import tree_attention as attend

        batch, nodes, _ = self.see.shape
        _, _, blocks, _, kv_heads, head_dim = self.pool.key.shape
        room = blocks * BLOCK_SIZE
        prefix = BlockDiagonalPaddedKeysMask.from_seqlens([nodes] * batch, room, [self.context] * batch)
        prefix = prefix.to(self.query.device)
        bias = torch.zeros(nodes, nodes, dtype=self.query.dtype, device=self.query.device)
        bias.masked_fill_(~self.see[0], -torch.inf)
        query = self.query.view(batch, nodes, kv_heads, self.group, head_dim)
        calls = []
        for copy in range(len(self.pool.table)):
            # [batch, keys, kv_heads, group, head_dim]; the heads of a group share their K and V by a stride of 0.
            key, value = (
                cache[copy].flatten(1, 2).unsqueeze(3).expand(-1, -1, -1, self.group, -1)
                for cache in (self.pool.key, self.pool.value)
            )
            tree = slice(self.context, self.context + nodes)
            calls.append(partial(attend, query, key[:, tree], value[:, tree], key, value, bias, prefix))
        return measure.graph_time(calls)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per call of the tree's rows and of the others, for every configuration."""
    size = TINY if tiny else FULL
    for context, batch in itertools.product(size.contexts, size.batches):
        measure.say(f"tree attention, context {context}, batch {batch}")
        yield from _times_of(device, size, context, batch, deadline)


def _times_of(device: torch.device, size: Size, context: int, batch: int, deadline: float) -> Iterator[measure.Row]:
    """The rows of one pool; in a function of its own, so that nothing holds the pool any longer."""
    late = time.monotonic() > deadline
    pool = None if late else Pool.of(device, size, context, batch)
    for group in size.groups:
        if pool is not None:
            decode = measure.attempted(deadline, Step.of(pool, context, 1, group).ours, True)
        for nodes in size.nodes:
            row: measure.Row = {"context": context, "batch": batch, "group": group, "nodes": nodes}
            if pool is None:
                yield row | {"us": measure.LATE if late else measure.NO_MEMORY}
                continue
            step = Step.of(pool, context, nodes, group)
            tree = measure.attempted(deadline, step.ours)
            row |= measure.time_cells(tree, step.bytes, device)
            row |= {"decode us": measure.microseconds(decode), "tree/decode": measure.ratio(tree, decode)}
            row["SDPA us"] = measure.microseconds(measure.attempted(deadline, step.sdpa))
            if (context, batch, nodes, group) in size.flex:
                row["Flex us"] = measure.microseconds(measure.attempted(deadline, step.flex))
            row["xFormers us"] = measure.microseconds(measure.attempted(deadline, step.xformers))
            yield row


if __name__ == "__main__":
    measure.main(check, times, __doc__)
