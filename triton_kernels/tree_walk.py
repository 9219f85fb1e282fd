# SPDX-License-Identifier: Apache-2.0
"""The walk along tokens that were chosen already: all requests in one launch, whatever their trees look like.

In    chosen       [rows] int64                    the LLM's token at each row; a negative one ends the walk there
      tokens       [rows] int32 or int64           token at the row; negative at placeholders, which nothing matches
      parent       [rows] int32                    index within the request, -1 at the root; a parent stands before its
                                                   children; siblings carry different tokens
      start        [requests + 1] int32            rows of request r: start[r]:start[r+1], may be none
Out   tokens       [requests, max_depth + 1] int64 emitted tokens, -1 behind the last
      rows         [requests, max_depth + 1] int64 row whose token it is: the root, then the accepted nodes; -1 behind
      num_tokens   [requests] int32                accepted nodes + 1; 0 for a request without rows

Descends from each root while a child carries the token that was chosen at its parent. Where every row's token is the
one that plain decoding would draw at that position, the output is plain decoding's, token for token: so the V2 runner
lets vLLM's own sampler choose, whose noise is keyed by position, and walks.

A program walks one request: a visited node costs one read of the request's tokens and parents. Products of rows and
strides are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels.tree_verify import CHILDREN, Walk, check_list, child_of


# tokens and parent are views that begin where a step has its rows: no code is made anew for that.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["tokens", "parent"])
def _walk(
    chosen, tokens, parent, start, out_tokens, out_rows, num_tokens, width,
    BLOCK_CHILDREN: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(start + request)
    rows = tl.load(start + request + 1) - first
    count = rows * 0
    node = tl.where(rows > 0, 0, -1)
    while (node >= 0) & (count < width):
        row = (first + node).to(tl.int64)
        token = tl.load(chosen + row)
        tl.store(out_tokens + request * width + count, token)
        tl.store(out_rows + request * width + count, row)
        count += 1
        child = child_of(tokens, parent, first, rows, node, token, BLOCK_CHILDREN)
        # A child stands behind its parent: a link that does not rise would never end. No placeholder matches.
        node = tl.where((child > node) & (token >= 0), child, -1)
    tl.store(num_tokens + request, count)
    column = tl.arange(0, BLOCK_WIDTH)
    behind = (column >= count) & (column < width)
    none = tl.full([BLOCK_WIDTH], -1, tl.int64)
    tl.store(out_tokens + request * width + column, none, mask=behind)
    tl.store(out_rows + request * width + column, none, mask=behind)


def walk(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
) -> Walk:
    """Walk every tree; tensors as in the contract above, all on one device. No host sync.

    max_depth: depth of the deepest node, known on the host. out: allocated when missing.
    Raises ValueError that names the tensor or option at fault.
    """
    rows, requests = len(tokens), len(start) - 1
    if max_depth < 0:
        raise ValueError(f"max_depth: {max_depth} must be at least 0")
    check_list("chosen", chosen, torch.int64, rows)
    check_list("tokens", tokens, None, rows)
    check_list("parent", parent, torch.int32, rows)
    check_list("start", start, torch.int32, requests + 1)
    width = max_depth + 1
    out = out or Walk.empty(requests, width, tokens.device)
    out.check(requests, width)
    if requests:
        _walk[(requests,)](
            chosen,
            tokens,
            parent,
            start,
            out.tokens,
            out.rows,
            out.num_tokens,
            width,
            BLOCK_CHILDREN=CHILDREN,
            BLOCK_WIDTH=triton.next_power_of_2(width),
            num_warps=1,
        )
    return out
