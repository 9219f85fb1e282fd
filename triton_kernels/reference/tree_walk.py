# SPDX-License-Identifier: Apache-2.0
"""The walk along chosen tokens, one request and one node at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from specinfer_vllm.triton_kernels.tree_verify import Walk


def walk(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
) -> Walk:
    """Tensors as in the kernel's contract."""
    requests, width = len(start) - 1, max_depth + 1
    out = out or Walk.empty(requests, width, tokens.device)
    for request, (first, end) in enumerate(pairwise(start.tolist())):
        links = zip(parent[first:end].tolist(), tokens[first:end].tolist(), strict=True)
        child = {(above, token): node for node, (above, token) in enumerate(links) if 0 <= above < node and token >= 0}
        emitted, rows = [], []
        node = 0 if first < end else None
        while node is not None and len(emitted) < width:
            rows.append(first + node)
            emitted.append(int(chosen[first + node]))
            node = child.get((node, emitted[-1]))
        for column, values in ((out.tokens, emitted), (out.rows, rows)):
            column[request] = torch.tensor(values + [-1] * (width - len(values)))
        out.num_tokens[request] = len(emitted)
    return out
