# SPDX-License-Identifier: Apache-2.0
"""One batch of token trees as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer_vllm.tree.checks import (
    FLOAT32,
    INT16,
    INT32,
    INT64,
    as_floats,
    as_integers,
    check_depths,
    check_draws,
    check_layout,
    check_nodes,
    check_offsets,
    check_parents,
    per_request,
)
from specinfer_vllm.tree.paths import jump_tables, preorder

WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class TokenTrees:
    """One batch of token trees as flat numpy arrays, request after request.

    Row offsets[r] is the root of request r (its last committed token), the rows behind it are its proposed nodes;
    indices inside a request are local (root = 0). Parents stand before children, so every prefix of a request's rows
    is itself a tree. Siblings carry different tokens: a token drawn twice under one parent is one node with two draws.
    Every node carries at least one draw. Draws stand in the order in which they were drawn.

    offsets      [requests + 1] int64   rows of request r: offsets[r]:offsets[r+1], at least one (the root) each
    tokens       [rows] int32           token ids; a root's may be any number (it is known elsewhere)
    parent       [rows] int32           local index, -1 at a root
    depth        [rows] int32           0 at a root
    score        [rows] float32         log of the estimated chance that the whole path is accepted: 0 at a root, never
                                        rises along a path
    draw_offsets [requests + 1] int64   draws of request r: draw_offsets[r]:draw_offsets[r+1]
    draw_node    [draws] int32          local index of the node that carries the draw
    draw_owner   [draws] int16          proposer that made it, an index into the engine's list
    draw_law     [draws] int32          the law it was sampled from, a row of the step's draft laws; -1 = not sampled

    The constructor takes the arrays as they are, for callers that hold the invariants by construction; from_arrays
    casts and validates. Arrays are shared between batches and never written to after they are in one.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    draw_offsets: np.ndarray
    draw_node: np.ndarray
    draw_owner: np.ndarray
    draw_law: np.ndarray

    @property
    def num_requests(self) -> int:
        """Trees in the batch."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """Rows of all requests, the roots included."""
        return len(self.tokens)

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """Proposed nodes of each request [requests] int64, the root not counted."""
        return self.rows_per_request - 1

    @cached_property
    def rows_per_request(self) -> np.ndarray:
        """Rows of each request [requests] int64, the root counted."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def max_depth(self) -> int:
        """Longest path of the batch."""
        return int(self.depth.max()) if self.num_rows else 0

    @cached_property
    def request(self) -> np.ndarray:
        """Request of each row [rows] int64."""
        return np.arange(self.num_requests).repeat(self.rows_per_request)

    @cached_property
    def root_row(self) -> np.ndarray:
        """Row of each row's root [rows] int64."""
        return self.offsets[:-1].repeat(self.rows_per_request)

    @cached_property
    def local(self) -> np.ndarray:
        """Local index of each row [rows] int64."""
        return np.arange(self.num_rows) - self.root_row

    @cached_property
    def parent_row(self) -> np.ndarray:
        """Row of each row's parent [rows] int64, the own row at a root."""
        return _parent_row(self.offsets, self.parent, self.root_row)

    @cached_property
    def jumps(self) -> list[np.ndarray]:
        """Rows 1, 2, 4, ... levels up, as paths.jump_tables gives them."""
        return jump_tables(self.parent_row, self.max_depth)

    @cached_property
    def first_child(self) -> np.ndarray:
        """Local index of the first child [rows] int32, -1 at a leaf."""
        links = np.full(self.num_rows, -1, np.int32)
        # Backwards, since of several writes to one place the last one stays.
        links[self.parent_row[::-1]] = self.local[::-1]
        # A root has written to its own place, too; its first child can only be node 1.
        links[self.offsets[:-1]] = (self.rows_per_request > 1) * 2 - 1
        return links

    @cached_property
    def next_sibling(self) -> np.ndarray:
        """Local index of the next child of the same parent [rows] int32, -1 at the last one and at a root."""
        links = np.full(self.num_rows, -1, np.int32)
        order = _narrow(self.parent_row).argsort(kind="stable")
        parents = self.parent_row.take(order)
        elder = (parents[1:] == parents[:-1]).nonzero()[0]
        links[order.take(elder)] = self.local.take(order.take(elder + 1))
        links[self.offsets[:-1]] = -1
        return links

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Ancestor bits [rows, words] int64: bit j of row i says that node j is on i's path, i itself included.

        words = rows of the largest tree / 64, rounded up, at least 1. Bit 63 is a word's sign bit.
        """
        largest = int(self.rows_per_request.max()) if self.num_requests else 0
        words = max(1, -(-largest // WORD_BITS))
        bits = np.left_shift(1, self.local & (WORD_BITS - 1))
        if words > 1:
            word, bit = self.local // WORD_BITS, bits
            bits = np.zeros((self.num_rows, words), np.int64)
            bits[np.arange(self.num_rows), word] = bit
        for jump in self.jumps:
            bits = bits | bits.take(jump, axis=0)
        return bits.reshape(self.num_rows, words)

    @cached_property
    def is_depth_first(self) -> bool:
        """Whether every tree already stands in the order that depth_first gives."""
        return np.count_nonzero(_places(self) != self.local) == 0

    @cached_property
    def draws_per_request(self) -> np.ndarray:
        """Draws of each request [requests] int64."""
        return self.draw_offsets[1:] - self.draw_offsets[:-1]

    @cached_property
    def draw_request(self) -> np.ndarray:
        """Request of each draw [draws] int64."""
        return np.arange(self.num_requests).repeat(self.draws_per_request)

    @cached_property
    def draw_row(self) -> np.ndarray:
        """Row of the node that carries each draw [draws] int64."""
        return self.offsets[:-1].repeat(self.draws_per_request) + self.draw_node

    def head(self, num_nodes: npt.ArrayLike) -> TokenTrees:
        """The first num_nodes[r] nodes of each request and the draws on them; a request with fewer keeps what it has.

        num_nodes [requests] int or one int for all. ValueError: negative, or not one number per request.
        """
        limit = per_request("num_nodes", num_nodes, self.num_requests)
        return keep_rows(self, self.local <= limit.repeat(self.rows_per_request))

    def select(self, requests: npt.ArrayLike) -> TokenTrees:
        """The trees of `requests` [k] int, in that order; a request may be named more than once.

        ValueError: no such request.
        """
        chosen = as_integers("requests", requests, INT64)
        if chosen.ndim != 1 or np.count_nonzero((chosen < 0) | (chosen >= self.num_requests)):
            raise ValueError(
                f"requests: {chosen.tolist()} must be a list of requests of a batch of {self.num_requests}"
            )
        offsets, rows = _concatenated_ranges(self.offsets, chosen)
        draw_offsets, draws = _concatenated_ranges(self.draw_offsets, chosen)
        return TokenTrees(
            offsets,
            self.tokens.take(rows),
            self.parent.take(rows),
            self.depth.take(rows),
            self.score.take(rows),
            draw_offsets,
            self.draw_node.take(draws),
            self.draw_owner.take(draws),
            self.draw_law.take(draws),
        )

    def unsampled(self, requests: np.ndarray) -> TokenTrees:
        """The same trees with all draws of `requests` [requests] bool as if they were not sampled.

        The naive rule takes any tree, so this is right whenever the choice of nodes may have looked at their tokens.
        """
        if not (self.draw_law >= 0).any() or not requests.any():
            return self
        return replace(self, draw_law=np.where(requests[self.draw_request], np.int32(-1), self.draw_law))

    def children(self, request: int, node: int) -> list[int]:
        """Local indices of a node's children, first to last. One node at a time: for tests and pictures."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return np.flatnonzero(self.parent[start:end] == node).tolist()

    def path(self, request: int, node: int) -> list[int]:
        """Local indices from depth 1 down to the node, empty for the root. One node at a time: for tests, pictures."""
        start, nodes = self.offsets[request], []
        while node > 0:
            nodes.append(int(node))
            node = self.parent[start + node]
        return nodes[::-1]

    def validate(self) -> None:
        """Raise ValueError that names the first broken invariant and where it breaks."""
        for name, dtype in _TYPES.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name}: must be a one-dimensional numpy array of {dtype}")
        check_layout(self.offsets, self.tokens, parent=self.parent, depth=self.depth, score=self.score)
        check_parents(self.offsets, self.parent, self.local)
        check_depths(self.offsets, self.depth, self.parent_row)
        check_nodes(self.offsets, self.tokens, self.score, self.parent_row)
        check_draws(self.offsets, self.draw_offsets, self.draw_node, self.draw_owner, self.draw_law)


_TYPES = {
    "offsets": INT64,
    "tokens": INT32,
    "parent": INT32,
    "depth": INT32,
    "score": FLOAT32,
    "draw_offsets": INT64,
    "draw_node": INT32,
    "draw_owner": INT16,
    "draw_law": INT32,
}


def roots(tokens: npt.ArrayLike) -> TokenTrees:
    """One tree without nodes per request.

    tokens [requests] int: the last committed tokens. ValueError: not a list of token ids.
    """
    tokens = as_integers("tokens", tokens, INT32)
    if tokens.ndim != 1:
        raise ValueError(f"tokens: has shape {tokens.shape}, give one root token per request")
    requests = len(tokens)
    return TokenTrees(
        offsets=np.arange(requests + 1),
        tokens=tokens,
        parent=np.full(requests, -1, np.int32),
        depth=np.zeros(requests, np.int32),
        score=np.zeros(requests, np.float32),
        draw_offsets=np.zeros(requests + 1, np.int64),
        draw_node=np.zeros(0, np.int32),
        draw_owner=np.zeros(0, np.int16),
        draw_law=np.zeros(0, np.int32),
    )


def from_arrays(
    offsets: npt.ArrayLike,
    tokens: npt.ArrayLike,
    parent: npt.ArrayLike,
    score: npt.ArrayLike | None = None,
    draw_offsets: npt.ArrayLike | None = None,
    draw_node: npt.ArrayLike | None = None,
    draw_owner: npt.ArrayLike | int = 0,
    draw_law: npt.ArrayLike | int = -1,
) -> TokenTrees:
    """Trees from their tokens and parents; the other arrays are computed, and all are validated.

    Shapes as in TokenTrees; any integer type whose values fit. Without score every path counts as certain (0). Without
    draw_offsets and draw_node each node carries one draw, drawn in the order of the rows. draw_owner and draw_law
    may be one number for all draws. ValueError names the array at fault.
    """
    offsets = as_integers("offsets", offsets, INT64)
    tokens = as_integers("tokens", tokens, INT32)
    parent = as_integers("parent", parent, INT32)
    score = np.zeros(tokens.shape, np.float32) if score is None else as_floats("score", score)
    if (draw_offsets is None) != (draw_node is None):
        raise ValueError("draw_offsets: goes with draw_node; give both, or neither for one draw per node")
    check_layout(offsets, tokens, parent=parent, score=score)
    counts = offsets[1:] - offsets[:-1]
    root_row = offsets[:-1].repeat(counts)
    local = np.arange(len(tokens)) - root_row
    check_parents(offsets, parent, local)
    parent_row = _parent_row(offsets, parent, root_row)
    check_nodes(offsets, tokens, score, parent_row)
    depth, max_depth, jumps = _depth_and_jumps(offsets, parent_row)
    if draw_node is None:
        draw_offsets = offsets - np.arange(len(offsets))
        draw_node = local.compress(local > 0)
    draw_offsets = as_integers("draw_offsets", draw_offsets, INT64)
    draw_node = as_integers("draw_node", draw_node, INT32)
    draw_owner = _one_per_draw(as_integers("draw_owner", draw_owner, INT16), draw_node)
    draw_law = _one_per_draw(as_integers("draw_law", draw_law, INT32), draw_node)
    check_draws(offsets, draw_offsets, draw_node, draw_owner, draw_law)
    trees = TokenTrees(offsets, tokens, parent, depth, score, draw_offsets, draw_node, draw_owner, draw_law)
    trees.__dict__.update(
        rows_per_request=counts,
        root_row=root_row,
        local=local,
        parent_row=parent_row,
        max_depth=max_depth,
        jumps=jumps,
    )
    return trees


def from_child_sibling(
    offsets: npt.ArrayLike,
    tokens: npt.ArrayLike,
    first_child: npt.ArrayLike,
    next_sibling: npt.ArrayLike,
    **arrays: Any,
) -> TokenTrees:
    """Trees from the exchange format that xgrammar's traverse_draft_tree and other engines use.

    first_child and next_sibling [rows] int hold local indices, -1 where there is none; arrays = score and draws, as
    from_arrays takes them. ValueError: a node that no link or several links lead to, a link out of the tree, siblings
    that do not stand in the order of their rows.
    """
    offsets = as_integers("offsets", offsets, INT64)
    tokens = as_integers("tokens", tokens, INT32)
    check_offsets("offsets", offsets, len(tokens), "rows", least=1)
    first_child = _links("first_child", first_child, offsets)
    next_sibling = _links("next_sibling", next_sibling, offsets)
    return from_arrays(offsets, tokens, _parents_from_links(offsets, first_child, next_sibling), **arrays)


def to_child_sibling(trees: TokenTrees) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first_child, next_sibling, tokens), each [rows] int64, as xgrammar's traverse_draft_tree takes them.

    Request r's part is offsets[r]:offsets[r+1].
    """
    return trees.first_child.astype(np.int64), trees.next_sibling.astype(np.int64), trees.tokens.astype(np.int64)


def depth_first(trees: TokenTrees) -> TokenTrees:
    """The same trees, every one in depth-first order, highest score first among siblings, ties by the earlier row.

    The likeliest path is then contiguous, so that its K/V usually stands in place already. Draws keep their order.
    """
    if trees.__dict__.get("is_depth_first"):
        return trees
    places = _places(trees)
    in_order = np.count_nonzero(places != trees.local) == 0
    trees.__dict__["is_depth_first"] = in_order
    return trees if in_order else _moved(trees, places)


def keep_rows(trees: TokenTrees, keep: np.ndarray) -> TokenTrees:
    """The rows where keep [rows] bool holds, and the draws on them.

    The caller keeps every root, and no row without its parent. What is depth-first stays depth-first.
    """
    rows = keep.nonzero()[0]
    if len(rows) == len(keep):
        return trees
    before = np.zeros(len(keep) + 1, np.int64)
    np.add.accumulate(keep, out=before[1:])
    offsets = before.take(trees.offsets)
    local = (before[:-1] - before.take(trees.root_row)).astype(np.int32)
    parent = local.take(trees.parent_row.take(rows))
    parent[offsets[:-1]] = -1
    draws = keep.take(trees.draw_row).nonzero()[0]
    kept = TokenTrees(
        offsets,
        trees.tokens.take(rows),
        parent,
        trees.depth.take(rows),
        trees.score.take(rows),
        draws.searchsorted(trees.draw_offsets),
        local.take(trees.draw_row.take(draws)),
        trees.draw_owner.take(draws),
        trees.draw_law.take(draws),
    )
    if trees.__dict__.get("is_depth_first"):
        kept.__dict__["is_depth_first"] = True
    return kept


def _one_per_draw(values: np.ndarray, draw_node: np.ndarray) -> np.ndarray:
    return values.repeat(draw_node.size) if values.ndim == 0 else values


def _parent_row(offsets: np.ndarray, parent: np.ndarray, root_row: np.ndarray) -> np.ndarray:
    rows = parent + root_row
    rows[offsets[:-1]] = offsets[:-1]
    return rows


def _narrow(rows: np.ndarray) -> np.ndarray:
    """Rows in 16 bits where they fit: numpy then sorts stably by radix, several times faster."""
    return rows.astype(np.uint16) if len(rows) <= 1 << 16 else rows


def _places(trees: TokenTrees) -> np.ndarray:
    return preorder(trees.parent_row, trees.score, trees.jumps, trees.offsets[:-1], trees.rows_per_request)


def _moved(trees: TokenTrees, places: np.ndarray) -> TokenTrees:
    """Every row moved to the place [rows] int64 in its own tree that `places` gives; these are depth-first."""
    rows = np.empty(trees.num_rows, np.int64)
    rows[places + trees.root_row] = np.arange(trees.num_rows)
    local = places.astype(np.int32)
    parent = local.take(trees.parent_row.take(rows))
    parent[trees.offsets[:-1]] = -1
    moved = TokenTrees(
        trees.offsets,
        trees.tokens.take(rows),
        parent,
        trees.depth.take(rows),
        trees.score.take(rows),
        trees.draw_offsets,
        local.take(trees.draw_row),
        trees.draw_owner,
        trees.draw_law,
    )
    moved.__dict__.update(
        is_depth_first=True,
        rows_per_request=trees.rows_per_request,
        root_row=trees.root_row,
        local=trees.local,
    )
    return moved


def _concatenated_ranges(offsets: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [k + 1], rows) of the ranges offsets[c]:offsets[c+1] for each c of `chosen`, one behind the other."""
    starts = offsets.take(chosen)
    counts = offsets.take(chosen + 1) - starts
    ends = np.zeros(len(chosen) + 1, np.int64)
    np.add.accumulate(counts, out=ends[1:])
    return ends, np.arange(ends[-1]) + (starts - ends[:-1]).repeat(counts)


def _depth_and_jumps(offsets: np.ndarray, parent_row: np.ndarray) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """(depths [rows] int32, the largest, jump tables): depths by pointer doubling, and the tables that this needed."""
    jump, jumps = parent_row, []
    depth = np.ones(len(parent_row), np.int32)
    depth[offsets[:-1]] = 0
    while np.count_nonzero(step := depth.take(jump)):
        depth += step
        jumps.append(jump)
        jump = jump.take(jump)
    jumps.append(jump)
    max_depth = int(depth.max()) if len(depth) else 0
    return depth, max_depth, jumps[: max_depth.bit_length()]


def _links(name: str, links: npt.ArrayLike, offsets: np.ndarray) -> np.ndarray:
    """Rows that the links lead to [rows] int64, -1 where there is none; every link leads down the same tree."""
    links = as_integers(name, links, INT64)
    if links.shape != (offsets[-1],):
        raise ValueError(f"{name}: has shape {links.shape}, the batch has {offsets[-1]} rows")
    counts = np.diff(offsets)
    rows = links + offsets[:-1].repeat(counts)
    beyond = (rows <= np.arange(len(rows))) | (rows >= offsets[1:].repeat(counts))
    if (wrong := (links != -1) & beyond).any():
        row = int(wrong.argmax())
        raise ValueError(f"{name}: {links[row]} at row {row} must be -1 or a later row of the same tree")
    return np.where(links == -1, -1, rows)


def _parents_from_links(offsets: np.ndarray, first_child: np.ndarray, next_sibling: np.ndarray) -> np.ndarray:
    """Local parents [rows] int64 from rows as _links gives them, after a check that they lead to every node once."""
    rows, roots = len(first_child), offsets[:-1]
    if (next_sibling[roots] >= 0).any():
        raise ValueError("next_sibling: a root has no sibling, give -1")
    parents, elders = np.flatnonzero(first_child >= 0), np.flatnonzero(next_sibling >= 0)
    eldest_children, younger = first_child[parents], next_sibling[elders]
    reached = np.bincount(np.concatenate((eldest_children, younger, roots)), minlength=rows)
    if (reached != 1).any():
        row = int((reached != 1).argmax())
        raise ValueError(f"first_child, next_sibling: {reached[row]} links lead to row {row}, give one (a root none)")
    eldest = np.arange(rows)
    eldest[younger] = elders
    while (eldest != (elder := eldest[eldest])).any():
        eldest = elder
    parent = np.full(rows, -1)
    parent[eldest_children] = parents - np.repeat(roots, np.diff(offsets))[parents]
    return parent[eldest]
