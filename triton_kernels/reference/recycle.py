# SPDX-License-Identifier: Apache-2.0
"""Token recycling one node at a time, in Python numbers: chances as sums of float64 logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specinfer_vllm.triton_kernels.recycle import CONTEXT, LEAST, WINDOW, Grown

BITS, MIX = 64, -7046029254386353131

# Of a place in the text: (tokens, chances), best first, or None where nothing was recorded.
Rows = Callable[[int], "tuple[Sequence[int], Sequence[float]] | None"]


@dataclass(frozen=True)
class Node:
    """A node, or a candidate to become one; above = number of its parent, 0 = the root."""

    token: int
    above: int
    score: float
    depth: int
    path: int


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
    margin: torch.Tensor | None = None,
) -> Grown:
    """Tensors as in the kernel's contract.

    margin [requests] float64, written when given: how far the closest two scores between which the request's tree
    decided are apart, inf without a decision. Whoever computes scores with a smaller error grows the same tree.
    """
    nodes, ring = out.tokens.shape[1], place.shape[1]
    for request, owner in enumerate(slot.tolist()):
        size, widest = int(length[owner]), int(branches[owner])

        def recorded(at: int, owner: int = owner):
            if int(place[owner, at % ring]) != at:
                return None
            return successors[owner, at % ring].tolist(), chances[owner, at % ring].tolist()

        deepest = min(max_depth, int(last[owner]) - size - 1)
        text = history[owner, :size].tolist()
        grown, closest = grow(text, recorded, trust.tolist(), nodes, widest, deepest)
        fields = (out.tokens, out.parent, out.score, out.depth, out.path)
        behind = Node(-1, 0, -math.inf, 1, 0)
        for at, node in enumerate(grown + [behind] * (nodes - len(grown))):
            for field, value in zip(fields, (node.token, node.above, node.score, node.depth, node.path), strict=True):
                field[request, at] = value
        if margin is not None:
            margin[request] = closest
    return out


def grow(
    text: Sequence[int], recorded: Rows, trust: Sequence[float], nodes: int, widest: int, deepest: int
) -> tuple[list[Node], float]:
    """(the best nodes of a text's tree, best first; distance of the closest decision)."""
    root = Node(text[-1] if len(text) else -1, 0, 0.0, 0, 0)
    tree, candidates, closest = [root], [], math.inf
    while len(tree) <= nodes and len(text) and widest > 0:
        node = tree[-1]
        if node.depth < deepest:
            children = _children(tree, text, recorded, trust, widest)
            closest = min([closest, *(abs(child.score - LEAST.value) for child in children)])
            candidates += [child for child in children if child.score >= LEAST.value]
        if not candidates:
            break
        best = max(candidates, key=lambda candidate: candidate.score)  # of equal ones the earlier
        candidates.remove(best)
        closest = min([closest, *(best.score - other.score for other in candidates)])
        tree.append(best)
    return tree[1:], closest


def _children(tree: list[Node], text: Sequence[int], recorded: Rows, trust: Sequence[float], widest: int) -> list[Node]:
    """The children of the newest node, best ranked first."""
    node, number = tree[-1], len(tree) - 1
    found = _latest_longest(text, _context(tree, text))
    if found is None:
        return []
    at, matched = found
    tokens, chances = recorded(at) or ([text[at + 1]], [1.0])
    return [
        Node(
            token,
            number,
            node.score + math.log(max(1e-30, chance * trust[matched - 1])),
            node.depth + 1,
            path_of(node.path, token),
        )
        for token, chance in list(zip(tokens, chances, strict=True))[:widest]
        if token >= 0
    ]


def _context(tree: list[Node], text: Sequence[int]) -> list[int]:
    """The last CONTEXT tokens at the newest node, nearest first; -1 in front of the text."""
    node, path = tree[-1], []
    while node.depth:
        path.append(node.token)
        node = tree[node.above]
    return [*path, *reversed(text[-CONTEXT:]), *[-1] * CONTEXT][:CONTEXT]


def _latest_longest(text: Sequence[int], context: list[int]) -> tuple[int, int] | None:
    """(place, equal tokens) of the longest context equal to this one, of these the latest; None without any."""
    best, first = (0, -1), max(0, len(text) - WINDOW)
    for at in range(len(text) - 2, first - 1, -1):
        if text[at] == context[0] and best[0] < CONTEXT:
            matched = 1
            while matched < CONTEXT and matched <= at and text[at - matched] == context[matched]:
                matched += 1
            best = max(best, (matched, at))
    return (best[1], best[0]) if best[0] else None


def path_of(above: int, token: int) -> int:
    """A child's path number from its parent's and its token, in 64 signed bits; the root's is 0."""
    mixed = _signed((above ^ (token + 1)) * MIX)
    return mixed ^ (mixed >> 29)


def _signed(number: int) -> int:
    """The number's lowest 64 bits as a signed number."""
    return (number + (1 << BITS - 1)) % (1 << BITS) - (1 << BITS - 1)
