# SPDX-License-Identifier: Apache-2.0
"""Tree attention, one request at a time, in float64: a softmax over the keys that each row sees."""

from __future__ import annotations

import torch

WORD_BITS = 64


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
    plan: object = None,
) -> torch.Tensor:
    """Tensors as in the kernel's contract. Returns output [rows, heads, head_dim], float64 where it is allocated here.

    lse may be float64 too. max_rows, max_keys, workspace and plan are the kernel's and not looked at.
    """
    tree_start = query_start if tree_start is None else tree_start
    query_depth = depth if query_depth is None else query_depth
    if output is None:
        output = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for request, prefix in enumerate(prefix_len.tolist()):
        first, end = query_start[request : request + 2].tolist()
        tree = slice(*tree_start[request : request + 2].tolist())
        if first == end:
            continue
        rows = slice(first, end)
        see = _visible(rows, prefix, tree, ancestors, depth, query_depth, window, query.device)
        k = _gathered(key, block_table[request], see.any(0), k_scale)
        v = _gathered(value, block_table[request], see.any(0), v_scale)
        kv_heads = key.shape[2]
        q = query[rows].double().unflatten(1, (kv_heads, -1))  # [rows, kv_heads, group, head_dim]
        scores = torch.einsum("rhgd,khd->rhgk", q, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~see[:, None, None], -torch.inf).flatten(1, 2)
        if sinks is not None:
            sink = sinks.double()[None, :, None].expand(len(scores), -1, 1)
            scores = torch.cat([scores, sink], dim=2)
        total = scores.logsumexp(2)
        weights = torch.exp(scores - total[..., None]).masked_fill(total[..., None] == -torch.inf, 0)
        weights = weights[..., : len(k)].unflatten(1, (kv_heads, -1))
        output[rows] = torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2).to(output.dtype)
        if lse is not None:
            lse[rows] = total.to(lse.dtype)
    return output


def _visible(
    rows: slice,
    prefix: int,
    tree: slice,
    ancestors: torch.Tensor | None,
    depth: torch.Tensor | None,
    query_depth: torch.Tensor | None,
    window: int,
    device: torch.device,
) -> torch.Tensor:
    """Which keys each row of one request sees: [rows, keys] bool."""
    count, slots = rows.stop - rows.start, tree.stop - tree.start
    key_position = torch.arange(prefix + slots, device=device)
    if ancestors is None:  # the last rows of a chain
        position = key_position[prefix + slots - count :]
        see = key_position <= position[:, None]
    else:
        slot = torch.arange(slots, device=device)
        bits = (ancestors[rows][:, slot // WORD_BITS] >> (slot % WORD_BITS)) & 1
        see = torch.cat([torch.ones(count, prefix, dtype=torch.bool, device=device), bits.bool()], dim=1)
        if window:
            position = prefix + query_depth[rows]
            key_position = torch.cat([key_position[:prefix], prefix + depth[tree]])
    if window:
        see = see & (position[:, None] - key_position < window)
    return see


def _gathered(
    cache: torch.Tensor, blocks: torch.Tensor, used: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """K or V of one request [keys, kv_heads, head_dim] float64; 0 where no row looks, whatever stands there."""
    index = torch.arange(len(used), device=used.device)
    size = cache.shape[1]
    found = cache[blocks[index // size].long(), index % size].double()
    if scale is not None:
        found = found * scale.double().view(-1, 1)
    return found.masked_fill(~used[:, None, None], 0)
