# SPDX-License-Identifier: Apache-2.0
"""Token recycling on the device: best-first trees out of a request's own text and the LLM's successors seen there.

In    history      [slots, max_len] int32          committed tokens of each slot; row stride free
      length       [slots] int32                   how many of them there are; the last one is the tree's root
      slot         [requests] int64                whose tree request r gets
      place        [slots, ring] int32             sequence index that a row of successors belongs to, -1 = none
      successors   [slots, ring, width] int32      the LLM's likeliest tokens behind that index, best first, -1 = none
      chances      [slots, ring, width] float32    their probabilities
      branches     [slots] int32                   most children per node; 0 = no tree
      last         [slots] int32                   sequence length at which the request ends: no node is deeper
Out   tokens       [requests, nodes] int32         best node first, -1 behind the last
      parent       [requests, nodes] int32         0 = root, node i counts as i + 1; a parent stands before its children
      score        [requests, nodes] float32       log of the estimated chance that the path is accepted; -inf behind
      depth        [requests, nodes] int32
      path         [requests, nodes] int64         a number made of the tokens from the root to the node

At a node every earlier place of the text (the last WINDOW tokens) is looked at whose token is the node's; the one with
the longest equal context, up to CONTEXT tokens, and of these the latest, says what comes next: its row of successors,
or, where none was recorded, the text's own next token. A child's chance is its probability there times TRUST of the
context's length. The node with the highest chance of its path is taken, then the next (Token Recycling,
arXiv 2408.08696, keeps one row per token; a row per place lets the longer context win).

A program grows one tree: `nodes` passes over the window, which stays in registers. Products of slots and strides are
64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WINDOW = 1024
CONTEXT = 4
# Chance that the likeliest successor is right, by equal tokens of context.
TRUST = (0.5, 0.65, 0.8, 0.9)
LEAST = tl.constexpr(-6.9)  # paths below a chance of 1e-3 are not worth a node


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

        def new(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(requests, nodes, dtype=dtype, device=device)

        return cls(new(torch.int32), new(torch.int32), new(torch.float32), new(torch.int32), new(torch.int64))


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
def _lane(values, lane, every):
    """The entry of a vector at a place."""
    return tl.sum(tl.where(every == lane, values, 0), 0)


@triton.jit(do_not_specialize=["max_depth", "ring", "history_stride"])
def _recycle(
    history, length, slot, place, successors, chances, branches, last, trust,
    tokens, parent, score, depth, path, max_depth, ring, history_stride,
    NODES: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (request). A lane is a candidate: the lanes of the i-th node that was expanded are i * WIDTH onwards."""
    request = tl.program_id(0).to(tl.int64)
    owner = tl.load(slot + request)
    size = tl.load(length + owner)
    widest = tl.load(branches + owner)
    deepest = tl.minimum(max_depth, tl.load(last + owner) - size - 1)
    line = history + owner * history_stride
    first = tl.maximum(size - WINDOW, 0)
    index = first + tl.arange(0, WINDOW)
    inside = index < size - 1  # the root itself has nothing behind it
    text0 = tl.load(line + index, mask=inside, other=-1)
    text1 = tl.load(line + index - 1, mask=inside & (index >= 1), other=-2)
    text2 = tl.load(line + index - 2, mask=inside & (index >= 2), other=-2)
    text3 = tl.load(line + index - 3, mask=inside & (index >= 3), other=-2)

    every = tl.arange(0, LANES)
    lane_score = tl.full([LANES], float("-inf"), tl.float32)
    lane_token = tl.full([LANES], -1, tl.int32)
    lane_parent = tl.zeros([LANES], tl.int32)
    lane_depth = tl.zeros([LANES], tl.int32)
    lane_path = tl.zeros([LANES], tl.int64)
    # The last tokens at the lane's parent, nearest first.
    lane_near1 = tl.zeros([LANES], tl.int32)
    lane_near2 = tl.zeros([LANES], tl.int32)
    lane_near3 = tl.zeros([LANES], tl.int32)

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
        entry = owner * ring + at % ring
        # Conditions of the node go into bounds: a mask of a scalar and a vector is not of one type everywhere.
        recorded = tl.where(tl.load(place + entry) == at, widest, 0)
        expanded = tl.where(found, node, -1)
        rank = every % WIDTH
        mine = (every // WIDTH == expanded) & (rank < widest)
        row = mine & (rank < recorded)
        token = tl.load(successors + entry * WIDTH + rank, mask=row, other=-1)
        chance = tl.load(chances + entry * WIDTH + rank, mask=row, other=0.0)
        following = tl.load(line + at + 1)
        plain = mine & (rank < tl.where(recorded > 0, 0, 1))
        token = tl.where(plain, following, token)
        chance = tl.where(plain, 1.0, chance)
        sure = tl.load(trust + tl.maximum(matched - 1, 0))
        value = node_score + tl.log(tl.maximum(chance * sure, 1e-30))
        lane_score = tl.where(mine & (token >= 0) & (value >= LEAST), value, lane_score)
        lane_token = tl.where(mine, token, lane_token)
        lane_parent = tl.where(mine, node, lane_parent)
        lane_depth = tl.where(mine, node_depth + 1, lane_depth)
        lane_path = tl.where(mine, path_of(node_path, token), lane_path)
        lane_near1 = tl.where(mine, near0, lane_near1)
        lane_near2 = tl.where(mine, near1, lane_near2)
        lane_near3 = tl.where(mine, near2, lane_near3)

        highest = tl.max(lane_score, 0)
        live = highest > float("-inf")
        lane = tl.min(tl.where(lane_score == highest, every, LANES), 0)
        near0 = tl.where(live, _lane(lane_token, lane, every), -1)
        near1 = _lane(lane_near1, lane, every)
        near2 = _lane(lane_near2, lane, every)
        near3 = _lane(lane_near3, lane, every)
        node_score = highest
        node_depth = _lane(lane_depth, lane, every)
        node_path = _lane(lane_path, lane, every)
        tl.store(tokens + out + node, near0)
        tl.store(parent + out + node, tl.where(live, _lane(lane_parent, lane, every), 0))
        tl.store(score + out + node, highest)
        tl.store(depth + out + node, tl.where(live, node_depth, 1))
        tl.store(path + out + node, node_path)
        lane_score = tl.where(every == lane, float("-inf"), lane_score)


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
    nodes, width = out.tokens.shape[1], successors.shape[2]
    if len(slot):
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
            LANES=triton.next_power_of_2(nodes * width),
            num_warps=4,
        )
    return out


def _check(history, length, slot, place, successors, chances, branches, last, trust) -> None:
    """Raise ValueError for shapes and dtypes that the kernel does not take. Looks at no contents."""
    slots = len(history)
    expected = {
        "history": (history, torch.int32, 2, slots),
        "length": (length, torch.int32, 1, slots),
        "slot": (slot, torch.int64, 1, len(slot)),
        "place": (place, torch.int32, 2, slots),
        "successors": (successors, torch.int32, 3, slots),
        "chances": (chances, torch.float32, 3, slots),
        "branches": (branches, torch.int32, 1, slots),
        "last": (last, torch.int32, 1, slots),
        "trust": (trust, torch.float32, 1, CONTEXT),
    }
    for name, (tensor, dtype, dims, least) in expected.items():
        if tensor.dtype != dtype or tensor.dim() != dims or len(tensor) < least or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be [{least}, ...] {dtype}")
    if not all(each.is_contiguous() for each in (place, successors, chances)) or successors.shape != chances.shape:
        raise ValueError("place, successors, chances: must be contiguous, the last two of one shape")
