# SPDX-License-Identifier: Apache-2.0
"""Draft-free trees one node at a time, in Python numbers: chances as sums of float64 logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specinfer_vllm.triton_kernels.recycle import ANY_TOKEN, CONTEXT, LEAST, PLACES, SURE, WINDOW, Grown, Primer

BITS, MIX = 64, -7046029254386353131

# Tokens behind a context, nearest token first, and their votes, -1 = none; and all votes. None: nobody votes.
Ballot = tuple[Sequence[int], Sequence[float], float]
Voters = Callable[[list[int]], Ballot | None]


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
    weight: torch.Tensor,
    *,
    max_depth: int,
    out: Grown,
    primer: Primer | None = None,
    vocab: int = ANY_TOKEN,
    margin: torch.Tensor | None = None,
) -> Grown:
    """Tensors as in the kernel's contract.

    margin [requests] float64, written when given: how far the closest two scores between which the request's tree
    decided are apart, inf without a decision. Whoever computes scores with a smaller error grows the same tree.
    """
    ring, votes = place.shape[1], weight.tolist()

    def voters(text: list[int], owner: int) -> Voters:
        def vote(context: list[int]) -> Ballot | None:
            at, matched = _latest_longest(text, context)
            here = None
            if matched and int(place[owner, at % ring]) == at:
                says = zip(successors[owner, at % ring].tolist(), chances[owner, at % ring].tolist(), strict=True)
                here = _ballot([(token, votes[matched - 1] * chance) for token, chance in says], votes[matched - 1])
            elif matched:
                here = _ballot([(text[at + 1], votes[matched - 1])], votes[matched - 1])
            return here if primer is None else _joined(here, _longest_known(primer, context))

        return vote

    width = successors.shape[2]
    return _grow_all(history, length, slot, voters, branches, last, max_depth, out, vocab, margin, width)


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
    margin: torch.Tensor | None = None,
) -> Grown:
    """As `recycle`, from the texts alone."""
    votes = weight.tolist()

    def voters(text: list[int], owner: int) -> Voters:
        def vote(context: list[int]) -> Ballot | None:
            found, total = {}, 0.0
            for matched, at in sorted(_matches(text, context), reverse=True):
                total += votes[matched - 1]
                if text[at + 1] in found or len(found) < PLACES:
                    found[text[at + 1]] = found.get(text[at + 1], 0.0) + votes[matched - 1]
            return _ballot(list(found.items()), total) if found else None

        return vote

    return _grow_all(history, length, slot, voters, branches, last, max_depth, out, vocab, margin, PLACES)


def _grow_all(history, length, slot, voters, branches, last, max_depth, out, vocab, margin, width) -> Grown:
    """Every request's tree; voters(text, slot) are a text's, width = most children of a node."""
    nodes = out.tokens.shape[1]
    for request, owner in enumerate(slot.tolist()):
        size, widest = int(length[owner]), min(int(branches[owner]), width)
        deepest = min(max_depth, int(last[owner]) - size - 1)
        text = history[owner, :size].tolist()
        grown, closest = grow(text, voters(text, owner), nodes, widest, deepest, vocab)
        fields = (out.tokens, out.parent, out.score, out.depth, out.path)
        behind = Node(-1, 0, -math.inf, 1, 0)
        for at, node in enumerate(grown + [behind] * (nodes - len(grown))):
            for field, value in zip(fields, (node.token, node.above, node.score, node.depth, node.path), strict=True):
                field[request, at] = value
        if margin is not None:
            margin[request] = closest
    return out


def grow(
    text: Sequence[int], vote: Voters, nodes: int, widest: int, deepest: int, vocab: int
) -> tuple[list[Node], float]:
    """(the best nodes of a text's tree, best first; distance of the closest decision)."""
    root = Node(text[-1] if len(text) else -1, 0, 0.0, 0, 0)
    tree, candidates, closest = [root], [], math.inf
    while len(tree) <= nodes and len(text) and widest > 0:
        node = tree[-1]
        if node.depth < deepest:
            children = _children(tree, text, vote, vocab)
            closest = min([closest, *(abs(child.score - LEAST.value) for child in children)])
            children = [child for child in children if child.score >= LEAST.value]
            if len(children) > widest:
                closest = min(closest, children[widest - 1].score - children[widest].score)
            candidates += children[:widest]
        if not candidates:
            break
        best = max(candidates, key=lambda candidate: candidate.score)  # of equal ones the earlier
        candidates.remove(best)
        closest = min([closest, *(best.score - other.score for other in candidates)])
        tree.append(best)
    return tree[1:], closest


def _children(tree: list[Node], text: Sequence[int], vote: Voters, vocab: int) -> list[Node]:
    """The children of the newest node, best first."""
    node, number = tree[-1], len(tree) - 1
    tokens, votes, total = vote(_context(tree, text)) or ([], [], 1.0)
    children = [
        Node(
            token,
            number,
            node.score + math.log(max(1e-30, min(cast / (1 + total), SURE.value))),
            node.depth + 1,
            path_of(node.path, token),
        )
        for token, cast in zip(tokens, votes, strict=True)
        if 0 <= token < vocab
    ]
    return sorted(children, key=lambda child: -child.score)


def _ballot(votes: list[tuple[int, float]], total: float) -> Ballot:
    """Votes by token; what is no number counts as 0."""
    return [token for token, _ in votes], [cast if cast > 0 else 0.0 for _, cast in votes], total


def _joined(one: Ballot | None, other: Ballot | None) -> Ballot | None:
    """The votes of both: a token stands where it stood first."""
    if one is None or other is None:
        return one or other
    votes: dict[int, float] = {}
    for token, cast in [*zip(*one[:2], strict=True), *zip(*other[:2], strict=True)]:
        if token >= 0:
            votes[token] = votes.get(token, 0.0) + cast
    return list(votes), list(votes.values()), one[2] + other[2]


def _longest_known(primer: Primer, context: list[int]) -> Ballot | None:
    """What is said behind the longest context that the primer knows, whatever bucket it is in."""
    number, found = 0, None
    for token in context:
        number = path_of(number, token)
        for row in (primer.keys == number).nonzero()[:, 0].tolist():
            found = row
    if found is None:
        return None
    return primer.tokens[found].tolist(), primer.votes[found].tolist(), float(primer.total[found])


def _context(tree: list[Node], text: Sequence[int]) -> list[int]:
    """The last CONTEXT tokens at the newest node, nearest first; -1 in front of the text."""
    node, path = tree[-1], []
    while node.depth:
        path.append(node.token)
        node = tree[node.above]
    return [*path, *reversed(text[-CONTEXT:]), *[-1] * CONTEXT][:CONTEXT]


def _matches(text: Sequence[int], context: list[int]) -> list[tuple[int, int]]:
    """(equal tokens, place) of all places in the window whose token is the context's."""
    found = []
    for at in range(max(0, len(text) - WINDOW), len(text) - 1):
        if text[at] == context[0]:
            matched = 1
            while matched < CONTEXT and matched <= at and text[at - matched] == context[matched]:
                matched += 1
            found.append((matched, at))
    return found


def _latest_longest(text: Sequence[int], context: list[int]) -> tuple[int, int]:
    """(place, equal tokens) of the longest context equal to this one, of these the latest; 0 equal = there is none."""
    matched, at = max(_matches(text, context), default=(0, -1))
    return at, matched


def path_of(above: int, token: int) -> int:
    """A child's path number from its parent's and its token, in 64 signed bits; the root's is 0."""
    mixed = _signed((above ^ (token + 1)) * MIX)
    return mixed ^ (mixed >> 29)


def _signed(number: int) -> int:
    """The number's lowest 64 bits as a signed number."""
    return (number + (1 << BITS - 1)) % (1 << BITS) - (1 << BITS - 1)
