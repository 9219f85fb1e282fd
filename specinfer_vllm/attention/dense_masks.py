# SPDX-License-Identifier: Apache-2.0
"""Tree attention in plain torch: a dense masked softmax in float32, request by request, on any device. Host-free."""

from __future__ import annotations

import torch

from specinfer_vllm.attention.tree_call import TreeCall


def attend(call: TreeCall) -> None:
    """Write call.output."""
    _, kv_heads, _ = call.heads
    for keys in call.seen():
        query = call.query[keys.rows].float().unflatten(1, (kv_heads, -1))  # [rows, kv_heads, group, head_dim]
        scores = torch.einsum("rhgd,khd->rhgk", query, scaled(keys.read(call.key), call.k_scale)) * call.scale
        if call.soft_cap:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        scores = scores.masked_fill(~keys.see[:, None, None], -torch.inf).flatten(1, 2)
        weights = softmax(scores, call.sinks).unflatten(1, (kv_heads, -1))
        result = torch.einsum("rhgk,khd->rhgd", weights, scaled(keys.read(call.value), call.v_scale))
        call.output[keys.rows] = result.flatten(1, 2).to(call.output.dtype)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of the keys [rows, heads, keys], 0 in a row that sees none; sinks [heads] are logits without a key."""
    total = scores.logsumexp(2, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks[None, :, None])
    return torch.exp(scores - total).masked_fill(total == -torch.inf, 0)


def scaled(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """K or V [keys, kv_heads, head_dim] float32; scale [1] or [kv_heads]."""
    return stored.float() if scale is None else stored.float() * scale.view(-1, 1)
