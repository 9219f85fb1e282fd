# SPDX-License-Identifier: Apache-2.0
"""Tree attention over the paged KV cache: one masked split-KV pass over prefix and tree, and a merge of the splits.

In    query        [rows, heads, head_dim]                   rows of all requests, request after request; fp16/bf16/fp32
      key, value   [blocks, block_size, kv_heads, head_dim]  views with any strides (NHD, HND, K and V interleaved); the
                                                             query's dtype or float8_e4m3fn / float8_e5m2
      block_table  [requests, max_blocks] int32              physical blocks of each request; row stride free
      query_start  [requests + 1] int32                      rows of request r: query_start[r]:query_start[r+1], or none
      prefix_len   [requests] int32                          committed tokens before the tree, all visible
      ancestors    [rows, words] int64 or None               bit j of row i: tree slot j is visible (i itself included)
      tree_start   [requests + 1] int32, None = query_start  tree slots of request r: tree_start[r]:tree_start[r+1]
      depth        [tree slots] int32                        0 at the root; with a window and ancestors only
      query_depth  [rows] int32, None = depth                with a window, ancestors and tree_start only
      sinks        [heads] float32                           logit of each head's sink, optional
      k_scale      [1] or [kv_heads] float32                 K = stored K * k_scale, optional; v_scale likewise
Out   output       [rows, heads, head_dim]                   last stride 1; the query's dtype
      lse          [rows, heads] float32, optional           natural log of the sum over visible keys, sink included
Work  workspace    float32, workspace_size(...) elements     contents undefined before and after

Keys of request r are the sequence indices 0 .. prefix_len[r] + tree slots - 1; tree slot j stands at prefix_len[r] + j.
Key position = index in the prefix, prefix_len + depth in the tree; a window of w hides keys that lie w or more
positions before the row. ancestors=None is the causal chain: the rows are the last ones of the sequence, row i sees
every key up to its own. A row that sees no key has output 0 and lse -inf (without a sink). Rows past query_start[-1]
are left alone.

Undefined: block_table entries past a request's last block (never read); cache contents that no row of the request sees:
past the last slot, out of the window, unreferenced tree slots. NaN there does not reach a result: scores are replaced,
V is read as 0. Bits at or past a request's tree slots are ignored.

Query heads that share a KV head are packed with the nodes into the rows of a tile, so each K/V tile is read once per KV
head while rows x group <= block_rows (AttentionPlan), and from the L2 cache for further tiles. Bytes without splits:
2 * keys * kv_heads * head_dim * size + query + output. Products with block numbers, rows and slots are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels import tuning
from specinfer_vllm.triton_kernels.tuning import AttentionPlan

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _first_key(prefix, keys, rows, window, HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """First key that any row of the request can see, rounded down to a tile."""
    first = prefix * 0
    if HAS_WINDOW:
        # The first row's position: the root's, or in a chain that of the first of the last rows.
        position = keys - rows if CAUSAL else prefix
        first = tl.maximum(position - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    return first


@triton.jit
def _extent(query_start, tree_start, prefix_len, request):
    """A request's first row, rows, committed tokens and keys."""
    first_row = tl.load(query_start + request)
    rows = tl.load(query_start + request + 1) - first_row
    prefix = tl.load(prefix_len + request)
    keys = prefix + tl.load(tree_start + request + 1) - tl.load(tree_start + request)
    return first_row, rows, prefix, keys


@triton.jit
def _tiles_per_split(first, keys, splits, BLOCK_KEYS: tl.constexpr):
    """Tiles of keys per split, at least 1; both stages must agree on it."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys - first, BLOCK_KEYS), splits), 1)


@triton.jit
def _tree_bits(ancestors, row, live, slot, first_slot, stride, words, BLOCK_KEYS: tl.constexpr):
    """Whether each row [M] sees each tree slot [N]; first_slot = slot[0], may be negative (False there)."""
    seen = (row[:, None] < 0) & (slot[None, :] < 0)
    for i in tl.static_range((BLOCK_KEYS + 62) // 64 + 1):
        word = (first_slot >> 6) + i
        wanted = tl.where(live, word, -1)  # a vector: the interpreter does not broadcast a scalar comparison
        bits = tl.load(ancestors + row * stride + word, mask=(wanted >= 0) & (wanted < words), other=0)
        bit = (bits[:, None] >> (slot & 63).to(tl.int64)[None, :]) & 1
        seen = seen | ((bit != 0) & ((slot >> 6) == word)[None, :])
    return seen


@triton.jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), without overflow."""
    x = scores / soft_cap
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return soft_cap * tl.where(x < 0, -t, t)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """acc + a @ b in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _weights(maximum, total, scores):
    """Weights of a tile's keys in base 2, the factor of all before, and the new maximum and total.

    Rows without a visible key so far keep maximum -inf.
    """
    new = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(maximum - shift)
    return weights, rescale, new, total * rescale + tl.sum(weights, 1)


@triton.jit
def _update(acc, maximum, total, scores, v, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """One step of the online softmax in base 2."""
    weights, rescale, maximum, total = _weights(maximum, total, scores)
    acc = _dot(weights.to(v.dtype), v, acc * rescale[:, None], PRECISION, WIDEN)
    return acc, maximum, total


@triton.jit(do_not_specialize=["tiles", "splits", "window", "words"])
def _attend(
    query,
    key,
    value,
    block_table,
    query_start,
    tree_start,
    prefix_len,
    ancestors,
    depth,
    query_depth,
    sinks,
    k_scale,
    v_scale,
    output,  # the partial results [rows, heads, splits, head_dim] unless DIRECT
    lse,  # the partial ones [rows, heads, splits] in base 2 unless DIRECT
    scale,
    soft_cap,
    window,
    tiles,
    splits,
    words,
    query_stride_row,
    query_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    key_stride_dim,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    value_stride_dim,
    table_stride,
    ancestors_stride,
    output_stride_row,
    output_stride_head,
    k_scale_stride,
    v_scale_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (row tile of a split, KV head, request): the tile's rows over the split's keys."""
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    kv_head = tl.program_id(1)
    request = tl.program_id(2)

    first_row, rows, prefix, keys = _extent(query_start, tree_start, prefix_len, request)
    if tile * BLOCK_ROWS >= rows * GROUP:
        return
    first = _first_key(prefix, keys, rows, window, HAS_WINDOW, CAUSAL, BLOCK_KEYS)
    span = _tiles_per_split(first, keys, splits, BLOCK_KEYS) * BLOCK_KEYS
    start = first + split * span
    if (split > 0) & (start >= keys):
        return
    end = tl.minimum(start + span, keys)

    packed = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = packed // GROUP
    live = node < rows
    row = (first_row + node).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    in_head = dim < HEAD_DIM
    q = tl.load(
        query + (row * query_stride_row + head * query_stride_head)[:, None] + dim[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )

    # Keys before all_seen are visible to every row of the tile, keys from end on to none.
    if CAUSAL:
        before = keys - rows  # row i sees keys up to before + i
        end = tl.minimum(end, before + tl.minimum((tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, rows - 1) + 1)
        all_seen = before + tile * BLOCK_ROWS // GROUP + 1
        position = before + node
    else:
        all_seen = prefix
        position = prefix + tl.zeros([BLOCK_ROWS], tl.int32)
        if HAS_WINDOW:
            position += tl.load(query_depth + row, mask=live, other=0)
    all_seen_end = tl.maximum(start, tl.minimum(end, all_seen) // BLOCK_KEYS * BLOCK_KEYS)
    if HAS_WINDOW:
        all_seen_end = start

    score_scale = scale
    if HAS_K_SCALE:
        score_scale = score_scale * tl.load(k_scale + kv_head * k_scale_stride)
    if not HAS_CAP:
        score_scale = score_scale * LOG2_E

    table = block_table + request.to(tl.int64) * table_stride
    key_head = key + kv_head.to(tl.int64) * key_stride_head + dim.to(tl.int64)[None, :] * key_stride_dim
    value_head = value + kv_head.to(tl.int64) * value_stride_head + dim.to(tl.int64)[None, :] * value_stride_dim
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    no_scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)

    for at in range(start, all_seen_end, BLOCK_KEYS):
        index = at + tl.arange(0, BLOCK_KEYS)
        block = tl.load(table + index // BLOCK_SIZE).to(tl.int64)
        offset = (index % BLOCK_SIZE).to(tl.int64)
        k_at = key_head + (block * key_stride_block + offset * key_stride_slot)[:, None]
        v_at = value_head + (block * value_stride_block + offset * value_stride_slot)[:, None]
        k = tl.load(k_at, mask=in_head[None, :], other=0.0).to(q.dtype)
        v = tl.load(v_at, mask=in_head[None, :], other=0.0).to(q.dtype)
        scores = _dot(q, tl.trans(k), no_scores, PRECISION, WIDEN) * score_scale
        if HAS_CAP:
            scores = _capped(scores, soft_cap) * LOG2_E
        acc, maximum, total = _update(acc, maximum, total, scores, v, PRECISION, WIDEN)

    # A few tiles only: not pipelined, which leaves registers and shared memory to the loop above.
    for at in tl.range(all_seen_end, end, BLOCK_KEYS, num_stages=1):
        index = at + tl.arange(0, BLOCK_KEYS)
        slot = index - prefix
        if CAUSAL:
            visible = index[None, :] <= position[:, None]
            key_position = index
        else:
            bits = _tree_bits(ancestors, row, live, slot, at - prefix, ancestors_stride, words, BLOCK_KEYS)
            visible = (slot < 0)[None, :] | bits
            key_position = index
            if HAS_WINDOW:
                in_tree = (slot >= 0) & (index < end)
                levels = tl.load(depth + tl.load(tree_start + request).to(tl.int64) + slot, mask=in_tree, other=0)
                key_position = tl.where(slot < 0, index, prefix + levels)
        if HAS_WINDOW:
            visible = visible & (position[:, None] - key_position[None, :] < window)
        visible = visible & live[:, None] & (index < end)[None, :]
        # What no row sees is not read, so that 0 * NaN cannot arise in the second product.
        used = tl.max(visible.to(tl.int32), 0) > 0
        block = tl.load(table + index // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
        offset = (index % BLOCK_SIZE).to(tl.int64)
        k_at = key_head + (block * key_stride_block + offset * key_stride_slot)[:, None]
        v_at = value_head + (block * value_stride_block + offset * value_stride_slot)[:, None]
        read = used[:, None] & in_head[None, :]
        k = tl.load(k_at, mask=read, other=0.0).to(q.dtype)
        v = tl.load(v_at, mask=read, other=0.0).to(q.dtype)
        scores = _dot(q, tl.trans(k), no_scores, PRECISION, WIDEN) * score_scale
        if HAS_CAP:
            scores = _capped(scores, soft_cap) * LOG2_E
        scores = tl.where(visible, scores, float("-inf"))
        acc, maximum, total = _update(acc, maximum, total, scores, v, PRECISION, WIDEN)

    if DIRECT and HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
        new = tl.maximum(maximum, sink)
        total = total * tl.exp2(maximum - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(maximum - new)[:, None]
        maximum = new
    factor = tl.where(total > 0, 1.0 / total, 0.0)
    if HAS_V_SCALE:
        factor = factor * tl.load(v_scale + kv_head * v_scale_stride)
    result = acc * factor[:, None]
    log_total = maximum + tl.log2(total)
    write = live[:, None] & in_head[None, :]
    if DIRECT:
        out_at = output + (row * output_stride_row + head * output_stride_head)[:, None] + dim[None, :]
        tl.store(out_at, result.to(output.dtype.element_ty), mask=write)
        if HAS_LSE:
            tl.store(lse + row * HEADS + head, log_total * LN_2, mask=live)
    else:
        part = (row * HEADS + head) * splits + split
        tl.store(output + (part * HEAD_DIM)[:, None] + dim[None, :], result, mask=write)
        tl.store(lse + part, log_total, mask=live)


@triton.jit(do_not_specialize=["splits", "window"])
def _merge_splits(
    partial,
    partial_lse,
    query_start,
    tree_start,
    prefix_len,
    sinks,
    output,
    lse,
    splits,
    window,
    output_stride_row,
    output_stride_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Program (row of a request and head, request): weighs the splits' results by their sums."""
    node = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    request = tl.program_id(1)
    first_row, rows, prefix, keys = _extent(query_start, tree_start, prefix_len, request)
    if node >= rows:
        return
    first = _first_key(prefix, keys, rows, window, HAS_WINDOW, CAUSAL, BLOCK_KEYS)
    span = _tiles_per_split(first, keys, splits, BLOCK_KEYS) * BLOCK_KEYS
    live = tl.maximum(tl.cdiv(keys - first, span), 1)  # later splits wrote nothing

    row = (first_row + node).to(tl.int64)
    part = (row * HEADS + head) * splits
    every = tl.arange(0, BLOCK_SPLITS)
    log_totals = tl.load(partial_lse + part + every, mask=every < live, other=float("-inf"))
    maximum = tl.max(log_totals, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        maximum = tl.maximum(maximum, sink)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp2(log_totals - shift), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)

    dim = tl.arange(0, BLOCK_DIM)
    in_head = dim < HEAD_DIM
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for at in range(0, live, CHUNK):
        split = at + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(partial_lse + part + split, mask=split < live, other=float("-inf")) - shift)
        results = tl.load(
            partial + ((part + split) * HEAD_DIM)[:, None] + dim[None, :],
            mask=(split < live)[:, None] & in_head[None, :],
            other=0.0,
        )
        acc += tl.sum(results * weight[:, None], 0)
    result = acc * tl.where(total > 0, 1.0 / total, 0.0)
    out_at = output + row * output_stride_row + head * output_stride_head + dim
    tl.store(out_at, result.to(output.dtype.element_ty), mask=in_head)
    if HAS_LSE:
        tl.store(lse + row * HEADS + head, (maximum + tl.log2(total)) * LN_2)


def workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """float32 elements that a call with so many splits works in; 0 without a second stage."""
    return 0 if splits == 1 else rows * heads * splits * (head_dim + 1)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    max_keys: int,
    scale: float,
    ancestors: torch.Tensor | None = None,
    tree_start: torch.Tensor | None = None,
    depth: torch.Tensor | None = None,
    query_depth: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of all tree rows; tensors as in the contract above, all on one device. Returns output.

    max_rows, max_keys: upper bounds of the query rows and of the keys of one request, known on the host.
    window, soft_cap: 0 = none. output, workspace: allocated when missing; lse: written when given. No host sync.
    Raises ValueError that names the tensor or option at fault.
    """
    plan = plan or plan_for(query, key, block_table, max_rows, max_keys)
    _check(query, key, value, block_table, query_start, prefix_len, ancestors, sinks, lse)
    query_depth = _window_depths(window, ancestors, tree_start, depth, query_depth)
    rows, heads, head_dim = query.shape
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if output.shape != query.shape or output.dtype != query.dtype or output.stride(2) != 1:
        raise ValueError(f"output: {tuple(output.shape)} {output.dtype} must be like query, contiguous in head_dim")
    requests, kv_heads = block_table.shape[0], key.shape[2]
    if not rows or not requests or not max_rows:
        return output
    tree_start = query_start if tree_start is None else tree_start
    direct = plan.splits == 1
    partial, partial_lse = (output, lse) if direct else _partials(output, workspace, plan.splits)
    tiles = triton.cdiv(max_rows * (heads // kv_heads), plan.block_rows)
    _attend[(tiles * plan.splits, kv_heads, requests)](
        query,
        key,
        value,
        block_table,
        query_start,
        tree_start,
        prefix_len,
        ancestors,
        depth,
        query_depth,
        sinks,
        k_scale,
        v_scale,
        partial,
        partial_lse,
        scale,
        soft_cap,
        window,
        tiles,
        plan.splits,
        ancestors.shape[1] if ancestors is not None else 0,
        query.stride(0),
        query.stride(1),
        *key.stride(),
        *value.stride(),
        block_table.stride(0),
        ancestors.stride(0) if ancestors is not None else 0,
        output.stride(0),
        output.stride(1),
        _head_stride("k_scale", k_scale, kv_heads),
        _head_stride("v_scale", v_scale, kv_heads),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key.shape[1],
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KEYS=plan.block_keys,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        CAUSAL=ancestors is None,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        HAS_SINKS=sinks is not None,
        HAS_K_SCALE=k_scale is not None,
        HAS_V_SCALE=v_scale is not None,
        HAS_LSE=lse is not None,
        DIRECT=direct,
        PRECISION=_precision(query),
        # The interpreter multiplies the bit patterns of bfloat16; the products of widened numbers are the same.
        WIDEN=query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if not direct:
        chain = ancestors is None
        _merge(
            partial, partial_lse, query_start, tree_start, prefix_len, output, lse, max_rows, plan, chain, sinks, window
        )
    return output


def _merge(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    query_start: torch.Tensor,
    tree_start: torch.Tensor,
    prefix_len: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    max_rows: int,
    plan: AttentionPlan,
    causal: bool,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> None:
    """Second stage: the splits' results [rows, heads, splits, head_dim] and sums, weighed into output and lse."""
    _, heads, head_dim = output.shape
    _merge_splits[(max_rows * heads, prefix_len.numel())](
        partial,
        partial_lse,
        query_start,
        tree_start,
        prefix_len,
        sinks,
        output,
        lse,
        plan.splits,
        window,
        output.stride(0),
        output.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_KEYS=plan.block_keys,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SPLITS=plan.splits,
        CHUNK=min(plan.splits, 16),
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=4,
    )


def plan_for(
    query: torch.Tensor, key: torch.Tensor, block_table: torch.Tensor, max_rows: int, max_keys: int
) -> AttentionPlan:
    """The table's plan for tensors of these shapes, dtypes and device; ask it to size a workspace."""
    _, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    size = max(key.element_size(), query.element_size())
    name = tuning.architecture(query.device)
    return tuning.attention_plan(
        name, block_table.shape[0], kv_heads, heads // kv_heads, head_dim, max_rows, max_keys, size
    )


def _check(query, key, value, block_table, query_start, prefix_len, ancestors, sinks, lse) -> None:
    """Raise ValueError for shapes, dtypes and layouts that the kernel does not take. Looks at no contents."""
    rows, heads, head_dim = query.shape
    if query.stride(2) != 1 or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query: {query.dtype} must be fp16, bf16 or fp32 and contiguous in head_dim")
    for name, cache in (("key", key), ("value", value)):
        if cache.dim() != 4 or cache.shape != key.shape or cache.shape[3] != head_dim or heads % cache.shape[2]:
            raise ValueError(
                f"{name}: {tuple(cache.shape)} must be [blocks, block_size, kv_heads, {head_dim}] with kv_heads"
                f" dividing {heads}; 5-dimensional key layouts are not taken, latent (MLA) ones by mla_attention"
            )
        if cache.dtype != query.dtype and cache.dtype not in FP8:
            raise ValueError(f"{name}: {cache.dtype} must be {query.dtype} as query, float8_e4m3fn or float8_e5m2")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,) or sinks.stride(0) != 1):
        raise ValueError(f"sinks: {tuple(sinks.shape)} {sinks.dtype} must be [{heads}] float32, contiguous")
    _check_requests(rows, heads, block_table, query_start, prefix_len, ancestors, lse)


def _check_requests(rows, heads, block_table, query_start, prefix_len, ancestors, lse) -> None:
    """What does not depend on the cache's layout: raise ValueError for the integers, the bits and lse."""
    requests = block_table.shape[0]
    integers = {"block_table": block_table, "query_start": query_start, "prefix_len": prefix_len}
    for name, tensor in integers.items():
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: {tensor.dtype} must be int32 and contiguous in its last dimension")
    if query_start.numel() != requests + 1 or prefix_len.numel() != requests:
        raise ValueError(f"query_start, prefix_len: must have {requests + 1} and {requests} elements, as block_table")
    if ancestors is not None and (ancestors.dtype != torch.int64 or ancestors.dim() != 2 or len(ancestors) < rows):
        raise ValueError(f"ancestors: {tuple(ancestors.shape)} {ancestors.dtype} must be [{rows}, words] int64")
    if ancestors is not None and ancestors.stride(1) != 1:
        raise ValueError("ancestors: must be contiguous in its last dimension")
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != (rows, heads) or not lse.is_contiguous()):
        raise ValueError(f"lse: {tuple(lse.shape)} {lse.dtype} must be [{rows}, {heads}] float32, contiguous")


def _window_depths(window, ancestors, tree_start, depth, query_depth) -> torch.Tensor | None:
    """query_depth, or depth where the rows are the tree slots. ValueError when a windowed tree lacks them."""
    if window < 0:
        raise ValueError(f"window: {window} must be at least 1, or 0 for none")
    if query_depth is None and tree_start is None:
        query_depth = depth
    if window and ancestors is not None and (depth is None or query_depth is None):
        raise ValueError("window: needs depth, and query_depth where tree_start is given: it is measured in positions")
    return query_depth


def _precision(query: torch.Tensor) -> str:
    """How tensor cores multiply: NVIDIA's take fp32 as three TF32 products (2^-21), else the registers spill.

    Without meaning for 16-bit numbers, but gfx90a's compiler refuses the word tf32 for them too.
    """
    if triton.knobs.runtime.interpret or torch.version.hip:
        return "ieee"
    return "tf32x3" if query.dtype == torch.float32 else "tf32"


def _partials(output: torch.Tensor, workspace: torch.Tensor | None, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as partial results and their sums. ValueError when it is too small."""
    rows, heads, head_dim = output.shape
    size = workspace_size(rows, heads, head_dim, splits)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=output.device)
    if workspace.dtype != torch.float32 or workspace.numel() < size or not workspace.is_contiguous():
        raise ValueError(f"workspace: {workspace.numel()} {workspace.dtype} must be {size} float32, contiguous")
    results = rows * heads * splits * head_dim
    flat = workspace.view(-1)
    return flat[:results], flat[results:size]


def _head_stride(name: str, scale: torch.Tensor | None, kv_heads: int) -> int:
    """Distance between the heads' scales: 0 for one scale. ValueError for any other shape."""
    if scale is None:
        return 0
    if scale.dtype != torch.float32 or scale.numel() not in (1, kv_heads):
        raise ValueError(f"{name}: {tuple(scale.shape)} {scale.dtype} must be 1 or {kv_heads} float32")
    return 0 if scale.numel() == 1 else scale.stride(-1)
