# SPDX-License-Identifier: Apache-2.0
"""Which static shape serves best: tokens per step of a shape, walked over recorded ranks, and the search.

ranks [places] int = place of the LLM's token among the SSM's likeliest at every place of some texts, 0 = first; whoever
drafts down an accepted path has read the LLM's own text, so these ranks are those that drafting would meet. A step at a
place accepts as many tokens as ranks there lead down the tree, and emits one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specinfer_vllm.tree.static import StaticTree


@dataclass(frozen=True)
class Ranks:
    """Of several texts behind each other: rank [places] int, offsets [texts + 1] int64.

    widest: ranks from here on were not told apart, and no child counts as having them.
    """

    rank: np.ndarray
    offsets: np.ndarray
    widest: int = 16

    def accepted(self, shape: Sequence[int] | StaticTree) -> np.ndarray:
        """Tokens that a step at each place accepts [places] int64, with trees <k1..km> or of any static shape."""
        children, first, step = _walk(shape)
        children = np.minimum(children, self.widest)
        last = np.repeat(self.offsets[1:], np.diff(self.offsets))
        place = np.arange(len(self.rank))
        node, count = np.zeros(len(place), np.int64), np.zeros(len(place), np.int64)
        reached = np.arange(len(place))
        while len(reached):
            # The text's last place is never accepted: nothing is emitted behind it.
            reached = reached[reached + count[reached] < last[reached] - 1]
            rank = self.rank[reached + count[reached]]
            accepts = rank < children[node[reached]]
            reached, rank = reached[accepts], rank[accepts]
            node[reached] = first[node[reached]] + rank * step
            count[reached] += 1
        return count

    def tokens_per_step(self, shape: Sequence[int] | StaticTree) -> float:
        """What decoding every text step after step with trees of this shape gives."""
        return tokens_per_step(self.accepted(shape), self.offsets)

    def chances(self) -> np.ndarray:
        """Share of places whose token has rank 0, 1, .. [widest] float64: how often a k-th child is accepted."""
        counts = np.bincount(self.rank[self.rank < self.widest], minlength=self.widest)
        return counts / max(len(self.rank), 1)


def tokens_per_step(accepted: np.ndarray, offsets: np.ndarray) -> float:
    """Tokens of all texts per LLM pass. accepted [places] int64 of a step at each place, offsets [texts + 1] int64."""
    accepted, steps = accepted.tolist(), 0
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < end:  # the first token comes from the pass over the prompt, which has no tree
            start += 1
            steps += 1
        while start < end:
            start += accepted[start] + 1
            steps += 1
    return len(accepted) / max(steps, 1)


@dataclass(frozen=True)
class Forest:
    """A static tree for each SSM, and what they give merged; speed = tokens per unit of the cost curve's time."""

    trees: tuple[StaticTree, ...]
    tokens_per_step: float
    speed: float

    @property
    def nodes(self) -> int:
        """Nodes of all trees; those that SSMs have in common count for each."""
        return sum(tree.num_nodes for tree in self.trees)


def best_forest(
    ranks: Sequence[Ranks], max_nodes: int, max_depth: int, llm_cost: Sequence[float], draft_cost: Sequence[float]
) -> Forest:
    """The static trees, one for each SSM, that together have at most so many nodes and decode fastest.

    ranks of the SSMs over the same texts; llm_cost [max_nodes + 1] = time of an LLM pass by drafted nodes, draft_cost =
    time of one level of each SSM's drafting, in the same unit. A step accepts what the luckiest SSM's tree accepts. One
    SSM after the other takes the best of Sequoia's trees (section 3.1) beside those of the others, until none gains.
    """
    offsets = ranks[0].offsets
    possible = [_candidates(each, max_nodes, max_depth) for each in ranks]
    nothing = np.zeros(len(ranks[0].rank), np.int8)

    def forest(trees: Sequence[StaticTree]) -> Forest:
        accepted = nothing
        for found, tree in zip(possible, trees, strict=True):
            accepted = np.maximum(accepted, found[tree])
        tokens = tokens_per_step(accepted, offsets)
        levels = sum(cost * tree.depth for cost, tree in zip(draft_cost, trees, strict=True))
        return Forest(tuple(trees), tokens, tokens / (llm_cost[sum(tree.num_nodes for tree in trees)] + levels))

    best = forest([StaticTree((0,))] * len(ranks))
    while True:
        before = best
        for i, found in enumerate(possible):
            room = max_nodes - best.nodes + best.trees[i].num_nodes
            others = [(*best.trees[:i], tree, *best.trees[i + 1 :]) for tree in found if tree.num_nodes <= room]
            best = max([best, *map(forest, others)], key=lambda each: each.speed)
        if best is before:
            return best


def _candidates(ranks: Ranks, max_nodes: int, max_depth: int) -> dict[StaticTree, np.ndarray]:
    """Sequoia's trees of every depth and some sizes, with what they accept at each place [places] int8."""
    found = BestTrees.of(ranks.chances(), max_nodes, max_depth)
    sizes = sorted({*range(min(16, max_nodes) + 1), *range(20, max_nodes + 1, 4), max_nodes})
    trees = [
        found.tree(nodes, depth)
        for depth in range(max_depth + 1)
        for nodes in sizes
        if found.tokens[depth, nodes] > -np.inf
    ]
    return {tree: ranks.accepted(tree).astype(np.int8) for tree in dict.fromkeys(trees)}


@dataclass(frozen=True)
class BestTrees:
    """The best tree of every size, of those whose k-th children are accepted with chance[k] below any node.

    tokens    [depths + 1, nodes + 1] float64       expected tokens of a step with the best tree of exactly so many
                                                    nodes and at most so many levels; -inf where there is none
    children  [depths + 1, nodes + 1] int64         of its root
    youngest  [depths + 1, width + 1, nodes + 1]    of the best tree whose root has so many children: rows of its last
              int64                                 child's subtree, that child included
    """

    tokens: np.ndarray
    children: np.ndarray
    youngest: np.ndarray

    @classmethod
    def of(cls, chance: np.ndarray, max_nodes: int, max_depth: int) -> BestTrees:
        """Sequoia's dynamic programme; chance [width] float64, of the first child, the second, ..

        A tree whose root has k children is one with k - 1, and the best tree of one level less as the k-th child.
        """
        width = min(len(chance), max_nodes)
        tokens = np.full((max_depth + 1, max_nodes + 1), -np.inf)
        tokens[:, 0] = 1
        children = np.zeros(tokens.shape, np.int64)
        youngest = np.zeros((max_depth + 1, width + 1, max_nodes + 1), np.int64)
        rows = np.arange(max_nodes + 1)
        left = rows[:, None] - rows  # nodes that the elder children have when the youngest's subtree has so many rows
        for depth in range(1, max_depth + 1):
            subtree = np.concatenate([[-np.inf], tokens[depth - 1, :-1]])  # by its rows
            possible = subtree > -np.inf
            best = np.full((width + 1, max_nodes + 1), -np.inf)
            best[0, 0] = 1
            for k in range(width):
                gained = chance[k] * np.where(possible, subtree, 0)
                total = np.where((left >= 0) & possible, best[k][left] + gained, -np.inf)
                youngest[depth, k + 1] = total.argmax(axis=1)
                best[k + 1] = total.max(axis=1)
            children[depth], tokens[depth] = best.argmax(axis=0), best.max(axis=0)
        return cls(tokens, children, youngest)

    def tree(self, nodes: int, depth: int) -> StaticTree:
        """The best tree of that many nodes and at most so many levels. ValueError: there is none."""
        if self.tokens[depth, nodes] == -np.inf:
            raise ValueError(f"nodes: no tree of {depth} levels has {nodes}; give fewer nodes or more levels")
        counts, level = [], [(nodes, depth)]
        while level:
            below = []
            for size, levels in level:
                width = int(self.children[levels, size])
                counts.append(width)
                below += self._subtrees(size, levels, width)
            level = below
        return StaticTree(tuple(counts))

    def _subtrees(self, nodes: int, depth: int, width: int) -> list[tuple[int, int]]:
        """(nodes, levels) below each child of the root of the best tree, in the children's order."""
        found = []
        for k in range(width, 0, -1):
            rows = int(self.youngest[depth, k, nodes])
            found.append((rows - 1, depth - 1))
            nodes -= rows
        return found[::-1]


def _walk(shape: Sequence[int] | StaticTree) -> tuple[np.ndarray, np.ndarray, int]:
    """(children, first [nodes] int64, step): the child of rank r of node i is first[i] + r * step.

    All nodes of a level of <k1..km> are one here, so that its size does not matter.
    """
    if isinstance(shape, StaticTree):
        children = np.array(shape.children)
        return children, np.cumsum(children) - children + 1, 1
    children = np.array([*shape, 0])
    return children, np.arange(len(children)) + 1, 0
