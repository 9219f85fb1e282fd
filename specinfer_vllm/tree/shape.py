# SPDX-License-Identifier: Apache-2.0
"""Which static shape serves best: tokens per step of an expansion <k1..km>, walked over recorded ranks, and the search.

ranks [places] int = place of the LLM's token among the SSM's likeliest at every place of some texts, 0 = first; whoever
drafts down an accepted path has read the LLM's own text, so these ranks are those that drafting would meet. A step at a
place accepts as many tokens as ranks there fall within the levels' widths, and emits one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specinfer_vllm.tree.expand import num_nodes


@dataclass(frozen=True)
class Ranks:
    """Of several texts behind each other: rank [places] int, offsets [texts + 1] int64."""

    rank: np.ndarray
    offsets: np.ndarray

    def accepted(self, expansion: Sequence[int]) -> np.ndarray:
        """Tokens that a step at each place accepts [places] int64."""
        last = np.repeat(self.offsets[1:], np.diff(self.offsets))
        place = np.arange(len(self.rank))
        reached, count = np.ones(len(place), bool), np.zeros(len(place), np.int64)
        for level, width in enumerate(expansion):
            at = np.minimum(place + level, len(place) - 1)
            # The text's last place is never accepted: nothing is emitted behind it.
            reached = reached & (place + level < last - 1) & (self.rank[at] < width)
            count += reached
        return count

    def tokens_per_step(self, expansion: Sequence[int]) -> float:
        """What decoding every text step after step with trees of this shape gives."""
        accepted, steps = self.accepted(expansion).tolist(), 0
        for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            while start < end:
                start += accepted[start] + 1
                steps += 1
        return len(self.rank) / max(steps, 1)


@dataclass(frozen=True)
class Shape:
    """An expansion, its nodes and what it gives; speed = tokens per unit of the cost curve's time."""

    expansion: tuple[int, ...]
    nodes: int
    tokens_per_step: float
    speed: float


def best_expansion(ranks: Ranks, max_nodes: int, max_depth: int, llm_cost: Sequence[float], draft_cost: float) -> Shape:
    """The expansion of at most so many nodes and levels that decodes fastest; a greedy search, widths falling.

    llm_cost [max_nodes + 1] = time of an LLM pass by drafted nodes, draft_cost = time of one level of drafting, both in
    the same unit. Starts without a tree, and goes on with the best among one level more and one level wider, through
    steps that gain nothing by themselves; the best shape on the way is returned.
    """

    def shape(expansion: tuple[int, ...]) -> Shape:
        tokens, nodes = ranks.tokens_per_step(expansion), num_nodes(expansion)
        return Shape(expansion, nodes, tokens, tokens / (llm_cost[nodes] + draft_cost * len(expansion)))

    current = best = shape(())
    while True:
        wider = [
            (*current.expansion[:level], width + 1, *current.expansion[level + 1 :])
            for level, width in enumerate(current.expansion)
            if level == 0 or current.expansion[level - 1] > width
        ]
        longer = [(*current.expansion, 1)] if len(current.expansion) < max_depth else []
        possible = [each for each in (*wider, *longer) if num_nodes(each) <= max_nodes]
        if not possible:
            return best
        current = max(map(shape, possible), key=lambda each: each.speed)
        best = max(best, current, key=lambda each: each.speed)
