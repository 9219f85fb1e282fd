# SPDX-License-Identifier: Apache-2.0
"""Token recycling on the device: best-first trees out of a request's own text and the LLM's successors seen there.

In    history      [slots, max_len] int32          committed tokens of each slot; row stride free
      length       [slots] int32                   how many of them there are; the last one is the tree's root
      slot         [requests] int64                whose tree request r gets
      place        [slots, ring] int32             sequence index that a row of successors belongs to, -1 = none; the
                                                   row of index i stands at i % ring
      successors   [slots, ring, width] int32      the LLM's likeliest tokens behind that index, best first, -1 = none
      chances      [slots, ring, width] float32    their probabilities
      branches     [slots] int32                   most children per node; 0 = no tree
      last         [slots] int32                   sequence length at which the request ends: no node is deeper
Out   tokens       [requests, nodes] int32         best node first, -1 behind the last
      parent       [requests, nodes] int32         0 = root, node i counts as i + 1; a parent stands before its children
      score        [requests, nodes] float32       log of the estimated chance that the path is accepted; -inf behind
      depth        [requests, nodes] int32         1 below the root
      path         [requests, nodes] int64         a number made of the tokens from the root to the node
Behind the last node parent and path are 0 and depth is 1.

At a node every earlier place of the text (the last WINDOW tokens) is looked at whose token is the node's; the one with
the longest equal context, up to CONTEXT tokens, and of these the latest, says what comes next: its row of successors,
or, where none was recorded, the text's own next token. A child's chance is its probability there times TRUST of the
context's length. The node with the highest chance of its path is taken, of equal ones the child of the earlier node and
then the better ranked, then the next (Token Recycling, arXiv 2408.08696, keeps one row per token; a row per place lets
the longer context win). A child without a token, or whose path's chance is below e^LEAST, is not taken.

Undefined: slots past the tensors' first size; equal tokens within one row of successors. Not read: tokens behind
`length` and more than WINDOW + CONTEXT in front of it, successors and chances whose place is another.

A program grows one tree: `nodes` passes over the window, which stays in registers, as do the candidates: no scratch, no
barrier but the reductions' own. Per node the reads depend on one another twice: its place, then its row. Products of
slots and strides are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WINDOW = 1024
CONTEXT = 4
# What a row's probabilities count, by equal tokens of context. Between the results of coordinate searches on 60
# recorded greedy chats of SmolLM2-135M-Instruct (bench/recording.py, 128 tokens each), replayed with this kernel's
# reference: 1.480, 1.580, 1.624 tokens per LLM step at 4, 8, 16 nodes, where the guess 0.5, 0.65, 0.8, 0.9 gave 1.471,
# 1.571, 1.618 and propose/recycling.py gives 1.604 at 8. Fitted on one half of the chats it gains 0.2 to 0.3% on the
# other. Counted apart, rows and text are right with 0.54 and 0.16 of their probability at one token, 1.08 and 0.85 at
# four: two tables gained nothing more.
TRUST = (0.3, 0.5, 0.6, 0.85)
LEAST = tl.constexpr(-6.9)  # paths below a chance of 1e-3 are not worth a node
DTYPES = {
    "tokens": torch.int32,
    "parent": torch.int32,
    "score": torch.float32,
    "depth": torch.int32,
    "path": torch.int64,
}


@dataclass(frozen=True)
class Grown:
    """What recycle writes, as in the contract."""

    tokens: torch.Tensor
    parent: torch.Tensor
    score: torch.Tensor
    depth: torch.Tensor
    path: torch.Tensor

    @classmethod
    def empty(cls, requests: int, nodes: int, device: torch.device | str) -> Grown:
        """Buffers to write to, contents undefined."""
        return cls(**{name: torch.empty(requests, nodes, dtype=dtype, device=device) for name, dtype in DTYPES.items()})


@triton.jit
def path_of(above, token):
    """A child's path number [any shape] int64 from its parent's and its token; the root's is 0. Wraps."""
    mixed = (above ^ (token.to(tl.int64) + 1)) * -7046029254386353131  # splitmix64's odd increment
    return mixed ^ (mixed >> 29)


@triton.jit
def _token(line, index):
    """The token at a sequence index, -1 in front of the first."""
    return tl.where(index >= 0, tl.load(line + tl.maximum(index, 0)), -1)


@triton.jit
def _entry(values, at, every):
    """The entry of a vector at a place."""
    return tl.sum(tl.where(every == at, values, 0), 0)


@triton.jit(do_not_specialize=["max_depth", "ring", "history_stride"])
def _recycle(
    history, length, slot, place, successors, chances, branches, last, trust,
    tokens, parent, score, depth, path, max_depth, ring, history_stride,
    NODES: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Program (request). Candidates [GROUPS, RANKS]: row i holds the children of node i, row 0 the root's."""
    request = tl.program_id(0).to(tl.int64)
    owner = tl.load(slot + request)
    size = tl.load(length + owner)
    widest = tl.minimum(tl.load(branches + owner), WIDTH)
    deepest = tl.minimum(max_depth, tl.load(last + owner) - size - 1)
    line = history + owner * history_stride
    first = tl.maximum(size - WINDOW, 0)
    index = first + tl.arange(0, WINDOW)
    inside = index < size - 1  # the root itself has nothing behind it
    text0 = tl.load(line + index, mask=inside, other=-1)
    text1 = tl.load(line + index - 1, mask=inside & (index >= 1), other=-2)
    text2 = tl.load(line + index - 2, mask=inside & (index >= 2), other=-2)
    text3 = tl.load(line + index - 3, mask=inside & (index >= 3), other=-2)

    group, rank = tl.arange(0, GROUPS), tl.arange(0, RANKS)
    open_score = tl.full([GROUPS, RANKS], float("-inf"), tl.float32)
    open_token = tl.full([GROUPS, RANKS], -1, tl.int32)
    # What a child takes over from its parent: depth, path, and the last tokens there, nearest first.
    group_depth = tl.zeros([GROUPS], tl.int32)
    group_path = tl.zeros([GROUPS], tl.int64)
    group_near0 = tl.zeros([GROUPS], tl.int32)
    group_near1 = tl.zeros([GROUPS], tl.int32)
    group_near2 = tl.zeros([GROUPS], tl.int32)

    near0 = _token(line, size - 1)
    near1 = _token(line, size - 2)
    near2 = _token(line, size - 3)
    near3 = _token(line, size - 4)
    node_score = size * 0.0
    node_depth = size * 0
    node_path = node_depth.to(tl.int64)
    out = request * NODES
    live = (size > 0) & (widest > 0)
    for node in range(0, NODES):
        # What follows the node's context in the text: longest context first, then the latest place.
        equal1 = inside & (text0 == near0)
        equal2 = equal1 & (text1 == near1)
        equal3 = equal2 & (text2 == near2)
        equal4 = equal3 & (text3 == near3)
        context = equal1.to(tl.int32) + equal2.to(tl.int32) + equal3.to(tl.int32) + equal4.to(tl.int32)
        best = tl.max(tl.where(equal1, context * WINDOW + tl.arange(0, WINDOW), -1), 0)
        found = live & (best >= 0) & (node_depth < deepest)
        matched = tl.maximum(best, 0) // WINDOW
        at = first + tl.maximum(best, 0) % WINDOW
        sure = tl.load(trust + tl.maximum(matched - 1, 0))
        # Conditions of the node go into bounds: a mask of a scalar and a vector is not of one type everywhere.
        children = tl.where(found, widest, 0)
        entry = owner * ring + at % ring
        is_recorded = tl.load(place + entry) == at
        recorded = tl.where(is_recorded, children, 0)
        plain = tl.where(is_recorded, 0, tl.minimum(children, 1))
        following = tl.load(line + tl.minimum(at + 1, tl.maximum(size - 1, 0)))
        token = tl.load(successors + entry * WIDTH + rank, mask=rank < recorded, other=-1)
        chance = tl.load(chances + entry * WIDTH + rank, mask=rank < recorded, other=1.0)
        token = tl.where(rank < plain, following, token)
        value = node_score + tl.log(tl.maximum(chance * sure, 1e-30))
        value = tl.where((token >= 0) & (value >= LEAST), value, float("-inf"))
        own = group == node
        open_score = tl.where(own[:, None], value[None, :], open_score)
        open_token = tl.where(own[:, None], token[None, :], open_token)
        group_depth = tl.where(own, node_depth, group_depth)
        group_path = tl.where(own, node_path, group_path)
        group_near0 = tl.where(own, near0, group_near0)
        group_near1 = tl.where(own, near1, group_near1)
        group_near2 = tl.where(own, near2, group_near2)

        group_best = tl.max(open_score, 1)
        highest = tl.max(group_best, 0)
        live = highest > float("-inf")
        above = tl.min(tl.where(group_best == highest, group, GROUPS), 0)
        siblings = tl.max(tl.where((group == above)[:, None], open_score, float("-inf")), 0)
        which = tl.min(tl.where(siblings == highest, rank, RANKS), 0)
        taken = (group == above)[:, None] & (rank == which)[None, :]
        open_score = tl.where(taken, float("-inf"), open_score)

        near0 = tl.where(live, tl.sum(tl.sum(tl.where(taken, open_token, 0), 1), 0), -1)
        near1 = _entry(group_near0, above, group)
        near2 = _entry(group_near1, above, group)
        near3 = _entry(group_near2, above, group)
        node_score = highest
        node_depth = _entry(group_depth, above, group) + 1
        node_path = path_of(_entry(group_path, above, group), near0)
        tl.store(tokens + out + node, near0)
        tl.store(parent + out + node, above)
        tl.store(score + out + node, highest)
        tl.store(depth + out + node, node_depth)
        tl.store(path + out + node, node_path)


def recycle(
    history: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    place: torch.Tensor,
    successors: torch.Tensor,
    chances: torch.Tensor,
    branches: torch.Tensor,
    last: torch.Tensor,
    trust: torch.Tensor,
    *,
    max_depth: int,
    out: Grown,
) -> Grown:
    """Grow every request's tree; tensors as in the contract above, all on one device. No host sync.

    trust: [CONTEXT] float32, TRUST on the device. out: of at least as many requests; its second size is the nodes.
    Raises ValueError that names the tensor at fault.
    """
    _check(history, length, slot, place, successors, chances, branches, last, trust)
    _check_out(out, len(slot))
    nodes, width = out.tokens.shape[1], successors.shape[2]
    groups, ranks = triton.next_power_of_2(nodes), triton.next_power_of_2(width)
    if len(slot) and nodes:
        _recycle[(len(slot),)](
            history,
            length,
            slot,
            place,
            successors,
            chances,
            branches,
            last,
            trust,
            out.tokens,
            out.parent,
            out.score,
            out.depth,
            out.path,
            max_depth,
            place.shape[1],
            history.stride(0),
            NODES=nodes,
            WIDTH=width,
            WINDOW=min(WINDOW, triton.next_power_of_2(history.shape[1])),
            GROUPS=groups,
            RANKS=ranks,
            num_warps=min(max(4, groups * ranks // 512), 16),  # more candidates per thread would spill
        )
    return out


def _check(history, length, slot, place, successors, chances, branches, last, trust) -> None:
    """Raise ValueError for shapes and dtypes that the kernel does not take. Looks at no contents."""
    if history.dtype != torch.int32 or history.dim() != 2 or history.stride(1) != 1 or not history.shape[1]:
        raise ValueError(f"history: {tuple(history.shape)} {history.dtype} must be [slots, max_len] int32, rows dense")
    slots = len(history)
    if place.dim() != 2 or not place.shape[1]:
        raise ValueError(f"place: {tuple(place.shape)} must be [{slots}, ring] int32")
    ring = place.shape[1]
    if successors.dim() != 3 or not successors.shape[2]:
        raise ValueError(f"successors: {tuple(successors.shape)} must be [{slots}, {ring}, width] int32")
    width = successors.shape[2]
    expected = {
        "length": (length, torch.int32, (slots,)),
        "slot": (slot, torch.int64, (len(slot),)),
        "place": (place, torch.int32, (slots, ring)),
        "successors": (successors, torch.int32, (slots, ring, width)),
        "chances": (chances, torch.float32, (slots, ring, width)),
        "branches": (branches, torch.int32, (slots,)),
        "last": (last, torch.int32, (slots,)),
        "trust": (trust, torch.float32, (CONTEXT,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        fits = len(tensor) >= shape[0] and tensor.shape[1:] == shape[1:] and tensor.is_contiguous()
        if tensor.dtype != dtype or not fits:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be {list(shape)} {dtype} or longer, contiguous"
            )


def _check_out(out: Grown, requests: int) -> None:
    """Raise ValueError for an output that the kernel would write past or in another type."""
    nodes = out.tokens.shape[1:]
    for name, dtype in DTYPES.items():
        tensor = getattr(out, name)
        fits = tensor.dim() == 2 and len(tensor) >= requests and tensor.shape[1:] == nodes and tensor.is_contiguous()
        if tensor.dtype != dtype or not fits:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be [{requests}, nodes] {dtype}, contiguous"
            )
