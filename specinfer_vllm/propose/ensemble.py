# SPDX-License-Identifier: Apache-2.0
"""Whatever proposers are configured, as one tree per request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from specinfer_vllm.propose.proposer import DraftBatch, Observation, Proposer
from specinfer_vllm.tree.budget import worthwhile
from specinfer_vllm.tree.expand import narrow, prune, prune_batch
from specinfer_vllm.tree.merge import merge
from specinfer_vllm.tree.topology import TokenTrees, depth_first, keep_rows, roots

logger = logging.getLogger("vllm.specinfer")  # below vLLM's logger, so that messages appear in its log


class Ensemble:
    """Runs the proposers one after another, merges their trees and keeps the nodes that are worth their rows.

    proposers    draw_owner in the result is the index into this list
    merge        "union" of all trees of a request, or its tree of the "first" proposer that has one
    batch_nodes  most nodes of all requests together, the likeliest of the batch; None = no bound
    row_cost     time of one more row in a pass, as a share of a pass over one row: nodes not worth theirs are left out
    branches     most children per node, the likeliest; 1 = chains, None = no bound
    may_fail     what a proposer raises is kept from the engine; with several ranks one alone would draft differently
    laws         [laws, vocab] float32 that the last trees' draw_law points into, None when nothing was sampled

    A proposer that raises is left out of this step: the error is logged the first time, counted each time, and the
    requests go on. One that fails to forget a request is left out for good, since its next answer could rest on that
    request.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        merge: str = "union",
        batch_nodes: int | None = None,
        row_cost: float = 0.0,
        branches: int | None = None,
        may_fail: bool = True,
    ) -> None:
        if merge not in ("union", "first"):
            raise ValueError(f"merge: {merge!r} is not known, use 'union' or 'first'")
        if batch_nodes is not None and batch_nodes < 0:
            raise ValueError(f"batch_nodes: {batch_nodes} is negative, give 0 or more nodes")
        if not 0 <= row_cost <= 1:
            raise ValueError(f"row_cost: {row_cost} is no share of a pass, give 0 to 1")
        self.proposers = list(proposers)
        self.names = _distinct([proposer.name for proposer in proposers])
        self.merge, self.batch_nodes = merge, batch_nodes
        self.row_cost, self.branches, self.may_fail = row_cost, branches, may_fail
        self.laws: torch.Tensor | None = None
        self._failures: Counter[str] = Counter()
        self._logged: set[int] = set()
        self._retired: set[int] = set()

    @property
    def num_successors(self) -> int:
        """How many best next tokens per row the proposers want to observe, 0 = nobody looks."""
        return max((self.proposers[i].num_successors for i in self._active()), default=0)

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """One tree per request, depth-first, within max_depth, max_nodes and batch_nodes."""
        laws: list[torch.Tensor] = []
        proposed: dict[int, TokenTrees] = {}
        for i in sorted(self._active(), key=lambda i: self.proposers[i].last):
            told = replace(batch, covered=_covered(proposed.values(), batch)) if self.proposers[i].last else batch
            if (found := self._proposed(i, told, laws)) is not None:
                proposed[i] = found
        trees = [proposed[i] for i in sorted(proposed)]
        self.laws = torch.cat(laws) if laws else None
        if not trees:
            return roots(batch.root_tokens())
        merged = _first(trees) if self.merge == "first" else merge(trees)
        if self.branches is not None:
            merged = narrow(merged, self.branches)
        return self._within_budget(merged, np.maximum(batch.max_nodes, 0))

    def _within_budget(self, trees: TokenTrees, max_nodes: np.ndarray) -> TokenTrees:
        """The nodes that are worth their rows. Sampled draws all stay: their SSM chose among them without looking at
        their tokens, and here a token that another proposer holds likely would save its draw.
        """
        held = _sampled_rows(trees)
        total = worthwhile(trees, self.row_cost)
        if self.batch_nodes is not None:
            total = min(total, self.batch_nodes)
        if held.any():
            total = max(total, int(held.sum()))
            trees = replace(trees, score=np.where(held, np.float32(0), trees.score))
        trees = prune(trees, max_nodes)
        return prune_batch(trees, total, trees.num_nodes)

    def observe(self, observation: Observation) -> None:
        """Show all proposers what the last LLM pass said."""
        for i in self._active():
            if self.proposers[i].num_successors:
                self._guarded(i, self.proposers[i].observe, observation)

    def start(self, slot: int) -> None:
        """A request begins on `slot`."""
        for i in self._active():
            if not self._guarded(i, self.proposers[i].start, slot):
                self._retired.add(i)

    def finish(self, slot: int) -> None:
        """The request on `slot` ended or was preempted."""
        for i in self._active():
            if not self._guarded(i, self.proposers[i].finish, slot):
                self._retired.add(i)

    def take_failures(self) -> Counter[str]:
        """How often each proposer has raised since this was last asked."""
        failures, self._failures = self._failures, Counter()
        return failures

    def _active(self) -> list[int]:
        return [i for i in range(len(self.proposers)) if i not in self._retired]

    def _proposed(self, index: int, batch: DraftBatch, laws: list[torch.Tensor]) -> TokenTrees | None:
        """The proposer's trees, checked and labelled, or None when it raised; its laws are added to `laws`."""
        trees: list[TokenTrees] = []
        proposer, first = self.proposers[index], sum(map(len, laws))
        if not self._guarded(index, lambda: trees.append(_labelled(proposer.propose(batch), index, first, batch))):
            return None
        if proposer.laws is not None:
            laws.append(proposer.laws)
        return trees[0]

    def _guarded(self, index: int, call: Callable, *args: object) -> bool:
        """Whether the call came back without raising."""
        try:
            call(*args)
        except Exception:
            if not self.may_fail:
                raise
            name = self.names[index]
            self._failures[name] += 1
            if index not in self._logged:
                self._logged.add(index)
                logger.exception("proposer %r failed and is left out of this step; further failures are counted", name)
            return False
        return True


def _covered(proposed: Iterable[TokenTrees], batch: DraftBatch) -> np.ndarray:
    """DraftBatch.covered of what was proposed so far: that of the proposer which has the most at each depth."""
    covered = np.zeros((batch.num_requests, max(int(batch.max_depth.max(initial=0)), 0)))
    for trees in proposed:
        rows = trees.depth > 0
        mine = np.zeros_like(covered)
        np.add.at(mine, (trees.request[rows], trees.depth[rows] - 1), np.exp(trees.score[rows]))
        covered = np.maximum(covered, mine)
    return np.minimum(covered, 1)


def _sampled_rows(trees: TokenTrees) -> np.ndarray:
    """Rows [rows] bool of nodes that carry a sampled draw, and of the nodes above them."""
    held = np.zeros(trees.num_rows, bool)
    rows = trees.draw_row[trees.draw_law >= 0]
    if not len(rows):
        return held
    for _ in range(trees.max_depth):
        held[rows] = True
        rows = trees.parent_row[rows]
    held[trees.offsets[:-1]] = False
    return held


def _labelled(trees: TokenTrees, owner: int, first_law: int, batch: DraftBatch) -> TokenTrees:
    """The trees with their draws owned by `owner`, their laws counted from first_law on, cut at max_depth.

    ValueError: trees of another batch.
    """
    if trees.num_requests != batch.num_requests:
        raise ValueError(f"proposed {trees.num_requests} trees for {batch.num_requests} requests")
    if (trees.tokens[trees.offsets[:-1]] != batch.root_tokens()).any():
        raise ValueError("proposed trees whose roots are not the last committed tokens")
    too_deep = trees.depth > np.maximum(batch.max_depth, 0)[trees.request]
    if too_deep.any():
        trees = keep_rows(trees, ~too_deep)
    law = (
        np.where(trees.draw_law < 0, np.int32(-1), trees.draw_law + np.int32(first_law))
        if first_law
        else trees.draw_law
    )
    return replace(trees, draw_owner=np.full(len(trees.draw_node), owner, np.int16), draw_law=law)


def _first(trees: Sequence[TokenTrees]) -> TokenTrees:
    """Per request the first of the trees that has a node."""
    taken = np.zeros(trees[0].num_requests, bool)
    chosen = []
    for each in trees:
        chosen.append(each.head(np.where(taken, 0, each.num_nodes)))
        taken |= each.num_nodes > 0
    return depth_first(chosen[0]) if len(chosen) == 1 else merge(chosen)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where one occurs twice: ssm, ssm-2."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result
