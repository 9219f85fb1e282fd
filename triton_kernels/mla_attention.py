# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged latent cache (MLA, absorbed): one row per token is the key and the value of every head.

In    query        [rows, heads, latent_dim + rope_dim]    rows of all requests, request after request; fp16/bf16/fp32;
                                                           W_UK is absorbed into the first latent_dim numbers
      cache        [blocks, block_size, latent_dim + rope_dim]  last stride 1, the others free; the query's dtype or
                                                           float8_e4m3fn / float8_e5m2
      block_table  [requests, max_blocks] int32            physical blocks of each request; row stride free
      query_start  [requests + 1] int32                    rows of request r: query_start[r]:query_start[r+1], or none
      prefix_len   [requests] int32                        committed tokens before the tree, all visible
      ancestors    [rows, words] int64 or None             bit j of row i: tree slot j is visible (i itself included)
      tree_start   [requests + 1] int32, None = query_start  tree slots of request r: tree_start[r]:tree_start[r+1]
      cache_scale  [1] float32                             row = stored row * cache_scale, optional
Out   output       [rows, heads, latent_dim]               last stride 1; the query's dtype; W_UV is the caller's
      lse          [rows, heads] float32, optional         natural log of the sum over visible keys
Work  workspace    float32                               workspace_size(rows, heads, latent_dim, splits) elements,
                                                           undefined before and after

K = the whole row, V = its first latent_dim numbers; latent_dim is a power of two >= 32, rope_dim one >= 16.
Visibility, splits and what is undefined are those of tree_attention: prefix and ancestors, or with None the causal
chain; a row that sees no key has output 0 and lse -inf; rows past query_start[-1] are left alone. What no row of the
request sees (past the last slot, unreferenced tree slots) and block_table entries past its last block may hold
anything, NaN included.

Nodes and heads are packed into the rows of a tile: a request has tiles = ceil(nodes * heads / block_rows) (MlaPlan).
Every tile reads each latent of the request once, for K and for V. The tiles of a split are neighbours in the grid, so
that one of them brings the latents from memory and the others find them in the L2 cache. Bytes without splits: from
memory keys * (latent_dim + rope_dim) * size + query + output, out of L2 tiles times the first term. Partial results:
4 * (latent_dim + 1) per row, head and split, written and read once. With MlaPlan.part (fp32 on GPUs) a tile's K is
read again, which L1 should hold. Products with block numbers, rows and slots are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels import tuning
from specinfer_vllm.triton_kernels.tree_attention import (
    FP8,
    LN_2,
    LOG2_E,
    _check_requests,
    _dot,
    _extent,
    _first_key,
    _head_stride,
    _merge,
    _partials,
    _precision,
    _tiles_per_split,
    _tree_bits,
    _weights,
    workspace_size,
)
from specinfer_vllm.triton_kernels.tuning import MlaPlan

__all__ = ["mla_attention", "plan_for", "workspace_size"]


@triton.jit
def _read(at, read, MASKED: tl.constexpr):
    """What stands there; with MASKED, 0 where it is not to be read."""
    if MASKED:
        return tl.load(at, mask=read, other=0.0)
    return tl.load(at)


@triton.jit(do_not_specialize=["tiles", "splits", "words"])
def _attend_latent(
    query,
    cache,
    block_table,
    query_start,
    tree_start,
    prefix_len,
    ancestors,
    cache_scale,
    output,  # the partial results [rows, heads, splits, latent_dim] unless DIRECT
    lse,  # the partial ones [rows, heads, splits] in base 2 unless DIRECT
    scale,
    tiles,
    splits,
    words,
    query_stride_row,
    query_stride_head,
    cache_stride_block,
    cache_stride_slot,
    table_stride,
    ancestors_stride,
    output_stride_row,
    output_stride_head,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (row tile of a split, request): the tile's rows over the split's latents."""
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    request = tl.program_id(1)

    first_row, rows, prefix, keys = _extent(query_start, tree_start, prefix_len, request)
    if tile * BLOCK_ROWS >= rows * HEADS:
        return
    first = _first_key(prefix, keys, rows, 0, False, CAUSAL, BLOCK_KEYS)
    span = _tiles_per_split(first, keys, splits, BLOCK_KEYS) * BLOCK_KEYS
    start = first + split * span
    if (split > 0) & (start >= keys):
        return
    end = tl.minimum(start + span, keys)

    packed = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = packed // HEADS
    live = node < rows
    row = (first_row + node).to(tl.int64)
    head = packed % HEADS
    # In halves: a whole accumulator takes twice the registers and the shared memory on its way to the stores.
    low = tl.arange(0, LATENT_DIM // 2)
    high = LATENT_DIM // 2 + low
    rope = LATENT_DIM + tl.arange(0, ROPE_DIM)
    query_at = query + (row * query_stride_row + head * query_stride_head)[:, None]
    if PART == 0:
        q_low = tl.load(query_at + low[None, :], mask=live[:, None], other=0.0)
        q_high = tl.load(query_at + high[None, :], mask=live[:, None], other=0.0)
        q_rope = tl.load(query_at + rope[None, :], mask=live[:, None], other=0.0)

    # Keys before all_seen are visible to every row of the tile, keys from end on to none.
    if CAUSAL:
        before = keys - rows  # row i sees keys up to before + i
        end = tl.minimum(end, before + tl.minimum((tile * BLOCK_ROWS + BLOCK_ROWS - 1) // HEADS, rows - 1) + 1)
        all_seen = before + tile * BLOCK_ROWS // HEADS + 1
    else:
        all_seen = prefix
    all_seen_end = tl.maximum(start, tl.minimum(end, all_seen) // BLOCK_KEYS * BLOCK_KEYS)

    score_scale = scale * LOG2_E
    if HAS_SCALE:
        score_scale = score_scale * tl.load(cache_scale)

    table = block_table + request.to(tl.int64) * table_stride
    acc_low = tl.zeros([BLOCK_ROWS, LATENT_DIM // 2], tl.float32)
    acc_high = tl.zeros([BLOCK_ROWS, LATENT_DIM // 2], tl.float32)
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    dtype = query.dtype.element_ty

    # Unrolled: first the tiles that all rows see whole, then the few others, which leave the buffers to the former.
    for masked in tl.static_range(2):
        begin = all_seen_end if masked else start
        stop = end if masked else all_seen_end
        for at in tl.range(begin, stop, BLOCK_KEYS, num_stages=(2 if STAGES > 2 else 1) if masked else STAGES):
            index = at + tl.arange(0, BLOCK_KEYS)
            read = None
            if masked:
                slot = index - prefix
                if CAUSAL:
                    visible = index[None, :] <= (before + node)[:, None]
                else:
                    bits = _tree_bits(ancestors, row, live, slot, at - prefix, ancestors_stride, words, BLOCK_KEYS)
                    visible = (slot < 0)[None, :] | bits
                visible = visible & live[:, None] & (index < end)[None, :]
                # What no row sees is not read, so that 0 * NaN cannot arise in the second product.
                read = tl.max(visible.to(tl.int32), 0) > 0
            block = _read(table + index // BLOCK_SIZE, read, masked).to(tl.int64)
            offset = (index % BLOCK_SIZE).to(tl.int64)
            cache_at = cache + (block * cache_stride_block + offset * cache_stride_slot)[:, None]
            if masked:
                read = read[:, None]
            v_low = _read(cache_at + low[None, :], read, masked).to(dtype)
            v_high = _read(cache_at + high[None, :], read, masked).to(dtype)
            scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
            if PART == 0:
                k_rope = _read(cache_at + rope[None, :], read, masked).to(dtype)
                scores = _dot(q_low, tl.trans(v_low), scores, PRECISION, WIDEN)
                scores = _dot(q_high, tl.trans(v_high), scores, PRECISION, WIDEN)
                scores = _dot(q_rope, tl.trans(k_rope), scores, PRECISION, WIDEN)
            else:
                # A loop that is not unrolled: a whole row's three TF32 products do not fit the registers.
                for at_dim in tl.range(0, LATENT_DIM + ROPE_DIM, PART, num_stages=1):
                    dim = at_dim + tl.arange(0, PART)
                    q = tl.load(query_at + dim[None, :], mask=live[:, None], other=0.0)
                    k = _read(cache_at + dim[None, :], read, masked).to(dtype)
                    scores = _dot(q, tl.trans(k), scores, PRECISION, WIDEN)
            scores = scores * score_scale
            if masked:
                scores = tl.where(visible, scores, float("-inf"))
            weights, rescale, maximum, total = _weights(maximum, total, scores)
            weights = weights.to(dtype)
            acc_low = _dot(weights, v_low, acc_low * rescale[:, None], PRECISION, WIDEN)
            acc_high = _dot(weights, v_high, acc_high * rescale[:, None], PRECISION, WIDEN)

    factor = tl.where(total > 0, 1.0 / total, 0.0)
    if HAS_SCALE:
        factor = factor * tl.load(cache_scale)
    log_total = maximum + tl.log2(total)
    if DIRECT:
        out_at = output + (row * output_stride_row + head * output_stride_head)[:, None]
        if HAS_LSE:
            tl.store(lse + row * HEADS + head, log_total * LN_2, mask=live)
    else:
        part = (row * HEADS + head) * splits + split
        out_at = output + (part * LATENT_DIM)[:, None]
        tl.store(lse + part, log_total, mask=live)
    store_type = output.dtype.element_ty
    tl.store(out_at + low[None, :], (acc_low * factor[:, None]).to(store_type), mask=live[:, None])
    tl.store(out_at + high[None, :], (acc_high * factor[:, None]).to(store_type), mask=live[:, None])


def mla_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    max_keys: int,
    scale: float,
    latent_dim: int = 512,
    rope_dim: int = 64,
    ancestors: torch.Tensor | None = None,
    tree_start: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    plan: MlaPlan | None = None,
) -> torch.Tensor:
    """Latent attention of all tree rows; tensors as in the contract above, all on one device. Returns output.

    max_rows, max_keys: upper bounds of the query rows and of the keys of one request, known on the host.
    output, workspace: allocated when missing; lse: written when given. No host sync.
    Raises ValueError that names the tensor or option at fault.
    """
    _check(query, cache, block_table, query_start, prefix_len, latent_dim, rope_dim, ancestors, lse)
    _head_stride("cache_scale", cache_scale, 1)
    plan = plan or plan_for(query, cache, block_table, max_rows, max_keys, latent_dim, rope_dim)
    rows, heads, _ = query.shape
    if output is None:
        output = query.new_empty(rows, heads, latent_dim)
    if output.shape != (rows, heads, latent_dim) or output.dtype != query.dtype or output.stride(2) != 1:
        raise ValueError(
            f"output: {tuple(output.shape)} {output.dtype} must be [{rows}, {heads}, {latent_dim}] {query.dtype},"
            " contiguous in latent_dim"
        )
    requests = block_table.shape[0]
    if not rows or not requests or not max_rows:
        return output
    tree_start = query_start if tree_start is None else tree_start
    direct = plan.splits == 1
    partial, partial_lse = (output, lse) if direct else _partials(output, workspace, plan.splits)
    tiles = triton.cdiv(max_rows * heads, plan.block_rows)
    _attend_latent[(tiles * plan.splits, requests)](
        query,
        cache,
        block_table,
        query_start,
        tree_start,
        prefix_len,
        ancestors,
        cache_scale,
        partial,
        partial_lse,
        scale,
        tiles,
        plan.splits,
        ancestors.shape[1] if ancestors is not None else 0,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        ancestors.stride(0) if ancestors is not None else 0,
        output.stride(0),
        output.stride(1),
        HEADS=heads,
        LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KEYS=plan.block_keys,
        PART=plan.part,
        STAGES=plan.num_stages,
        CAUSAL=ancestors is None,
        HAS_SCALE=cache_scale is not None,
        HAS_LSE=lse is not None,
        DIRECT=direct,
        PRECISION=_precision(query),
        WIDEN=query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if not direct:
        _merge(
            partial, partial_lse, query_start, tree_start, prefix_len, output, lse, max_rows, plan, ancestors is None
        )
    return output


def plan_for(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    max_rows: int,
    max_keys: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
) -> MlaPlan:
    """The table's plan for tensors of these shapes, dtypes and device; ask it to size a workspace."""
    name, sizes = tuning.architecture(query.device), (query.element_size(), cache.element_size())
    requests, heads = block_table.shape[0], query.shape[1]
    return tuning.mla_plan(name, requests, heads, latent_dim, rope_dim, max_rows, max_keys, *sizes)


def _check(query, cache, block_table, query_start, prefix_len, latent_dim, rope_dim, ancestors, lse) -> None:
    """Raise ValueError for shapes, dtypes and layouts that the kernel does not take. Looks at no contents."""
    for name, size, least in (("latent_dim", latent_dim, 32), ("rope_dim", rope_dim, 16)):
        if size < least or size & (size - 1):
            raise ValueError(f"{name}: {size} must be a power of two, at least {least}")
    width = latent_dim + rope_dim
    if query.dim() != 3 or query.shape[2] != width:
        raise ValueError(f"query: {tuple(query.shape)} must be [rows, heads, {latent_dim} + {rope_dim}]")
    if query.stride(2) != 1 or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query: {query.dtype} must be fp16, bf16 or fp32 and contiguous in its last dimension")
    if cache.dim() != 3 or cache.shape[2] != width or cache.stride(2) != 1:
        raise ValueError(
            f"cache: {tuple(cache.shape)} must be [blocks, block_size, {latent_dim} + {rope_dim}], contiguous in its"
            " last dimension; rows that pack scales with the numbers (fp8_ds_mla) are not taken"
        )
    if cache.dtype != query.dtype and cache.dtype not in FP8:
        raise ValueError(f"cache: {cache.dtype} must be {query.dtype} as query, float8_e4m3fn or float8_e5m2")
    _check_requests(query.shape[0], query.shape[1], block_table, query_start, prefix_len, ancestors, lse)
