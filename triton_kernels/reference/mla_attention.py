# SPDX-License-Identifier: Apache-2.0
"""Tree attention over latents: one KV head, whose key is the row and whose value is the row's beginning."""

from __future__ import annotations

import torch

from specinfer_vllm.triton_kernels.reference.tree_attention import tree_attention


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
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tensors as in the kernel's contract. Returns output [rows, heads, latent_dim] float64; lse may be float64 too."""
    row = cache[:, :, None]
    attended = tree_attention(
        query,
        row,
        row,
        block_table,
        query_start,
        prefix_len,
        max_rows=max_rows,
        max_keys=max_keys,
        scale=scale,
        ancestors=ancestors,
        tree_start=tree_start,
        k_scale=cache_scale,
        v_scale=cache_scale,
        lse=lse,
    )
    return attended[..., :latent_dim]
