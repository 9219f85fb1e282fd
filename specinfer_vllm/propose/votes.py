# SPDX-License-Identifier: Apache-2.0
"""Best-first trees from votes: every earlier place that looks like this one says what came next there.

In    the committed tokens of each request, and rows of the LLM's best next tokens (SuccessorRows): its own, a primer's
      voters at a node = the places whose last tokens equal the node's, 1 of them at least, found most recent first
Out   per request the nodes with the highest estimated chance that their whole path is accepted, best first

A place in the text votes for the token behind it; a row votes for its successors, each by its probability. A vote
weighs weight * growth^(m - 1) * fade^(voters of its kind before it) for m equal tokens. The estimate for a child is its
share of all votes and of `doubt`, the weight of what nobody voted for. So one long match silences many short ones, and
where only short matches exist they are weighed against each other. The context of a node is its path and the text in
front of it: a path that one voter proposed may be continued by another.

Time per request: one pass over the last WINDOW tokens, then at most TEXT_VOTERS + 2 * ROW_VOTERS short looks per node.
Nothing is kept between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from specinfer_vllm.propose.proposer import DraftBatch
from specinfer_vllm.propose.successors import CONTEXT, UNIT, Rows, bucket_of
from specinfer_vllm.tree.topology import TokenTrees

WINDOW = 16384  # tokens looked back in the text
MAX_MATCH = 16  # equal tokens beyond which a match counts no more
TEXT_VOTERS = 128
ROW_VOTERS = 32
LOOKS = 4  # places looked at per voter at most: a bucket also holds other tokens
BUCKETS = 8192
CANDIDATES = 128  # different tokens voted for at one node
PLACES = 512  # size of the hash of the candidates
SURE = 0.94  # the highest estimate for one child: of long matches, too, one in sixteen went wrong
LEAST = 1e-3  # paths with a smaller estimated chance are not worth a node


class Weights(NamedTuple):
    """How much each kind of voter says. A weight of 0 leaves the kind out."""

    doubt: float
    text: float = 0.0
    text_growth: float = 1.0
    text_fade: float = 1.0
    own: float = 0.0
    own_growth: float = 1.0
    own_fade: float = 1.0
    primer: float = 0.0
    primer_growth: float = 1.0
    primer_fade: float = 1.0


def grow(
    batch: DraftBatch, weights: Weights, own: Rows, owners: np.ndarray, primer: Rows, vocab_size: int
) -> TokenTrees:
    """One tree per request, nodes best first.

    own, primer  rows to ask; of `own` a request sees those of owners[i] [requests] int64, of `primer` those of NOBODY
    vocab_size   tokens from here on are never proposed
    """
    requests = batch.num_requests
    limits = np.where((batch.lengths > 0) & (batch.max_depth > 0), np.maximum(batch.max_nodes, 0), 0).astype(np.int64)
    capacity = requests + int(limits.sum())
    tokens = np.empty(capacity, np.int32)
    parent = np.empty(capacity, np.int32)
    depth = np.empty(capacity, np.int32)
    score = np.empty(capacity, np.float32)
    offsets = np.zeros(requests + 1, np.int64)
    _grow_batch(
        batch.history,
        batch.rows,
        batch.lengths,
        batch.max_depth,
        limits,
        weights,
        own,
        owners,
        primer,
        vocab_size,
        offsets,
        tokens,
        parent,
        depth,
        score,
    )
    rows = int(offsets[-1])
    return with_one_draw_each(offsets, tokens[:rows], parent[:rows], depth[:rows], score[:rows])


def with_one_draw_each(
    offsets: np.ndarray, tokens: np.ndarray, parent: np.ndarray, depth: np.ndarray, score: np.ndarray
) -> TokenTrees:
    """Trees whose nodes carry one draw each, by proposer 0. Arrays as in TokenTrees."""
    local = np.arange(len(tokens)) - np.repeat(offsets[:-1], offsets[1:] - offsets[:-1])
    nodes = local[local > 0].astype(np.int32)
    draws = offsets - np.arange(len(offsets))
    owner, law = np.zeros(len(nodes), np.int16), np.full(len(nodes), -1, np.int32)
    return TokenTrees(offsets, tokens, parent, depth, score, draws, nodes, owner, law)


@numba.njit(cache=True, nogil=True)
def _grow_batch(
    history,
    rows,
    lengths,
    max_depth,
    limits,
    weights,
    own,
    owners,
    primer,
    vocab_size,
    offsets,
    tokens,
    parent,
    depth,
    score,
):
    widest, longest = 0, 0
    for i in range(len(rows)):
        if limits[i] > 0:
            widest = max(widest, limits[i])
            longest = max(longest, min(lengths[i], WINDOW))
    chain = np.empty(longest, np.int32)  # per place of the text: the one before it in the same bucket
    newest = np.empty(BUCKETS, np.int32)
    heap = Heap(
        np.empty(widest * CANDIDATES, np.float64),
        np.empty(widest * CANDIDATES, np.int64),
        np.empty(widest * CANDIDATES, np.int32),
        np.empty(widest * CANDIDATES, np.int32),
    )
    ballot = Ballot(np.empty(CANDIDATES, np.int32), np.empty(CANDIDATES, np.float64), np.empty(PLACES, np.int16))
    for i in range(len(rows)):
        start = offsets[i]
        text = history[rows[i], max(0, lengths[i] - WINDOW) : max(0, lengths[i])]
        tokens[start] = text[-1] if len(text) else 0
        parent[start], depth[start], score[start] = -1, 0, 0.0
        nodes = 0
        if limits[i] > 0:
            if weights.text > 0:
                _link(text, chain, newest)
            nodes = _grow_one(
                text,
                chain,
                newest,
                max_depth[i],
                limits[i],
                weights,
                own,
                owners[i],
                primer,
                vocab_size,
                heap,
                ballot,
                tokens[start:],
                parent[start:],
                depth[start:],
                score[start:],
            )
        offsets[i + 1] = start + 1 + nodes


class Heap(NamedTuple):
    """Nodes that may be taken next.

    score [n] float64, serial [n] int64 (which of equal ones came first), token and parent [n] int32
    """

    score: np.ndarray
    serial: np.ndarray
    token: np.ndarray
    parent: np.ndarray


class Ballot(NamedTuple):
    """The votes at one node.

    token [CANDIDATES] int32, votes [CANDIDATES] float64, their hash: place [PLACES] int16, -1 where empty
    """

    token: np.ndarray
    votes: np.ndarray
    place: np.ndarray


@numba.njit(cache=True, nogil=True)
def _bucket(token):
    return ((np.int64(token) * 0x9E3779B1) & 0xFFFFFFFF) >> 19  # the top 13 of 32 bits: BUCKETS


@numba.njit(cache=True, nogil=True)
def _link(text, chain, newest):
    newest[:] = -1
    for at in range(len(text)):
        bucket = _bucket(text[at])
        chain[at] = newest[bucket]
        newest[bucket] = at


@numba.njit(cache=True, nogil=True)
def _grow_one(
    text,
    chain,
    newest,
    max_depth,
    limit,
    weights,
    own,
    owner,
    primer,
    vocab_size,
    heap,
    ballot,
    tokens,
    parent,
    depth,
    score,
):
    """Fill in the tree behind its root, return its number of nodes."""
    context = np.empty(MAX_MATCH, np.int32)
    size, serial, node, nodes = 0, 0, 0, 0
    exact = np.zeros(limit + 1, np.float64)
    while True:
        if depth[node] < max_depth:
            length = _context(text, tokens, parent, node, context)
            candidates, total = _vote(
                text, chain, newest, context, length, weights, own, owner, primer, vocab_size, ballot
            )
            for c in range(candidates):
                chance = exact[node] + np.log(min(ballot.votes[c] / total, SURE))
                if chance >= np.log(LEAST):
                    size = _push(heap, size, chance, serial, ballot.token[c], node)
                    serial += 1
        if size == 0:
            return nodes
        nodes += 1
        node = nodes
        tokens[node], parent[node] = heap.token[0], heap.parent[0]
        depth[node] = depth[parent[node]] + 1
        exact[node] = heap.score[0]
        score[node] = exact[node]
        if nodes == limit:
            return nodes
        size = _pop(heap, size)


@numba.njit(cache=True, nogil=True)
def _context(text, tokens, parent, node, context):
    """The last tokens at a node, nearest first; returns how many there are."""
    length = 0
    while node > 0 and length < MAX_MATCH:
        context[length] = tokens[node]
        node = parent[node]
        length += 1
    at = len(text) - 1
    while at >= 0 and length < MAX_MATCH:
        context[length] = text[at]
        at -= 1
        length += 1
    return length


@numba.njit(cache=True, nogil=True)
def _vote(text, chain, newest, context, length, weights, own, owner, primer, vocab_size, ballot):
    """(candidates, weight of all votes and of doubt)."""
    ballot.place[:] = -1
    total, count = weights.doubt, 0
    if weights.text > 0:
        weight, count = _text_votes(
            text,
            chain,
            newest,
            context,
            length,
            weights.text,
            weights.text_growth,
            weights.text_fade,
            vocab_size,
            ballot,
            count,
        )
        total += weight
    if weights.own > 0:
        weight, count = _row_votes(
            own, owner, context, length, weights.own, weights.own_growth, weights.own_fade, ballot, count
        )
        total += weight
    if weights.primer > 0:
        weight, count = _row_votes(
            primer, 0, context, length, weights.primer, weights.primer_growth, weights.primer_fade, ballot, count
        )
        total += weight
    return count, total


@numba.njit(cache=True, nogil=True)
def _text_votes(text, chain, newest, context, length, weight, growth, fade, vocab_size, ballot, count):
    total, voters = 0.0, 0
    at = newest[_bucket(context[0])]
    for _ in range(TEXT_VOTERS * LOOKS):
        if at < 0 or voters == TEXT_VOTERS:
            break
        if text[at] == context[0] and at + 1 < len(text):
            match, vote = 1, weight
            while match < length and match <= at and text[at - match] == context[match]:
                match += 1
                vote *= growth
            weight *= fade
            voters += 1
            total += vote
            if 0 <= text[at + 1] < vocab_size:
                count = _cast(ballot, count, text[at + 1], vote)
        at = chain[at]
    return total, count


@numba.njit(cache=True, nogil=True)
def _row_votes(rows, owner, context, length, weight, growth, fade, ballot, count):
    total, voters, capacity = 0.0, 0, len(rows.owner)
    number = rows.newest[bucket_of(owner, context[0], len(rows.newest))]
    for _ in range(ROW_VOTERS * LOOKS):
        # A number this old has been overwritten, and with it the rest of the chain.
        if number < 0 or number < rows.written[0] - capacity or voters == ROW_VOTERS:
            break
        at = number % capacity
        if rows.owner[at] == owner and rows.context[at, 0] == context[0]:
            match, vote = 1, weight
            while match < min(length, CONTEXT) and rows.context[at, match] == context[match]:
                match += 1
                vote *= growth
            weight *= fade
            voters += 1
            total += vote
            for k in range(rows.successors.shape[1]):
                if rows.successors[at, k] < 0:
                    break
                count = _cast(ballot, count, rows.successors[at, k], vote * rows.probabilities[at, k] / UNIT)
        number = rows.older[at]
    return total, count


@numba.njit(cache=True, nogil=True)
def _cast(ballot, count, token, vote):
    """Add a vote, return the number of candidates. A full ballot takes no new candidates."""
    place = ((np.int64(token) * 0x9E3779B1) & 0xFFFFFFFF) >> 23  # the top 9 of 32 bits: PLACES
    while ballot.place[place] >= 0:
        if ballot.token[ballot.place[place]] == token:
            ballot.votes[ballot.place[place]] += vote
            return count
        place = (place + 1) % PLACES
    if count < CANDIDATES:
        ballot.place[place] = count
        ballot.token[count] = token
        ballot.votes[count] = vote
        count += 1
    return count


@numba.njit(cache=True, nogil=True)
def _push(heap, size, score, serial, token, parent):
    at = size
    while at > 0:
        above = (at - 1) // 2
        if heap.score[above] >= score:  # equal ones above came earlier
            break
        _move(heap, above, at)
        at = above
    heap.score[at], heap.serial[at], heap.token[at], heap.parent[at] = score, serial, token, parent
    return size + 1


@numba.njit(cache=True, nogil=True)
def _pop(heap, size):
    size -= 1
    score, serial, token, parent = heap.score[size], heap.serial[size], heap.token[size], heap.parent[size]
    at, below = 0, 1
    while below < size:
        if below + 1 < size and _before(heap, below + 1, heap.score[below], heap.serial[below]):
            below += 1
        if not _before(heap, below, score, serial):
            break
        _move(heap, below, at)
        at, below = below, 2 * below + 1
    heap.score[at], heap.serial[at], heap.token[at], heap.parent[at] = score, serial, token, parent
    return size


@numba.njit(cache=True, nogil=True)
def _before(heap, at, score, serial):
    return heap.score[at] > score or (heap.score[at] == score and heap.serial[at] < serial)


@numba.njit(cache=True, nogil=True)
def _move(heap, source, target):
    heap.score[target], heap.serial[target] = heap.score[source], heap.serial[source]
    heap.token[target], heap.parent[target] = heap.token[source], heap.parent[source]
