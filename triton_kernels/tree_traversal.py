# SPDX-License-Identifier: Apache-2.0
"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): whole paths, from the leaves up; one launch per step.

In, out, undefined    as of tree_verify.py, whose draws this rule weighs too
Work  residual        [requests, max_depth + 1, vocab] float32    with draws only; contents undefined before and after

h[v] is the chance that v's path is accepted given what was refused before, P_v the law of the token behind v:

    h[root] = 1; entering draw x of n, made from D:  h[v] = min(1, h[n] * P_n[x] / D[x])
    leaving v, when all its draws are refused:
        U < h[v]: accept the path to v, y ~ P_v
        else:     raw = relu(h[n] * P_n - D); s = sum(raw); h[n] = s / (s + 1 - h[n]); P_n = raw / s

If y is carried by a child that no draw put there, the walk goes on from it by the naive rule, all children counting: it
is still fresh. A second draw of a node is refused at sight and not entered, since the first one's refusal left its
token nothing. The coin of the i-th draw left is that of (seed, position of the root, ACCEPT, i): neither coins nor
drafting may be keyed by the draws' own positions (verify/traversal.py).

A row without a law has no draws, and emits `vocab` as it does there. Draws below max_depth are passed over.

A program walks one request; its path down the tree is kept in registers, a few numbers per level. An entered node that
has draws costs one read of its logits, a refused draw one more of P and of q and one write of P, nothing where h is 0;
in the end a row or a residual is read twice. Which buffer holds which level's residual changes: a residual is written
to the one that is free, and stays where it was if rounding leaves nothing of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels import tuning
from specinfer_vllm.triton_kernels.tree_verify import (
    ACCEPT,
    CHILDREN,
    DRAWINGS,
    SAMPLE,
    WITHOUT_REPLACEMENT,
    DraftRows,
    Walk,
    block_sums,
    check_draws,
    check_trees,
    child_of,
    coin_of,
    drafted_from,
    key_of,
    mix,
    most_probable,
    pointers,
    sampled_from,
    subtract,
    weights_of,
    workspace,
)


@triton.jit
def _carries(draw_row, begin, end, row):
    """Whether one of the draws begin..end is carried by the row."""
    found = begin < 0
    for draw in range(begin, end):
        found = found | (tl.load(draw_row + draw) == row)
    return found


@triton.jit
def _residual_sums(residual, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum of each block of a residual, [BLOCKS]."""
    every = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float32)
    for block in range(0, (VOCAB + BLOCK - 1) // BLOCK):
        token = block * BLOCK + tl.arange(0, BLOCK)
        total = tl.sum(tl.load(residual + token, mask=token < VOCAB, other=0.0), 0)
        sums = tl.where(every == block, total, sums)
    return sums.to(tl.float64)


@triton.jit
def _climb(
    logits, tokens, draw_start, draw_row, draw_law, laws, law_mass, law_support, residual, key, first, max_depth,
    logits_stride, laws_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
    DRAWING: tl.constexpr,
):  # fmt: skip
    """The accepted path: (its depth, [LEVELS] index of its node at each depth, buffer of the last one's law).

    The buffer is -1 where it is the row's own law. key: of the request's seed and its root's position.
    """
    every = tl.arange(0, LEVELS)
    none = tl.zeros([LEVELS], tl.int32) - 1
    nothing = tl.zeros([LEVELS], tl.float64)
    # Of the path that is being looked at, by level. To read an entry, all others become 0 and are summed with it.
    node = none + 1
    entered = none + 1  # the draw that was entered, or comes next, and where the node's draws end
    end = none + 1
    height = nothing
    law = none  # row of the last entered draw's, how that was drawn, and mass and number of those before it from there
    scale = nothing
    shift = nothing
    taken = nothing
    earlier = none + 1
    side = none  # buffer of the residual, -1 = the row's own law; one over its sum; the row's largest logit
    inverse = nothing
    maxima = tl.zeros([LEVELS], tl.float32)
    place = every  # buffer that the level has, and one that no level has
    free = max_depth + 0

    depth = max_depth * 0
    left = max_depth * 0
    enters = left == 0
    chance = tl.sum(nothing, 0) + 1.0
    carrier = first + 0
    again = left != 0
    going = left == 0
    while going:
        if enters:  # `carrier` becomes the path's node at `depth`
            begin = tl.load(draw_start + carrier)
            last = tl.load(draw_start + carrier + 1)
            last = tl.where(again | (depth >= max_depth), begin, last)
            here = every == depth
            node = tl.where(here, carrier - first, node)
            height = tl.where(here, chance, height)
            side = tl.where(here, -1, side)
            if last > begin:
                law = tl.where(here, -1, law)
                earlier = tl.where(here, 0, earlier)
                if chance > 0:
                    line = logits + carrier.to(tl.int64) * logits_stride
                    largest, _, sums = block_sums(line, VOCAB, BLOCK, BLOCKS)
                    total = tl.sum(sums, 0)
                    has_law = (total > 0) & (total < float("inf"))
                    last = tl.where(has_law, last, begin)
                    inverse = tl.where(here, 1.0 / tl.where(has_law, total, 1.0), inverse)
                    maxima = tl.where(here, largest, maxima)
            entered = tl.where(here, begin, entered)
            end = tl.where(here, last, end)
        here = every == depth
        above = tl.sum(tl.where(here, height, 0), 0)
        draw = tl.sum(tl.where(here, entered, 0), 0)
        enters = draw < tl.sum(tl.where(here, end, 0), 0)
        if enters:
            at = first + tl.sum(tl.where(here, node, 0), 0)
            carrier = tl.load(draw_row + draw)
            again = _carries(draw_row, tl.load(draw_start + at), draw, carrier)
            x = tl.load(tokens + carrier).to(tl.int64)
            which = tl.load(draw_law + draw)
            own = tl.load(laws + which.to(tl.int64) * laws_stride + x).to(tl.float64)
            by = above * 0 + 1
            plus = above * 0
            if DRAWING == WITHOUT_REPLACEMENT:
                previous = tl.sum(tl.where(here, law, 0), 0)
                mass = tl.sum(tl.where(here, taken, 0), 0)
                number = tl.sum(tl.where(here, earlier, 0), 0)
                by, plus, mass, number = drafted_from(own, which, previous, mass, number, law_mass, law_support, VOCAB)
                taken = tl.where(here, mass, taken)
                earlier = tl.where(here, number, earlier)
            law = tl.where(here, which, law)
            scale = tl.where(here, by, scale)
            shift = tl.where(here, plus, shift)
            chance = above * 0
            if (above > 0) & (again == 0):
                line = logits + at.to(tl.int64) * logits_stride
                largest = tl.sum(tl.where(here, maxima, 0), 0)
                buffer = tl.sum(tl.where(here, side, 0), 0)
                weight = weights_of(line, largest, residual, buffer, x, x >= 0, VOCAB, DRAWING)
                wanted = above * (weight.to(tl.float64) * tl.sum(tl.where(here, inverse, 0), 0))
                offered = by * own + plus
                passes = (wanted > 0) & (wanted >= offered)
                chance = tl.where(passes, 1.0, tl.where(wanted > 0, wanted / tl.where(passes, 1.0, offered), 0.0))
            depth += 1
        else:
            coin = coin_of(mix(mix(key ^ ACCEPT) ^ left.to(tl.uint64)))
            going = (depth > 0) & (coin >= above)
            if going:
                left += 1
                depth -= 1
                here = every == depth
                before = tl.sum(tl.where(here, height, 0), 0)
                if before > 0:
                    at = first + tl.sum(tl.where(here, node, 0), 0)
                    line = logits + at.to(tl.int64) * logits_stride
                    q = laws + tl.sum(tl.where(here, law, 0), 0).to(tl.int64) * laws_stride
                    factor = (before * tl.sum(tl.where(here, inverse, 0), 0)).to(tl.float32)
                    by = tl.sum(tl.where(here, scale, 0), 0).to(tl.float32)
                    plus = tl.sum(tl.where(here, shift, 0), 0).to(tl.float32)
                    largest = tl.sum(tl.where(here, maxima, 0), 0)
                    buffer = tl.sum(tl.where(here, side, 0), 0)
                    rest = subtract(
                        line, largest, residual, buffer, free, factor, q, by, plus, VOCAB, BLOCK, BLOCKS, DRAWING
                    )
                    mass = tl.sum(rest, 0)
                    # Nothing left where h = 1 is rounding, as a refused x has P[x] < D[x]: P stays as it is.
                    after = tl.where(before >= 1, 1.0, tl.where(mass > 0, mass / (mass + (1 - before)), 0.0))
                    height = tl.where(here, after, height)
                    kept = every == tl.where(mass > 0, depth, -1)
                    inverse = tl.where(kept, 1.0 / tl.where(mass > 0, mass, 1.0), inverse)
                    side = tl.where(kept, free, side)
                    given = tl.sum(tl.where(here, place, 0), 0)
                    place = tl.where(kept, free, place)
                    free = tl.where(mass > 0, given, free)
                entered = tl.where(here, entered + 1, entered)
    return depth, node, tl.sum(tl.where(every == depth, side, 0), 0)


# tokens and parent are views that begin where a step has its rows: no code is made anew for that.
@triton.jit(do_not_specialize=["max_depth"], do_not_specialize_on_alignment=["tokens", "parent"])
def _traverse(
    logits,
    tokens,
    parent,
    start,
    seed,
    position,
    greedy,
    draw_start,
    draw_row,
    draw_law,
    laws,
    law_mass,
    law_support,
    residual,
    out_tokens,
    out_rows,
    num_tokens,
    max_depth,
    logits_stride,
    laws_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_CHILDREN: tl.constexpr,
    LEVELS: tl.constexpr,
    DRAWING: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
):
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(start + request)
    rows = tl.load(start + request + 1) - first
    width = max_depth + 1
    best_only = rows < 0
    if HAS_GREEDY:
        best_only = tl.load(greedy + request) != 0
    count = rows * 0
    side = rows * 0 - 1
    node = tl.where(rows > 0, 0, -1)
    buffers = residual
    every = tl.arange(0, LEVELS)
    if DRAWING != 0:
        buffers = residual + request * width * VOCAB
        if (rows > 0) & (best_only == 0):
            key = key_of(tl.load(seed + request), tl.load(position + first))
            count, path, side = _climb(
                logits, tokens, draw_start, draw_row, draw_law, laws, law_mass, law_support, buffers, key, first,
                max_depth, logits_stride, laws_stride, VOCAB, BLOCK, BLOCKS, LEVELS, DRAWING,
            )  # fmt: skip
            node = tl.sum(tl.where(every == count, path, 0), 0)
            token = tl.load(tokens + first + path, mask=every <= count, other=0).to(tl.int64)
            into = out_tokens + request * width + every
            tl.store(into - 1, token, mask=(every > 0) & (every <= count))
            tl.store(out_rows + request * width + every, (first + path).to(tl.int64), mask=every <= count)
    fresh = node >= 0
    while (node >= 0) & (count < width):
        row = (first + node).to(tl.int64)
        line = logits + row * logits_stride
        maximum, maxima, sums = block_sums(line, VOCAB, BLOCK, BLOCKS)
        total = tl.sum(sums, 0)
        accepted = node * 0 - 1
        token = node * 0 + VOCAB
        if (total > 0) & (total < float("inf")):
            if best_only:
                token = most_probable(line, maximum, maxima, VOCAB, BLOCK, BLOCKS)
            else:
                if DRAWING != 0:
                    if side >= 0:
                        sums = _residual_sums(buffers + side * VOCAB, VOCAB, BLOCK, BLOCKS)
                coin = coin_of(mix(key_of(tl.load(seed + request), tl.load(position + row)) ^ SAMPLE))
                token = sampled_from(line, maximum, buffers, side, sums, coin, VOCAB, BLOCK, BLOCKS, DRAWING)
            accepted = child_of(tokens, parent, first, rows, node, token, BLOCK_CHILDREN)
            if DRAWING != 0:
                if fresh & (best_only == 0):  # its draws are refused, whatever rounding left of them
                    drawn = _carries(
                        draw_row, tl.load(draw_start + row), tl.load(draw_start + row + 1), accepted + first
                    )
                    accepted = tl.where(drawn, -1, accepted)
        tl.store(out_tokens + request * width + count, token.to(tl.int64))
        tl.store(out_rows + request * width + count, row)
        count += 1
        side = side * 0 - 1
        fresh = count < 0
        # A child stands behind its parent; a link that does not rise would never end.
        node = tl.where(accepted > node, accepted, -1)
    tl.store(num_tokens + request, count)
    behind = (every >= count) & (every < width)
    none = tl.full([LEVELS], -1, tl.int64)
    tl.store(out_tokens + request * width + every, none, mask=behind)
    tl.store(out_rows + request * width + every, none, mask=behind)


def residual_size(requests: int, max_depth: int, vocab: int) -> int:
    """float32 elements that a call with draws works in."""
    return requests * (max_depth + 1) * vocab


def traverse(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    greedy: torch.Tensor | None = None,
    draws: DraftRows | None = None,
    drawing: str = "without_replacement",
    residual: torch.Tensor | None = None,
    out: Walk | None = None,
) -> Walk:
    """Accept a path of every tree; arguments and errors as of tree_verify.verify, but that seeds are needed."""
    if seed is None:
        raise ValueError("seed: needed, for greedy requests too, whose coins nobody looks at")
    check_trees(logits, tokens, parent, start, max_depth, seed, position, greedy)
    requests, vocab = len(start) - 1, logits.shape[1]
    if draws is not None:
        check_draws(draws, drawing, len(tokens), vocab, seed)
        residual = workspace(residual, residual_size(requests, max_depth, vocab), logits.device)
    out = out or Walk.empty(requests, max_depth + 1, logits.device)
    out.check(requests, max_depth + 1)
    if not requests:
        return out
    plan = tuning.traversal_plan(tuning.architecture(logits.device), vocab)
    _traverse[(requests,)](
        *pointers((logits, tokens, parent, start), (seed, position, greedy), draws, residual, out),
        max_depth,
        logits.stride(0),
        draws.laws.stride(0) if draws else 0,
        VOCAB=vocab,
        BLOCK=plan.block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, plan.block)),
        BLOCK_CHILDREN=CHILDREN,
        LEVELS=triton.next_power_of_2(max_depth + 1),
        DRAWING=DRAWINGS[drawing] if draws else 0,
        HAS_GREEDY=greedy is not None,
        num_warps=plan.num_warps,
    )
    return out
