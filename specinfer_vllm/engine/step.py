# SPDX-License-Identifier: Apache-2.0
"""One step's decisions, the same for every runner: which tree a request verifies, and what is drafted next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specinfer_vllm.tree.topology import TokenTrees, roots


@dataclass
class DraftedTrees:
    """The trees drafted at the end of a step, until the scheduler sends them back to be verified.

    A request that was preempted, aborted or skipped meanwhile is simply not asked for again; its tree dies with the
    batch at the next `replace`, so no draft survives into another step (vllm#30916, #40768, #49620).
    """

    trees: TokenTrees = field(default_factory=lambda: roots(np.zeros(0, np.int32)))
    laws: torch.Tensor | None = None
    limits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    index: dict[str, int] = field(default_factory=dict)

    def replace(
        self, request_ids: Sequence[str], trees: TokenTrees, laws: torch.Tensor | None, limits: np.ndarray
    ) -> None:
        """Keep the trees of this step; request_ids[r] owns tree r.

        laws    [laws, vocab] what draws were sampled from
        limits  [requests] nodes that each tree might have had
        """
        self.trees, self.laws, self.limits = trees, laws, limits
        self.index = {request_id: i for i, request_id in enumerate(request_ids)}

    def tokens(self, request_id: str) -> list[int]:
        """The nodes' tokens of one request, as vLLM's scheduler takes them; empty without a tree."""
        span = self._nodes(request_id)
        return self.trees.tokens[span].tolist() if span else []

    def parents(self, request_id: str) -> list[int]:
        """The nodes' parents of one request, local indices (0 = root)."""
        span = self._nodes(request_id)
        return self.trees.parent[span].tolist() if span else []

    def _nodes(self, request_id: str) -> slice | None:
        request = self.index.get(request_id)
        if request is None:
            return None
        return slice(self.trees.offsets[request] + 1, self.trees.offsets[request + 1])

    def scheduled(self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> TokenTrees:
        """The trees of a batch as the scheduler sent them: request_ids in batch order, drafts = their node tokens.

        The scheduler may have cut a tree to a prefix of its nodes, which is a tree again. Drafts that are not the ones
        drafted here (vLLM pads new decodes with -1) become a chain, which needs no mask and, being -1, matches nothing.
        """
        counts = np.fromiter((len(drafts.get(each, ())) for each in request_ids), np.int64, len(request_ids))
        if not counts.any():
            return roots(np.zeros(len(request_ids), np.int32))
        known = self._known(request_ids)
        tokens = np.fromiter((t for each in request_ids for t in drafts.get(each, ())), np.int64, int(counts.sum()))
        if (known[counts > 0] >= 0).all():
            trees = self._trees_of(known, counts)
            is_node = trees.parent >= 0
            if np.array_equal(trees.num_nodes, counts) and np.array_equal(trees.tokens[is_node], tokens):
                return trees
        return self._with_chains(known, counts, tokens)

    def _trees_of(self, known: np.ndarray, counts: np.ndarray) -> TokenTrees:
        """The known trees cut to counts; a request without drafts borrows any root."""
        return self.trees.select(np.maximum(known, 0)).head(counts)

    def may_be_cut(self, request_ids: Sequence[str], room: np.ndarray) -> np.ndarray:
        """Requests [requests] bool whose tree would have been cut had it been as large as it might have been.

        room [requests] int64: tokens that the scheduler had left. What is left of a cut tree depends on the tokens that
        were drawn, and so does whether it is cut: only a bound that was fixed before drawing decides, and the draws of
        these requests count as not sampled.
        """
        limits = np.append(self.limits, 0)  # of a request without a tree
        return room < 1 + limits[self._known(request_ids)]

    def _known(self, request_ids: Sequence[str]) -> np.ndarray:
        """Tree of each request [requests] int64, -1 where there is none."""
        return np.fromiter((self.index.get(each, -1) for each in request_ids), np.int64, len(request_ids))

    def _with_chains(self, known: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> TokenTrees:
        """As `scheduled`, when some request's drafts are not ours. Rare: a request at a time."""
        parts, at = [], 0
        for tree, count in zip(known, counts, strict=True):
            mine = tokens[at : at + count]
            at += count
            if tree >= 0:
                one = self._trees_of(np.array([tree]), np.array([count]))
                if np.array_equal(one.tokens[1:], mine):
                    parts.append(one)
                    continue
            parts.append(chain(mine))
        return concatenate(parts)


def chain(tokens: np.ndarray) -> TokenTrees:
    """One request whose nodes form a path that nobody drew. tokens [nodes] int, negative at placeholders."""
    rows = len(tokens) + 1
    return TokenTrees(
        offsets=np.array([0, rows]),
        tokens=np.concatenate([[0], tokens]).astype(np.int32),
        parent=np.arange(-1, rows - 1, dtype=np.int32),
        depth=np.arange(rows, dtype=np.int32),
        score=np.zeros(rows, np.float32),
        draw_offsets=np.zeros(2, np.int64),
        draw_node=np.zeros(0, np.int32),
        draw_owner=np.zeros(0, np.int16),
        draw_law=np.zeros(0, np.int32),
    )


def concatenate(parts: Sequence[TokenTrees]) -> TokenTrees:
    """One batch out of several, requests in order."""

    def joined(offsets: str) -> np.ndarray:
        sizes = np.concatenate([np.diff(getattr(part, offsets)) for part in parts])
        return np.concatenate([[0], np.cumsum(sizes)])

    def flat(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return TokenTrees(
        offsets=joined("offsets"),
        tokens=flat("tokens"),
        parent=flat("parent"),
        depth=flat("depth"),
        score=flat("score"),
        draw_offsets=joined("draw_offsets"),
        draw_node=flat("draw_node"),
        draw_owner=flat("draw_owner"),
        draw_law=flat("draw_law"),
    )


def is_chain(trees: TokenTrees) -> np.ndarray:
    """Whether each request's nodes form a path [requests] bool: then causal attention is the tree's mask."""
    deep = np.ones(trees.num_requests, bool)
    np.logical_and.at(deep, trees.request, trees.depth == trees.local)
    return deep
