# SPDX-License-Identifier: Apache-2.0
"""The union of several proposers' trees (SpecInfer, Definition 3.2), every draw kept.

The definition read literally keeps each sequence once and so forgets how often, by whom and in which order it was
drawn; multi-step sampling is then biased (total variation 0.07 to 0.13 on small examples). Here nodes are shared, for
compute, and draws never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specinfer_vllm.tree.paths import jump_tables, path_sum, preorder
from specinfer_vllm.tree.topology import TokenTrees, depth_first


def merge(trees: Sequence[TokenTrees]) -> TokenTrees:
    """Union of the inputs' trees, request by request, in depth-first order.

    The inputs cover the same requests in the same order and agree on the roots' tokens. A node that several inputs hold
    takes the highest of their scores. A request's draws are those of the first input, then those of the second, and so
    on, each in its own order and with its own owner. ValueError: no input, another number of requests, another root.
    """
    _check_same_requests(trees)
    # A proposer often has nothing to say in a step; its roots are everybody's roots.
    growing = [batch for batch in trees if batch.num_rows > batch.num_requests] or trees[:1]
    return depth_first(growing[0]) if len(growing) == 1 else _union(_stack(growing))


@dataclass
class _Stack:
    """The rows of all inputs, input after input ("stacked"); `rows` counts these.

    tokens, depth [rows] int32; score [rows] float32; request, parent_row [rows] int64, a root is its own parent;
    root_rows [inputs, requests] int64; draw_offsets [requests + 1] int64; draw_row [draws] int64 and draw_owner [draws]
    int16, draw_law [draws] int32 request after request already, and inside a request input after input.
    """

    tokens: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    request: np.ndarray
    parent_row: np.ndarray
    root_rows: np.ndarray
    max_depth: int
    draw_offsets: np.ndarray
    draw_row: np.ndarray
    draw_owner: np.ndarray
    draw_law: np.ndarray


def _check_same_requests(trees: Sequence[TokenTrees]) -> None:
    if not trees:
        raise ValueError("trees: nothing to merge, give at least one batch of trees")
    first = trees[0]
    root_tokens = first.tokens.take(first.offsets[:-1])
    for i, other in enumerate(trees[1:], start=1):
        if other.num_requests != first.num_requests:
            raise ValueError(f"trees[{i}]: has {other.num_requests} requests where trees[0] has {first.num_requests}")
        if np.count_nonzero(wrong := other.tokens.take(other.offsets[:-1]) != root_tokens):
            request = int(wrong.argmax())
            here, there = other.tokens[other.offsets[request]], root_tokens[request]
            raise ValueError(
                f"trees[{i}].tokens: request {request} has root {here} where trees[0] has {there}; "
                "all must propose behind the same committed token"
            )


def _stack(trees: Sequence[TokenTrees]) -> _Stack:
    requests = trees[0].num_requests
    counts = np.concatenate([batch.rows_per_request for batch in trees])
    root_rows = np.add.accumulate(counts)
    root_rows -= counts
    parent_row = np.concatenate([batch.parent for batch in trees]) + root_rows.repeat(counts)
    parent_row[root_rows] = root_rows
    draw_counts = np.concatenate([batch.draws_per_request for batch in trees])
    draw_row = np.concatenate([batch.draw_node for batch in trees]) + root_rows.repeat(draw_counts)
    draw_offsets, draws = _request_after_request(draw_counts.reshape(len(trees), requests))
    return _Stack(
        tokens=np.concatenate([batch.tokens for batch in trees]),
        depth=np.concatenate([batch.depth for batch in trees]),
        score=np.concatenate([batch.score for batch in trees]),
        request=np.concatenate([np.arange(requests)] * len(trees)).repeat(counts),
        parent_row=parent_row,
        root_rows=root_rows.reshape(len(trees), requests),
        max_depth=max([batch.max_depth for batch in trees]),
        draw_offsets=draw_offsets,
        draw_row=draw_row.take(draws),
        draw_owner=np.concatenate([batch.draw_owner for batch in trees]).take(draws),
        draw_law=np.concatenate([batch.draw_law for batch in trees]).take(draws),
    )


def _request_after_request(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [requests + 1], order) that bring items from input after input into request after request.

    counts [inputs, requests] int64 of items; inside a request they stay input after input.
    """
    inputs, requests = counts.shape
    taken_from = np.add.accumulate(counts.ravel()).reshape(inputs, requests) - counts
    counts = counts.T.ravel()
    ends = np.zeros(len(counts) + 1, np.int64)
    np.add.accumulate(counts, out=ends[1:])
    return ends[::inputs], np.arange(ends[-1]) + (taken_from.T.ravel() - ends[:-1]).repeat(counts)


def _union(stack: _Stack) -> TokenTrees:
    """One row for each path of the stack, depth-first."""
    leader, score = _leaders(stack)
    leads = leader == np.arange(len(leader))
    # Parents still stand before children among the leaders, since a leader is the earliest of its kind.
    stacked = leads.nonzero()[0]
    union = (np.add.accumulate(leads, dtype=np.int64) - 1).take(leader)  # stacked row -> row among the leaders
    parent_row = union.take(stack.parent_row.take(stacked))
    request = stack.request.take(stacked)
    counts = np.bincount(request, minlength=stack.root_rows.shape[1])
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.add.accumulate(counts, out=offsets[1:])
    jumps = jump_tables(parent_row, stack.max_depth)
    place = preorder(parent_row, score.take(stacked), jumps, union.take(stack.root_rows[0]), counts)

    local = place.astype(np.int32)
    order = np.empty(len(stacked), np.int64)
    order[place + offsets.take(request)] = np.arange(len(stacked))
    parent = local.take(parent_row.take(order))
    parent[offsets[:-1]] = -1
    rows = stacked.take(order)
    merged = TokenTrees(
        offsets,
        stack.tokens.take(rows),
        parent,
        stack.depth.take(rows),
        score.take(rows),
        stack.draw_offsets,
        local.take(union.take(stack.draw_row)),
        stack.draw_owner,
        stack.draw_law,
    )
    merged.__dict__.update(is_depth_first=True, rows_per_request=counts, max_depth=stack.max_depth)
    return merged


def _leaders(stack: _Stack) -> tuple[np.ndarray, np.ndarray]:
    """For each row the earliest row with the same request and path, and at the leaders their kind's highest score.

    Rows are grouped by a 64-bit fingerprint of request and path, and the groups are then checked exactly: the result
    never rests on the fingerprint. A false match, about rows^2 / 2^64 likely, costs another round with another salt.
    """
    step = (stack.depth.astype(np.int64) << 32) | stack.tokens
    # As many roots as there are requests stand for these; that paths meet their root several times does no harm.
    step[stack.root_rows] = ~np.arange(stack.root_rows.shape[1])
    jumps = jump_tables(stack.parent_row, stack.max_depth)
    for salt in count():
        leader, score = _grouped(path_sum(_scramble(step, salt), jumps), stack.score)
        if _same_paths(leader, step, stack.parent_row):
            break
    # Scores of one input never rise along a path, thus neither does the highest of several inputs' scores.
    return leader, score


def _grouped(mark: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row the earliest row with its mark; scores with the highest of all rows with that mark put there."""
    leader, score = np.empty(len(mark), np.int64), score.copy()
    if not len(mark):
        return leader, score
    order = mark.argsort()
    marks = mark.take(order)
    new = np.ones(len(mark), bool)
    np.not_equal(marks[1:], marks[:-1], out=new[1:])
    starts = new.nonzero()[0]
    firsts = np.minimum.reduceat(order, starts)
    leader[order] = firsts.take(np.add.accumulate(new, dtype=np.int64) - 1)
    score[firsts] = np.maximum.reduceat(score.take(order), starts)
    return leader, score


def _same_paths(leader: np.ndarray, step: np.ndarray, parent_row: np.ndarray) -> bool:
    """Whether each row takes its leader's step, from a parent with the same leader: then, by induction, paths agree.

    step [rows] int64 tells roots from nodes, requests' roots from each other, and nodes' tokens from each other.
    """
    parents = leader.take(parent_row)
    return not np.count_nonzero(step.take(leader) != step) and not np.count_nonzero(parents.take(leader) != parents)


_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)


def _scramble(values: np.ndarray, salt: int) -> np.ndarray:
    """Bits of `values` [n] int64 spread over 64 bits (uint64), another way for each salt (multiply, fold, multiply)."""
    bits = (values.view(np.uint64) + np.uint64(salt)) * _ODD
    bits ^= bits >> _HALF
    bits *= _MIXER
    bits ^= bits >> _HALF
    return bits
