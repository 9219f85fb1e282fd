# SPDX-License-Identifier: Apache-2.0
"""Tree attention through xFormers: K/V gathered per request, the tree as a dense additive bias. Host-free.

memory_efficient_attention_forward takes [batch, rows, heads, head_dim] and adds attn_bias [batch, heads, rows, keys] to
the scaled scores; of its kernels only CUTLASS's takes any bias. It knows no groups of heads there: the query heads of a
KV head stand as further rows, which see the same keys. Read in xFormers 0.0.35.
"""

from __future__ import annotations

import torch

from specinfer_vllm.attention.tree_call import SeenKeys, TreeCall

ALIGNED = 8  # numbers: a bias' rows must begin at multiples of 16 bytes, or of 8 numbers


def attend(call: TreeCall) -> None:
    """Write call.output."""
    from xformers.ops import memory_efficient_attention_forward

    _, kv_heads, _ = call.heads
    name = "xformers", call.window, call.block_size, call.heads, call.query.dtype
    biases = call.once(name, lambda: [bias(call, keys) for keys in call.seen()])
    for keys, added in zip(call.seen(), biases, strict=True):
        query = call.query[keys.rows].unflatten(1, (kv_heads, -1)).transpose(1, 2)  # [rows, group, kv_heads, head_dim]
        result = memory_efficient_attention_forward(
            query.flatten(0, 1)[None],
            keys.read(call.key)[None],
            keys.read(call.value)[None],
            attn_bias=added,
            scale=call.scale,
        )
        call.output[keys.rows] = result.reshape(query.shape).transpose(1, 2).flatten(1, 2)


def bias(call: TreeCall, keys: SeenKeys) -> torch.Tensor:
    """0 where visible and -inf elsewhere, [1, kv_heads, rows * group, keys] of the query's dtype."""
    heads, kv_heads, _ = call.heads
    see = keys.see.repeat_interleave(heads // kv_heads, dim=0)
    rows, count = see.shape
    room = torch.zeros(rows, -(-count // ALIGNED) * ALIGNED, dtype=call.query.dtype, device=see.device)
    return room[:, :count].masked_fill_(~see, -torch.inf).expand(1, kv_heads, rows, count)
