# SPDX-License-Identifier: Apache-2.0
"""The union of several proposers' trees (SpecInfer, Definition 3.2), every draw kept.

The definition read literally keeps each sequence once and so forgets how often, by whom and in which order it was drawn; multi-step sampling is then
biased (total variation 0.07 to 0.13 on small examples). Here nodes are shared, for compute, and draws never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from specinfer_vllm.tree.paths import jump_tables, path_sum, preorder
from specinfer_vllm.tree.topology import TokenTrees, depth_first


def merge(trees: Sequence[TokenTrees]) -> TokenTrees:
    """Union of the inputs' trees, request by request, in depth-first order.

    The inputs cover the same requests in the same order and agree on the roots' tokens. A node that several inputs hold takes the highest of their
    scores. A request's draws are those of the first input, then those of the second, and so on, each in its own order and with its own owner.
    ValueError: no input, another number of requests, another root.
    """
    _check_same_requests(trees)
    # A proposer often has nothing to say in a step; its roots are everybody's roots.
    growing = [batch for batch in trees if batch.num_rows > batch.num_requests] or trees[:1]
    return depth_first(growing[0]) if len(growing) == 1 else _union(growing)


def _check_same_requests(trees: Sequence[TokenTrees]) -> None:
    if not trees:
        raise ValueError("trees: nothing to merge, give at least one batch of trees")
    first = trees[0]
    root_tokens = first.tokens.take(first.offsets[:-1])
    for i, other in enumerate(trees[1:], start=1):
        if other.num_requests != first.num_requests:
            raise ValueError(f"trees[{i}]: has {other.num_requests} requests where trees[0] has {first.num_requests}")
        if (wrong := other.tokens.take(other.offsets[:-1]) != root_tokens).any():
            request = int(np.argmax(wrong))
            here, there = other.tokens[other.offsets[request]], root_tokens[request]
            raise ValueError(
                f"trees[{i}].tokens: request {request} has root {here} where trees[0] has {there}; all must propose for one committed token"
            )


def _union(trees: Sequence[TokenTrees]) -> TokenTrees:
    """Merge of inputs that are known to fit together. "Stacked" rows are the rows of all inputs, input after input."""
    requests, max_depth = trees[0].num_requests, max(batch.max_depth for batch in trees)
    shift = np.cumsum([0] + [batch.num_rows for batch in trees])
    parent_row = np.concatenate([batch.parent_row + base for batch, base in zip(trees, shift, strict=False)])
    root_rows = np.concatenate([batch.offsets[:-1] + base for batch, base in zip(trees, shift, strict=False)])
    tokens = np.concatenate([batch.tokens for batch in trees])
    depth = np.concatenate([batch.depth for batch in trees])
    score = np.concatenate([batch.score for batch in trees])
    request = np.concatenate([batch.request for batch in trees])

    leader, score = _leaders(tokens, depth, score, request, parent_row, root_rows, jump_tables(parent_row, max_depth))
    leads = leader == np.arange(len(tokens))
    stacked = np.flatnonzero(
        leads
    )  # the union's nodes; parents still stand before children, since a leader is the earliest of its kind
    union = (np.cumsum(leads) - 1).take(leader)  # stacked row -> union row
    parent_row = union.take(parent_row.take(stacked))
    request = request.take(stacked)
    counts = np.bincount(request, minlength=requests)
    offsets = np.zeros(requests + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    jumps = jump_tables(parent_row, max_depth)
    place = preorder(parent_row, score.take(stacked), jumps, union.take(root_rows[:requests]), counts)

    local = place.astype(np.int32)
    order = np.empty(len(stacked), np.int64)
    order[place + offsets.take(request)] = np.arange(len(stacked))
    parent = local.take(parent_row.take(order))
    parent[offsets[:-1]] = -1
    rows = stacked.take(order)
    draw_rows = np.concatenate([batch.draw_row + base for batch, base in zip(trees, shift, strict=False)])
    draw_offsets, draws = _draws_by_request(trees)
    merged = TokenTrees(
        offsets,
        tokens.take(rows),
        parent,
        depth.take(rows),
        score.take(rows),
        draw_offsets,
        local.take(union.take(draw_rows.take(draws))),
        np.concatenate([batch.draw_owner for batch in trees]).take(draws),
    )
    merged.__dict__.update(is_depth_first=True, rows_per_request=counts)
    return merged


def _leaders(
    tokens: np.ndarray,
    depth: np.ndarray,
    score: np.ndarray,
    request: np.ndarray,
    parent_row: np.ndarray,
    root_rows: np.ndarray,
    jumps: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """(leader, score) [rows]: the earliest row with the same request and path, and the highest score of all such rows.

    Rows are grouped by a 64-bit fingerprint of their path, and the groups are then checked exactly: the result never rests on the fingerprint. A false
    match, about rows^2 / 2^64 likely, costs another round with another salt.
    """
    step = (depth.astype(np.int64) << 32) | tokens
    for salt in count():
        mark = _scramble(step, salt)
        mark[root_rows] = 0
        mark = path_sum(mark, jumps) + _scramble(request, salt)
        leader, best = _grouped(mark, score)
        if _same_paths(leader, step, request, parent_row, root_rows):
            # Scores of one input never rise along a path, thus neither does the highest of several inputs' scores.
            return leader, best
    raise AssertionError("unreachable: count() has no end")


def _grouped(mark: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row the earliest row with its mark, and the highest score among the rows with its mark."""
    order = np.argsort(mark)
    marks = mark.take(order)
    new = np.empty(len(mark), bool)
    new[:1] = True
    np.not_equal(marks[1:], marks[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    group = np.empty(len(mark), np.int64)
    group[order] = np.cumsum(new) - 1
    if not len(starts):
        return group, score
    return np.minimum.reduceat(order, starts).take(group), np.maximum.reduceat(score.take(order), starts).take(group)


def _same_paths(
    leader: np.ndarray, step: np.ndarray, request: np.ndarray, parent_row: np.ndarray, root_rows: np.ndarray
) -> bool:
    """Whether each row carries its leader's request, depth and token, and hangs on a parent with the same leader: then their paths agree, by induction."""
    parents = leader.take(parent_row)
    return bool(
        (step.take(leader) == step).all()
        and (parents.take(leader) == parents).all()
        and (request.take(leader.take(root_rows)) == request.take(root_rows)).all()
    )


def _scramble(values: np.ndarray, salt: int) -> np.ndarray:
    """Bits of `values` [n] int64 spread over 64 bits (uint64), another way for each salt: the finalizer of splitmix64."""
    bits = values.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (salt + 1)) % (1 << 64))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _draws_by_request(trees: Sequence[TokenTrees]) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [requests + 1], draws): the stacked draws request after request, and inside a request input after input."""
    counts = np.stack([np.diff(batch.draw_offsets) for batch in trees])  # [inputs, requests]
    offsets = np.zeros(counts.shape[1] + 1, np.int64)
    np.cumsum(counts.sum(axis=0), out=offsets[1:])
    starts = offsets[:-1] + np.cumsum(counts, axis=0) - counts
    flat = counts.ravel()
    total = int(offsets[-1])
    places = np.arange(total) + np.repeat(starts.ravel() - (np.cumsum(flat) - flat), flat)
    draws = np.empty(total, np.int64)
    draws[places] = np.arange(total)
    return offsets, draws
