# SPDX-License-Identifier: Apache-2.0
"""A step's counters, added to sums that stay on the device: one launch, with trees or without.

In    emitted      [requests] int32                tokens that each request got, 0 while its prompt is not done
Of a step with trees also
      path         [requests, width] int64         rows of the walk (Walk.rows): the root, then the accepted nodes; -1
                                                   behind
      start        [requests + 1] int32            rows of request r: start[r]:start[r+1], may be none; the first is the
                                                   root
      tokens       [rows] int32                    token of the node at the row; negative = none, as at roots. A tree's
                                                   first node stands right behind its root
      owner        [rows] int32                    bit p: proposer p drew the node; 0 where there is none
In/out  sums       [SUMS] int64                    named in SUMS, each explained in specinfer_vllm/metrics.py; `steps`
                                                   rises by one if any request got a token
        owned      [2, proposers] int64            nodes that carry a draw of each proposer: verified, accepted

Not read: rows outside the requests'; columns of a path behind its requests; bits of `owner` past the proposers.
Undefined: a path that leaves its request's rows. Sums wrap at 2^63.

A program counts one request's tree, and the first one also what all requests got. Additions are atomic and of whole
numbers: their order does not show. Products of rows and strides are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels.tree_verify import check_list

SUMS = ("steps", "request_steps", "tokens", "drafted_steps", "nodes", "accepted", "moved")
MAX_OWNERS = 31  # bits of an int32 that is not negative
BLOCK = 64  # rows that a program looks at at a time


@dataclass(frozen=True)
class CountedTrees:
    """What a step did with its trees, as in the contract."""

    path: torch.Tensor
    start: torch.Tensor
    tokens: torch.Tensor
    owner: torch.Tensor


@triton.jit
def _of_each(owner, bit):
    """How many of the rows carry each bit: owner [BLOCK], bit [OWNERS]."""
    return tl.sum((owner[:, None] >> bit[None, :]) & 1, 0)


# Views of one tensor: where they begin depends on how many rows a step has, and no code shall be made for that.
@triton.jit(
    do_not_specialize=["requests", "width", "owners"],
    do_not_specialize_on_alignment=["emitted", "path", "start", "tokens", "owner"],
)
def _count(
    sums, owned, emitted, path, start, tokens, owner, requests, width, owners,
    OWNERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request); path None = no trees."""
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if request == 0:
        sampled = tl.zeros([BLOCK], tl.int64)
        received = tl.zeros([BLOCK], tl.int64)
        for first in range(0, requests, BLOCK):
            each = tl.load(emitted + first + lane, mask=first + lane < requests, other=0)
            sampled += (each > 0).to(tl.int64)
            received += each
        total = tl.sum(sampled, 0)
        tl.atomic_add(sums, tl.minimum(total, 1), sem="relaxed")
        tl.atomic_add(sums + 1, total, sem="relaxed")
        tl.atomic_add(sums + 2, tl.sum(received, 0), sem="relaxed")
    if path is not None:
        root = tl.load(start + request).to(tl.int64)
        rows = (tl.load(start + request + 1) - root).to(tl.int32)
        bit = tl.arange(0, OWNERS)
        nodes = tl.zeros([BLOCK], tl.int64)
        verified = tl.zeros([OWNERS], tl.int64)
        for first in range(0, rows, BLOCK):
            inside = first + lane < rows
            nodes += (tl.load(tokens + root + first + lane, mask=inside, other=-1) >= 0).to(tl.int64)
            verified += _of_each(tl.load(owner + root + first + lane, mask=inside, other=0), bit)
        accepted = tl.zeros([BLOCK], tl.int64)
        moved = tl.zeros([BLOCK], tl.int64)
        kept = tl.zeros([OWNERS], tl.int64)
        for first in range(0, width, BLOCK):
            level = first + lane
            row = tl.load(path + request * width + level, mask=level < width, other=-1)
            accepted += (row > root).to(tl.int64)
            moved += (row > root + level).to(tl.int64)
            kept += _of_each(tl.load(owner + row, mask=row >= 0, other=0), bit)
        drafted = (tl.load(tokens + root + 1, mask=rows > 1, other=-1) >= 0).to(tl.int64)
        tl.atomic_add(sums + 3, drafted, sem="relaxed")
        tl.atomic_add(sums + 4, tl.sum(nodes, 0), sem="relaxed")
        tl.atomic_add(sums + 5, tl.sum(accepted, 0), sem="relaxed")
        tl.atomic_add(sums + 6, tl.sum(moved, 0), sem="relaxed")
        tl.atomic_add(owned + bit, verified, mask=bit < owners, sem="relaxed")
        tl.atomic_add(owned + owners + bit, kept, mask=bit < owners, sem="relaxed")


def count(sums: torch.Tensor, owned: torch.Tensor, emitted: torch.Tensor, trees: CountedTrees | None = None) -> None:
    """Add a step to `sums` and `owned`; tensors as in the contract above, all on one device. No host sync.

    trees: None for a step without any. Raises ValueError that names the tensor at fault.
    """
    requests = len(emitted)
    _check_sums(sums, owned)
    check_list("emitted", emitted, torch.int32, requests)
    given = (None, None, None, None)
    width = 0
    if trees is not None:
        _check_trees(trees, requests)
        given = trees.path, trees.start, trees.tokens, trees.owner
        width = trees.path.shape[1]
    if requests:
        owners = owned.shape[1]
        _count[(1 if trees is None else requests,)](
            sums,
            owned,
            emitted,
            *given,
            requests,
            width,
            owners,
            OWNERS=triton.next_power_of_2(max(owners, 1)),
            BLOCK=BLOCK,
            num_warps=1,
        )


def _check_sums(sums: torch.Tensor, owned: torch.Tensor) -> None:
    if sums.shape != (len(SUMS),) or sums.dtype != torch.int64 or not sums.is_contiguous():
        raise ValueError(f"sums: {tuple(sums.shape)} {sums.dtype} must be [{len(SUMS)}] int64")
    if owned.dim() != 2 or len(owned) != 2 or owned.dtype != torch.int64 or not owned.is_contiguous():
        raise ValueError(f"owned: {tuple(owned.shape)} {owned.dtype} must be [2, proposers] int64")
    if owned.shape[1] > MAX_OWNERS:
        raise ValueError(f"owned: {owned.shape[1]} proposers, at most {MAX_OWNERS} have a bit in `owner`")


def _check_trees(trees: CountedTrees, requests: int) -> None:
    path = trees.path
    if path.dim() != 2 or len(path) != requests or path.dtype != torch.int64 or not path.is_contiguous():
        raise ValueError(f"path: {tuple(path.shape)} {path.dtype} must be [{requests}, width] int64")
    check_list("start", trees.start, torch.int32, requests + 1)
    check_list("tokens", trees.tokens, torch.int32, 0)
    check_list("owner", trees.owner, torch.int32, len(trees.tokens))
