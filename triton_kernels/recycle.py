# SPDX-License-Identifier: Apache-2.0
"""Draft-free drafting on the device: best-first trees out of a request's own text and what the LLM said before.

In    history      [slots, max_len] int32          committed tokens of each slot; row stride free
      length       [slots] int32                   how many of them there are; the last one is the tree's root
      slot         [requests] int64                whose tree request r gets
      branches     [slots] int32                   most children per node; 0 = no tree
      last         [slots] int32                   sequence length at which the request ends: no node is deeper
      weight       [CONTEXT] float32               votes of a place in the text, by equal tokens of context
recycle only
      place        [slots, ring] int32             sequence index that a row of successors belongs to, -1 = none; the
                                                   row of index i stands at i % ring
      successors   [slots, ring, width] int32      the LLM's likeliest tokens behind that index, best first, -1 = none
      chances      [slots, ring, width] float32    their probabilities
      primer       Primer                          optional: what the LLM said behind contexts of other texts
Out   tokens       [requests, nodes] int32         best node first, -1 behind the last
      parent       [requests, nodes] int32         0 = root, node i counts as i + 1; a parent stands before its children
      score        [requests, nodes] float32       log of the estimated chance that the path is accepted; -inf behind
      depth        [requests, nodes] int32         1 below the root
      path         [requests, nodes] int64         a number made of the tokens from the root to the node
Behind the last node parent and path are 0 and depth is 1.

At a node the last WINDOW tokens of the text are looked through for places whose token is the node's, each with the
number of equal tokens in front, CONTEXT at most. A child's chance is its votes by all votes and 1, the weight of doubt;
SURE at most. Who votes:
recycle  the place with the longest equal context, of these the latest: for its row of successors, each by its
         probability, or, where none was recorded, for the text's own next token (Token Recycling, arXiv 2408.08696,
         keeps one row per token; a row per place lets the longer context win). And the primer's row of the longest
         context that it knows, found in the text or not.
ngram    all places, for the text's own next token. Children are the first PLACES different ones, longest context
         first, then the latest.
The node with the highest chance of its path is taken, of equal ones the child of the earlier node and then the better
ranked (of equal votes the place's successors stand before the primer's), then the next. A child without a token, with
one that is `vocab` or more, or whose path's chance is below e^LEAST, is not taken.

Undefined: slots past the tensors' first size; equal tokens within one row of successors. Not read: tokens behind
`length` and more than WINDOW + CONTEXT in front of it, successors and chances whose place is another.

A program grows one tree: `nodes` passes over the window, which stays in registers, as do the candidates: no scratch, no
barrier but the reductions' own. Per node the reads depend on one another twice: its place, then its row; the primer's
three times, beside them. ngram passes over the window PLACES times more. Products of slots and strides are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WINDOW = 1024
CONTEXT = 4
PLACES = 4  # different next tokens of the text at one node: with 8 of them no more was accepted at 8 nodes
PROBES = 8  # contexts of a primer in one bucket at most
# Votes of a place for its row, by equal tokens of context. Between the results of coordinate searches on 60
# recorded greedy chats of SmolLM2-135M-Instruct (bench/recording.py, 128 tokens each), replayed with this kernel's
# reference: 1.480, 1.580, 1.624 tokens per LLM step at 4, 8, 16 nodes, where the guess 1, 1.9, 4, 9 gave 1.471,
# 1.571, 1.618 and propose/recycling.py gives 1.604 at 8. Fitted on one half of the chats it gains 0.2 to 0.3% on the
# other. Counted apart, rows and text are right with 0.54 and 0.16 of their probability at one token, 1.08 and 0.85 at
# four: two tables gained nothing more. With a primer (propose/device_primer.py) 1.782, 1.956, 2.104, where
# propose/recycling.py gives 1.778, 1.948, 2.075.
WEIGHTS = (3 / 7, 1.0, 1.5, 17 / 3)
# Votes of a place for its next token: propose/ngram.py's, without its fading and with a shorter context. On the same
# chats 1.483, 1.556, 1.588 tokens, where propose/ngram.py gives 1.490, 1.566, 1.593. Fitted on one half of the chats
# other weights gained nothing on the other.
NGRAM_WEIGHTS = (0.104, 0.302, 0.876, 2.54)
SURE = tl.constexpr(0.94)  # the highest chance of one child, as in propose/votes.py
LEAST = tl.constexpr(-6.9)  # paths below a chance of 1e-3 are not worth a node
ANY_TOKEN = 2**31 - 1
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


@dataclass(frozen=True)
class Primer:
    """Votes for the tokens behind each context of 1 to CONTEXT tokens, as a table of buckets; never written to.

    start   [buckets + 1] int32      buckets = a power of two; contexts of bucket b: start[b]:start[b+1], PROBES at most
    keys    [contexts] int64         number of the context: path_of over its tokens, nearest first; its lowest bits are
                                     the bucket's number
    tokens  [contexts, width] int32  best first, -1 behind the last
    votes   [contexts, width] float32
    total   [contexts] float32       all votes, those for tokens that are not among these included
    """

    start: torch.Tensor
    keys: torch.Tensor
    tokens: torch.Tensor
    votes: torch.Tensor
    total: torch.Tensor


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


@triton.jit
def _deepest(near0, near1, near2, near3, start, keys, buckets, PROBES: tl.constexpr):
    """The primer's row of the longest context that it knows, -1 = it knows none."""
    level, probe = tl.arange(0, 4), tl.arange(0, PROBES)
    key1 = path_of(near0.to(tl.int64) * 0, near0)
    key2 = path_of(key1, near1)
    key3 = path_of(key2, near2)
    key4 = path_of(key3, near3)
    key = tl.where(level < 2, tl.where(level < 1, key1, key2), tl.where(level < 3, key3, key4))
    bucket = key & (buckets - 1)
    at = tl.load(start + bucket)[:, None] + probe[None, :]
    is_there = at < tl.load(start + bucket + 1)[:, None]
    is_it = is_there & (tl.load(keys + at, mask=is_there, other=0) == key[:, None])
    longest = tl.max(tl.max(tl.where(is_it, level[:, None], -1), 1), 0)
    return tl.max(tl.max(tl.where(is_it & (level[:, None] == longest), at, -1), 1), 0)


@triton.jit(do_not_specialize=["max_depth", "ring", "history_stride", "buckets", "vocab"])
def _grow(
    history, length, slot, place, successors, chances, branches, last, weight,
    start, keys, primed_tokens, primed_votes, primed_total,
    tokens, parent, score, depth, path, max_depth, ring, history_stride, buckets, vocab,
    NODES: tl.constexpr, WIDTH: tl.constexpr, PRIMED: tl.constexpr, HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, GROUPS: tl.constexpr, RANKS: tl.constexpr, VOTED: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Program (request). Candidates [GROUPS, RANKS]: row i holds the children of node i, row 0 the root's.

    VOTED: tokens that are voted for at one node, WIDTH by the text and PRIMED by the primer; the best RANKS are kept.
    """
    request = tl.program_id(0).to(tl.int64)
    owner = tl.load(slot + request)
    size = tl.load(length + owner)
    widest = tl.minimum(tl.load(branches + owner), RANKS)
    deepest = tl.minimum(max_depth, tl.load(last + owner) - size - 1)
    line = history + owner * history_stride
    first = tl.maximum(size - WINDOW, 0)
    index = first + tl.arange(0, WINDOW)
    inside = index < size - 1  # the root itself has nothing behind it
    text0 = tl.load(line + index, mask=inside, other=-1)
    text1 = tl.load(line + index - 1, mask=inside & (index >= 1), other=-2)
    text2 = tl.load(line + index - 2, mask=inside & (index >= 2), other=-2)
    text3 = tl.load(line + index - 3, mask=inside & (index >= 3), other=-2)
    weight1 = tl.load(weight)
    weight2 = tl.load(weight + 1)
    weight3 = tl.load(weight + 2)
    weight4 = tl.load(weight + 3)

    group, rank, voted = tl.arange(0, GROUPS), tl.arange(0, RANKS), tl.arange(0, VOTED)
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
        ordered = tl.where(equal1, context * WINDOW + tl.arange(0, WINDOW), -1)
        may_grow = live & (node_depth < deepest)
        # Conditions of the node go into bounds: a mask of a scalar and a vector is not of one type everywhere.
        if HAS_ROWS:
            best = tl.max(ordered, 0)
            found = may_grow & (best >= 0)
            at = first + tl.maximum(best, 0) % WINDOW
            votes_here = tl.where(found, tl.load(weight + tl.maximum(tl.maximum(best, 0) // WINDOW - 1, 0)), 0.0)
            children = tl.where(found, WIDTH, 0)
            entry = owner * ring + at % ring
            is_recorded = tl.load(place + entry) == at
            recorded = tl.where(is_recorded, children, 0)
            plain = tl.where(is_recorded, 0, tl.minimum(children, 1))
            following = tl.load(line + tl.minimum(at + 1, tl.maximum(size - 1, 0)))
            token = tl.load(successors + entry * WIDTH + voted, mask=voted < recorded, other=-1)
            chance = tl.load(chances + entry * WIDTH + voted, mask=voted < recorded, other=1.0)
            token = tl.where(voted < plain, following, token)
            votes = tl.where((chance > 0) & (voted < recorded + plain), votes_here * chance, 0.0)
            total = 1.0 + votes_here
        else:
            casts = tl.where(equal2, tl.where(equal3, tl.where(equal4, weight4, weight3), weight2), weight1)
            casts = tl.where(equal1, casts, 0.0)
            behind = tl.load(line + index + 1, mask=inside, other=-1)
            total = 1.0 + tl.sum(casts, 0)
            token = tl.full([VOTED], -1, tl.int32)
            votes = tl.zeros([VOTED], tl.float32)
            for each in range(0, WIDTH):
                best = tl.max(ordered, 0)
                at = first + tl.maximum(best, 0) % WINDOW
                following = tl.load(line + tl.minimum(at + 1, tl.maximum(size - 1, 0)))
                following = tl.where(may_grow & (best >= 0), following, -1)
                is_same = behind == following
                token = tl.where(voted == each, following, token)
                votes = tl.where(voted == each, tl.sum(tl.where(is_same, casts, 0.0), 0), votes)
                ordered = tl.where(is_same, -1, ordered)
        if PRIMED:
            row = _deepest(near0, near1, near2, near3, start, keys, buckets, PROBES)
            known = tl.where(may_grow & (row >= 0), PRIMED, 0)
            row = tl.maximum(row, 0).to(tl.int64)
            column = voted - WIDTH
            is_primed = (column >= 0) & (column < known)
            token = tl.where(is_primed, tl.load(primed_tokens + row * PRIMED + column, mask=is_primed, other=-1), token)
            votes += tl.load(primed_votes + row * PRIMED + column, mask=is_primed, other=0.0)
            total += tl.load(primed_total + row, mask=known > 0, other=0.0)
            # A token gets the votes of both, where it stands first.
            is_same = (token[:, None] == token[None, :]) & (token >= 0)[:, None]
            votes = tl.sum(tl.where(is_same, votes[None, :], 0.0), 1)
            is_later = tl.max((is_same & (voted[None, :] < voted[:, None])).to(tl.int32), 1) > 0
            token = tl.where(is_later, -1, token)
        token = tl.where(token < vocab, token, -1)
        value = node_score + tl.log(tl.maximum(tl.minimum(votes / total, SURE), 1e-30))
        value = tl.where((token >= 0) & (value >= LEAST), value, float("-inf"))
        if PRIMED or not HAS_ROWS:  # the best come first; a row of successors stands so already
            # One after the other: sorted by counting, which takes a square, the largest trees spill.
            best_token = tl.full([RANKS], -1, tl.int32)
            best_value = tl.full([RANKS], float("-inf"), tl.float32)
            for each in range(0, RANKS):
                highest = tl.max(value, 0)
                which = tl.min(tl.where(value == highest, voted, VOTED), 0)
                best_token = tl.where(rank == each, _entry(token, which, voted), best_token)
                best_value = tl.where(rank == each, highest, best_value)
                value = tl.where(voted == which, float("-inf"), value)
            token = best_token
            value = best_value
        value = tl.where(rank < widest, value, float("-inf"))
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
        is_above = (group == above)[:, None]
        siblings = tl.max(tl.where(is_above, open_score, float("-inf")), 0)
        which = tl.min(tl.where(siblings == highest, rank, RANKS), 0)
        their_token = tl.max(tl.where(is_above, open_token, -1), 0)
        open_score = tl.where(is_above & (rank == which)[None, :], float("-inf"), open_score)

        near0 = tl.where(live, _entry(their_token, which, rank), -1)
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
    weight: torch.Tensor,
    *,
    max_depth: int,
    out: Grown,
    primer: Primer | None = None,
    vocab: int = ANY_TOKEN,
) -> Grown:
    """Grow every request's tree from its rows, its text and the primer; tensors as in the contract above, all on one
    device. No host sync.

    weight: [CONTEXT] float32, WEIGHTS on the device. out: of at least as many requests; its second size is the nodes.
    vocab: no token from here on is proposed. Raises ValueError that names the tensor at fault.
    """
    _check_text(history, length, slot, branches, last, weight)
    _check_rows(place, successors, chances, len(history))
    _check_primer(primer)
    _check_out(out, len(slot))
    width, primed = successors.shape[2], 0 if primer is None else primer.tokens.shape[1]
    table = (None,) * 5 if primer is None else (primer.start, primer.keys, primer.tokens, primer.votes, primer.total)
    ranks = triton.next_power_of_2(width)
    rows = (place, successors, chances)
    _launch(history, length, slot, rows, branches, last, weight, table, out, max_depth, vocab, width, primed, ranks)
    return out


def ngram(
    history: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    branches: torch.Tensor,
    last: torch.Tensor,
    weight: torch.Tensor,
    *,
    max_depth: int,
    out: Grown,
    vocab: int = ANY_TOKEN,
) -> Grown:
    """Grow every request's tree from its text alone; as `recycle`, weight: NGRAM_WEIGHTS on the device."""
    _check_text(history, length, slot, branches, last, weight)
    _check_out(out, len(slot))
    rows, table = (None,) * 3, (None,) * 5
    _launch(history, length, slot, rows, branches, last, weight, table, out, max_depth, vocab, PLACES, 0, PLACES)
    return out


def _launch(
    history, length, slot, rows, branches, last, weight, table, out, max_depth, vocab, width, primed, ranks
) -> None:
    """Start one program per request. rows, table: tensors of the successors and of the primer, or Nones."""
    nodes = out.tokens.shape[1]
    if not len(slot) or not nodes:
        return
    groups = triton.next_power_of_2(nodes)
    _grow[(len(slot),)](
        history, length, slot, *rows, branches, last, weight, *table,
        out.tokens, out.parent, out.score, out.depth, out.path,
        max_depth, 0 if rows[0] is None else rows[0].shape[1], history.stride(0),
        0 if table[0] is None else len(table[0]) - 1, vocab,
        NODES=nodes, WIDTH=width, PRIMED=primed, HAS_ROWS=rows[0] is not None,
        WINDOW=min(WINDOW, triton.next_power_of_2(history.shape[1])), GROUPS=groups, RANKS=ranks,
        VOTED=triton.next_power_of_2(width + primed), PROBES=PROBES,
        num_warps=min(max(4, groups * ranks // 512), 16),  # more candidates per thread would spill
    )  # fmt: skip


def _check_text(history, length, slot, branches, last, weight) -> None:
    """Raise ValueError for shapes and dtypes that the kernel does not take. Looks at no contents."""
    if history.dtype != torch.int32 or history.dim() != 2 or history.stride(1) != 1 or not history.shape[1]:
        raise ValueError(f"history: {tuple(history.shape)} {history.dtype} must be [slots, max_len] int32, rows dense")
    slots = len(history)
    _check(
        length=(length, torch.int32, (slots,)),
        slot=(slot, torch.int64, (len(slot),)),
        branches=(branches, torch.int32, (slots,)),
        last=(last, torch.int32, (slots,)),
        weight=(weight, torch.float32, (CONTEXT,)),
    )


def _check_rows(place, successors, chances, slots: int) -> None:
    """As _check_text, of the successors."""
    if place.dim() != 2 or not place.shape[1]:
        raise ValueError(f"place: {tuple(place.shape)} must be [{slots}, ring] int32")
    ring = place.shape[1]
    if successors.dim() != 3 or not successors.shape[2]:
        raise ValueError(f"successors: {tuple(successors.shape)} must be [{slots}, {ring}, width] int32")
    width = successors.shape[2]
    _check(
        place=(place, torch.int32, (slots, ring)),
        successors=(successors, torch.int32, (slots, ring, width)),
        chances=(chances, torch.float32, (slots, ring, width)),
    )


def _check_primer(primer: Primer | None) -> None:
    """As _check_text, of the primer."""
    if primer is None:
        return
    buckets = len(primer.start) - 1
    if buckets < 1 or buckets & (buckets - 1):
        raise ValueError(f"start: {len(primer.start)} entries must be a power of two and 1")
    if primer.tokens.dim() != 2 or not primer.tokens.shape[1]:
        raise ValueError(f"tokens: {tuple(primer.tokens.shape)} must be [contexts, width] int32")
    contexts, width = primer.tokens.shape
    _check(
        start=(primer.start, torch.int32, (buckets + 1,)),
        keys=(primer.keys, torch.int64, (contexts,)),
        tokens=(primer.tokens, torch.int32, (contexts, width)),
        votes=(primer.votes, torch.float32, (contexts, width)),
        total=(primer.total, torch.float32, (contexts,)),
    )


def _check(**expected) -> None:
    """Raise ValueError for a tensor unlike its (dtype, shape); its first size may be larger."""
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
