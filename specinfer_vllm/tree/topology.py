# SPDX-License-Identifier: Apache-2.0
"""One batch of token trees as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer_vllm.tree.paths import jump_tables, preorder

WORD_BITS = 64
_TYPES = {
    "offsets": np.int64,
    "tokens": np.int32,
    "parent": np.int32,
    "depth": np.int32,
    "score": np.float32,
    "draw_offsets": np.int64,
    "draw_node": np.int32,
    "draw_owner": np.int16,
}


@dataclass(frozen=True, eq=False)
class TokenTrees:
    """One batch of token trees as flat numpy arrays, request after request.

    Row offsets[r] is the root of request r (its last committed token), the rows behind it are its proposed nodes; indices inside a request are local
    (root = 0). Parents stand before children, so every prefix of a request's rows is itself a tree. Siblings carry different tokens: a token drawn
    twice under one parent is one node with two draws. Every node carries at least one draw. Draws stand in the order in which they were drawn.

    offsets      [requests + 1] int64   rows of request r: offsets[r]:offsets[r+1], at least one (the root) each
    tokens       [rows] int32           token ids; a root's may be any number (it is known elsewhere)
    parent       [rows] int32           local index, -1 at a root
    depth        [rows] int32           0 at a root
    score        [rows] float32         log of the estimated chance that the whole path is accepted: 0 at a root, never rises along a path
    draw_offsets [requests + 1] int64   draws of request r: draw_offsets[r]:draw_offsets[r+1]
    draw_node    [draws] int32          local index of the node that carries the draw
    draw_owner   [draws] int16          proposer that made it, an index into the engine's list

    The constructor takes the arrays as they are, for callers that hold the invariants by construction; from_arrays casts and validates.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    draw_offsets: np.ndarray
    draw_node: np.ndarray
    draw_owner: np.ndarray

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
        return int(self.depth.max(initial=0))

    @cached_property
    def request(self) -> np.ndarray:
        """Request of each row [rows] int64."""
        return np.repeat(np.arange(self.num_requests), self.rows_per_request)

    @cached_property
    def root_row(self) -> np.ndarray:
        """Row of each row's root [rows] int64."""
        return np.repeat(self.offsets[:-1], self.rows_per_request)

    @cached_property
    def local(self) -> np.ndarray:
        """Local index of each row [rows] int64."""
        return np.arange(self.num_rows) - self.root_row

    @cached_property
    def parent_row(self) -> np.ndarray:
        """Row of each row's parent [rows] int64, the own row at a root."""
        rows = self.parent + self.root_row
        rows[self.offsets[:-1]] = self.offsets[:-1]
        return rows

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
        roots = self.offsets[:-1]
        links[roots] = np.where(
            self.num_nodes > 0, 1, -1
        )  # a root was also its own parent; row 1 can only be its child
        return links

    @cached_property
    def next_sibling(self) -> np.ndarray:
        """Local index of the next child of the same parent [rows] int32, -1 at the last one and at a root."""
        links = np.full(self.num_rows, -1, np.int32)
        order = np.argsort(_narrow(self.parent_row), kind="stable")
        parents = self.parent_row.take(order)
        left, right = order[:-1], order[1:]
        follows = parents[1:] == parents[:-1]
        links[left[follows]] = self.local.take(right[follows])
        links[self.offsets[:-1]] = -1
        return links

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Ancestor bits [rows, words] int64: bit j of row i says that node j is on i's path, i itself included.

        words = rows of the largest tree / 64, rounded up, at least 1. Bit 63 is a word's sign bit.
        """
        words = max(1, -(-int(self.rows_per_request.max(initial=0)) // WORD_BITS))
        bit = np.left_shift(np.uint64(1), (self.local % WORD_BITS).astype(np.uint64))
        if words == 1:
            bits = bit
        else:
            bits = np.zeros((self.num_rows, words), np.uint64)
            bits[np.arange(self.num_rows), self.local // WORD_BITS] = bit
        for jump in self.jumps:
            bits = bits | bits.take(jump, axis=0)
        return bits.view(np.int64).reshape(self.num_rows, words)

    @cached_property
    def is_depth_first(self) -> bool:
        """Whether every tree already stands in the order that depth_first gives."""
        return bool((_positions(self) == self.local).all())

    @cached_property
    def draw_request(self) -> np.ndarray:
        """Request of each draw [draws] int64."""
        return np.repeat(np.arange(self.num_requests), self.draw_offsets[1:] - self.draw_offsets[:-1])

    @cached_property
    def draw_row(self) -> np.ndarray:
        """Row of the node that carries each draw [draws] int64."""
        return np.repeat(self.offsets[:-1], self.draw_offsets[1:] - self.draw_offsets[:-1]) + self.draw_node

    def head(self, num_nodes: npt.ArrayLike) -> TokenTrees:
        """The first num_nodes[r] nodes of each request and the draws on them; a request with fewer keeps what it has.

        num_nodes [requests] int or one int for all. ValueError: negative, or not one number per request.
        """
        limit = per_request("num_nodes", num_nodes, self.num_requests)
        return keep_rows(self, self.local <= np.repeat(limit, self.rows_per_request))

    def select(self, requests: npt.ArrayLike) -> TokenTrees:
        """The trees of `requests` [k] int, in that order; a request may be named more than once. ValueError: no such request."""
        chosen = as_integers("requests", requests, np.int64)
        if chosen.ndim != 1 or (len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.num_requests):
            raise ValueError(
                f"requests: {chosen.tolist()} names no list of requests of a batch of {self.num_requests} (0 to {self.num_requests - 1})"
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
        )

    def children(self, request: int, node: int) -> list[int]:
        """Local indices of a node's children, first to last. One node at a time: for tests and pictures."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return np.flatnonzero(self.parent[start:end] == node).tolist()

    def path(self, request: int, node: int) -> list[int]:
        """Local indices from depth 1 down to the node, empty for the root. One node at a time: for tests and pictures."""
        start, nodes = self.offsets[request], []
        while node > 0:
            nodes.append(int(node))
            node = self.parent[start + node]
        return nodes[::-1]

    def validate(self) -> None:
        """Raise ValueError that names the first broken invariant and where it breaks."""
        _check_types(self)
        _check_layout(self)
        _check_parents(self)
        if self.num_rows and (wrong := self.depth != _next_depth(self)).any():
            raise ValueError(f"depth: {_where(self, wrong)} is not one below its parent")
        _check_nodes(self)
        _check_draws(self)


def roots(tokens: npt.ArrayLike) -> TokenTrees:
    """One tree without nodes per request. tokens [requests] int: the last committed tokens. ValueError: not a list of token ids."""
    tokens = as_integers("tokens", tokens, np.int32)
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
    )


def from_arrays(
    offsets: npt.ArrayLike,
    tokens: npt.ArrayLike,
    parent: npt.ArrayLike,
    score: npt.ArrayLike | None = None,
    draw_offsets: npt.ArrayLike | None = None,
    draw_node: npt.ArrayLike | None = None,
    draw_owner: npt.ArrayLike | int = 0,
) -> TokenTrees:
    """Trees from their tokens and parents; the other arrays are computed, and all are validated.

    Shapes as in TokenTrees; any integer type whose values fit. Without score every path counts as certain (0). Without draw_offsets and draw_node each
    node carries one draw, drawn in the order of the rows. draw_owner may be one number for all draws. ValueError names the array at fault.
    """
    offsets = as_integers("offsets", offsets, np.int64)
    tokens = as_integers("tokens", tokens, np.int32)
    parent = as_integers("parent", parent, np.int32)
    score = np.zeros(tokens.shape, np.float32) if score is None else _as_floats("score", score)
    if (draw_offsets is None) != (draw_node is None):
        raise ValueError("draw_offsets: goes with draw_node; give both, or neither for one draw per node")
    blank = np.zeros(0, np.int32)
    trees = TokenTrees(offsets, tokens, parent, np.zeros(tokens.shape, np.int32), score, offsets, blank, blank)
    _check_layout(trees)
    _check_parents(trees)
    depth, jumps = _depth_and_jumps(trees)
    if draw_node is None:
        draw_offsets, draw_node = _one_draw_per_node(trees)
    draw_node = as_integers("draw_node", draw_node, np.int32)
    draw_owner = as_integers("draw_owner", draw_owner, np.int16)
    built = TokenTrees(
        offsets,
        tokens,
        parent,
        depth,
        score,
        as_integers("draw_offsets", draw_offsets, np.int64),
        draw_node,
        np.full(draw_node.shape, draw_owner) if draw_owner.ndim == 0 else draw_owner,
    )
    known = ("rows_per_request", "root_row", "local", "parent_row")
    built.__dict__.update({name: trees.__dict__[name] for name in known}, jumps=jumps)
    _check_nodes(built)
    _check_draws(built)
    return built


def from_child_sibling(
    offsets: npt.ArrayLike,
    tokens: npt.ArrayLike,
    first_child: npt.ArrayLike,
    next_sibling: npt.ArrayLike,
    **arrays: Any,
) -> TokenTrees:
    """Trees from the exchange format that xgrammar's traverse_draft_tree and other engines use.

    first_child and next_sibling [rows] int hold local indices, -1 where there is none; arrays = score and draws, as from_arrays takes them.
    ValueError: a row that no link or several links lead to, links out of the tree, siblings that do not stand in the order of their rows.
    """
    offsets = as_integers("offsets", offsets, np.int64)
    tokens = as_integers("tokens", tokens, np.int32)
    first_child = as_integers("first_child", first_child, np.int64)
    next_sibling = as_integers("next_sibling", next_sibling, np.int64)
    _check_offsets("offsets", offsets, len(tokens), "rows", least=1)
    parent = _parents_from_links(offsets, first_child, next_sibling)
    return from_arrays(offsets, tokens, parent, **arrays)


def to_child_sibling(trees: TokenTrees) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first_child, next_sibling, tokens), each [rows] int64, as traverse_draft_tree takes them: request r's part is offsets[r]:offsets[r+1]."""
    return trees.first_child.astype(np.int64), trees.next_sibling.astype(np.int64), trees.tokens.astype(np.int64)


def depth_first(trees: TokenTrees) -> TokenTrees:
    """The same trees with every row in depth-first order, highest score first among siblings, ties by the earlier row.

    The likeliest path is then contiguous, so that its K/V usually stands in place already. Draws keep their order.
    """
    if "is_depth_first" in trees.__dict__ and trees.is_depth_first:
        return trees
    positions = _positions(trees)
    trees.__dict__["is_depth_first"] = in_order = bool((positions == trees.local).all())
    return trees if in_order else _reordered(trees, positions)


def keep_rows(trees: TokenTrees, keep: np.ndarray) -> TokenTrees:
    """The rows where keep [rows] bool holds, and the draws on them. The kept rows must include every root and be closed under parents."""
    if keep.all():
        return trees
    rows = np.flatnonzero(keep)
    before = np.zeros(trees.num_rows + 1, np.int64)
    np.cumsum(keep, out=before[1:])
    offsets = before.take(trees.offsets)
    local = (before[:-1] - before.take(trees.root_row)).astype(np.int32)
    parent = local.take(trees.parent_row.take(rows))
    parent[offsets[:-1]] = -1
    drawn = keep.take(trees.draw_row)
    draws = np.flatnonzero(drawn)
    kept = TokenTrees(
        offsets,
        trees.tokens.take(rows),
        parent,
        trees.depth.take(rows),
        trees.score.take(rows),
        np.searchsorted(draws, trees.draw_offsets),
        local.take(trees.draw_row.take(draws)),
        trees.draw_owner.take(draws),
    )
    if trees.__dict__.get("is_depth_first"):
        kept.__dict__["is_depth_first"] = True
    return kept


def per_request(name: str, values: npt.ArrayLike, requests: int) -> np.ndarray:
    """One count per request [requests] int64, from such an array or one number for all. ValueError: negative, or another number of counts."""
    counts = as_integers(name, values, np.int64)
    if counts.shape not in ((), (requests,)):
        raise ValueError(f"{name}: has shape {counts.shape}, give one number per request ({requests}) or one for all")
    if counts.min(initial=0) < 0:
        raise ValueError(f"{name}: {counts.min()} is negative, give 0 or more nodes")
    return np.broadcast_to(counts, (requests,))


def as_integers(name: str, values: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    """`values` as an array of `dtype`. ValueError: not integers, or integers that do not fit."""
    array = np.asarray(values)
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name}: has type {array.dtype}, give integers")
    cast = array.astype(dtype)
    if (cast != array).any():
        raise ValueError(f"{name}: {array[cast != array].flat[0]} does not fit {np.dtype(dtype)}")
    return cast


def _as_floats(name: str, values: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: has type {array.dtype}, give numbers")
    return array.astype(np.float32, copy=False)


def _narrow(rows: np.ndarray) -> np.ndarray:
    """Rows in 16 bits where they fit: numpy then sorts stably by radix, several times faster."""
    return rows.astype(np.uint16) if len(rows) <= 1 << 16 else rows


def _positions(trees: TokenTrees) -> np.ndarray:
    return preorder(trees.parent_row, trees.score, trees.jumps, trees.offsets[:-1], trees.rows_per_request)


def _reordered(trees: TokenTrees, positions: np.ndarray) -> TokenTrees:
    """Every row moved to the place [rows] int64 in its own tree that `positions` gives."""
    rows = np.empty(trees.num_rows, np.int64)
    rows[positions + trees.root_row] = np.arange(trees.num_rows)
    local = positions.astype(np.int32)
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
    )
    moved.__dict__.update(
        is_depth_first=True, rows_per_request=trees.rows_per_request, root_row=trees.root_row, local=trees.local
    )
    return moved


def _concatenated_ranges(offsets: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [k + 1], rows) of the ranges offsets[c]:offsets[c+1] for each c of `chosen`, one behind the other."""
    starts = offsets.take(chosen)
    counts = offsets.take(chosen + 1) - starts
    ends = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends, np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)


def _one_draw_per_node(trees: TokenTrees) -> tuple[np.ndarray, np.ndarray]:
    draw_offsets = trees.offsets - np.arange(trees.num_requests + 1)
    return draw_offsets, trees.local[trees.local > 0]


def _depth_and_jumps(trees: TokenTrees) -> tuple[np.ndarray, list[np.ndarray]]:
    """Depths [rows] int32 by pointer doubling, and the jump tables that this needed."""
    jump, jumps = trees.parent_row, []
    depth = np.ones(trees.num_rows, np.int32)
    depth[trees.offsets[:-1]] = 0
    while (step := depth.take(jump)).any():
        depth += step
        jumps.append(jump)
        jump = jump.take(jump)
    jumps.append(jump)
    return depth, jumps[: int(depth.max(initial=0)).bit_length()]


def _next_depth(trees: TokenTrees) -> np.ndarray:
    depth = trees.depth.take(trees.parent_row) + 1
    depth[trees.offsets[:-1]] = 0
    return depth


def _parents_from_links(offsets: np.ndarray, first_child: np.ndarray, next_sibling: np.ndarray) -> np.ndarray:
    """Parents [rows] int64, local, from links that are checked to lead to every node once."""
    rows, root_row = offsets[-1], np.repeat(offsets[:-1], np.diff(offsets))
    local, last = np.arange(rows) - root_row, np.repeat(np.diff(offsets), np.diff(offsets)) - 1
    for name, link in (("first_child", first_child), ("next_sibling", next_sibling)):
        if link.shape != (rows,):
            raise ValueError(f"{name}: has shape {link.shape}, the batch has {rows} rows")
        if (wrong := (link != -1) & ((link <= local) | (link > last))).any():
            row = int(np.argmax(wrong))
            raise ValueError(f"{name}: {link[row]} at row {row} must be -1 or a later row of the same tree")
    parents, siblings = np.flatnonzero(first_child >= 0), np.flatnonzero(next_sibling >= 0)
    firsts, nexts = (first_child + root_row)[parents], (next_sibling + root_row)[siblings]
    reached = np.bincount(np.concatenate((firsts, nexts, offsets[:-1])), minlength=rows)
    if (reached != 1).any():
        row = int(np.argmax(reached != 1))
        raise ValueError(
            f"first_child, next_sibling: {reached[row]} links lead to row {row}, one must (none to a root)"
        )
    if (next_sibling[offsets[:-1]] >= 0).any():
        raise ValueError("next_sibling: a root has no sibling, give -1")
    eldest = np.arange(rows)
    eldest[nexts] = siblings
    while (eldest != (elder := eldest.take(eldest))).any():
        eldest = elder
    parent = np.full(rows, -1)
    parent[firsts] = local[parents]
    return parent.take(eldest)


def _check_offsets(name: str, offsets: np.ndarray, end: int, what: str, least: int) -> None:
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(
            f"{name}: must run from 0 to {end}, the number of {what}, with one entry more than there are requests"
        )
    if len(offsets) > 1 and (counts := np.diff(offsets)).min() < least:
        raise ValueError(
            f"{name}: request {int(counts.argmin())} has {counts.min()} {what}, at least {least} must be there"
        )


def _check_types(trees: TokenTrees) -> None:
    for name, dtype in _TYPES.items():
        array = getattr(trees, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name}: must be a one-dimensional numpy array of {np.dtype(dtype)}")


def _check_layout(trees: TokenTrees) -> None:
    if trees.tokens.ndim != 1:
        raise ValueError(f"tokens: has shape {trees.tokens.shape}, must have one dimension")
    for name in ("parent", "depth", "score"):
        if (array := getattr(trees, name)).shape != trees.tokens.shape:
            raise ValueError(f"{name}: has shape {array.shape} where tokens has {trees.tokens.shape}")
    _check_offsets("offsets", trees.offsets, trees.num_rows, "rows", least=1)


def _check_parents(trees: TokenTrees) -> None:
    parent = trees.parent
    if (parent.take(trees.offsets[:-1]) != -1).any():
        raise ValueError("parent: must be -1 at each root (a request's first row)")
    if (parent >= trees.local).any():
        raise ValueError(f"parent: {_where(trees, parent >= trees.local)} stands before its parent")
    if np.count_nonzero(parent < 0) != trees.num_requests:
        wrong = (parent < 0) & (trees.local > 0)
        raise ValueError(f"parent: {_where(trees, wrong)} has none; only a request's first row is a root")


def _check_nodes(trees: TokenTrees) -> None:
    first = trees.offsets[:-1]
    if (trees.tokens < 0).any() and (wrong := (trees.tokens < 0) & (trees.local > 0)).any():
        raise ValueError(f"tokens: {_where(trees, wrong)} has a negative token")
    if trees.score.take(first).any():
        raise ValueError("score: must be 0 (certain) at each root")
    if not (trees.score <= trees.score.take(trees.parent_row)).all():
        wrong = ~(trees.score <= trees.score.take(trees.parent_row))
        raise ValueError(f"score: {_where(trees, wrong)} scores higher than its parent, or is no number")
    child = (trees.parent_row << 32) | trees.tokens
    child[first] = -1 - np.arange(trees.num_requests)
    child.sort()
    if (child[1:] == child[:-1]).any():
        raise ValueError(
            f"tokens: {_where_twice(trees)} repeats a sibling's token; make it one node with several draws"
        )


def _check_draws(trees: TokenTrees) -> None:
    node, owner = trees.draw_node, trees.draw_owner
    if node.ndim != 1 or owner.shape != node.shape:
        raise ValueError(f"draw_owner: has shape {owner.shape} for draw_node of shape {node.shape}")
    _check_offsets("draw_offsets", trees.draw_offsets, len(node), "draws", least=0)
    if len(trees.draw_offsets) != len(trees.offsets):
        raise ValueError(f"draw_offsets: has {len(trees.draw_offsets)} entries where offsets has {len(trees.offsets)}")
    if owner.min(initial=0) < 0:
        raise ValueError(f"draw_owner: {owner.min()} is no proposer")
    if len(node) and (node.min() < 1 or (node > trees.num_nodes.take(trees.draw_request)).any()):
        raise ValueError("draw_node: must be a node of the draw's own request (1 to its number of nodes)")
    drawn = np.zeros(trees.num_rows, bool)
    drawn[trees.draw_row] = True
    drawn[trees.offsets[:-1]] = True
    if not drawn.all():
        raise ValueError(f"draw_node: {_where(trees, ~drawn)} carries no draw")


def _where(trees: TokenTrees, wrong: np.ndarray) -> str:
    row = int(np.argmax(wrong))
    return f"row {int(trees.local[row])} of request {int(trees.request[row])}"


def _where_twice(trees: TokenTrees) -> str:
    order = np.lexsort((trees.local, trees.tokens, trees.parent_row))
    order = order[trees.local.take(order) > 0]
    same = (trees.parent_row[order][1:] == trees.parent_row[order][:-1]) & (
        trees.tokens[order][1:] == trees.tokens[order][:-1]
    )
    wrong = np.zeros(trees.num_rows, bool)
    wrong[order[1:][same]] = True
    return _where(trees, wrong)
