# SPDX-License-Identifier: Apache-2.0
"""A tree whose shape is known before anything is drafted: the expansion <k1,...,km>, or any other as paths of ranks.

Plain Python: options are read by processes that import nothing heavy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat


def level_sizes(expansion: Iterable[int]) -> list[int]:
    """Nodes at each depth from 1 on: the running products of the expansion."""
    sizes, size = [], 1
    for width in expansion:
        size *= width
        sizes.append(size)
    return sizes


def num_nodes(expansion: Iterable[int]) -> int:
    """Nodes of the full tree, the root not counted."""
    return sum(level_sizes(expansion))


@dataclass(frozen=True)
class StaticTree:
    """children: how many each node has, the root first, level by level, siblings likeliest first.

    Node i of that order is an SSM's i-th draw, so that the i-th number here is of the node with local index i.
    """

    children: tuple[int, ...]

    @classmethod
    def of_expansion(cls, widths: Sequence[int]) -> StaticTree:
        """The tree <k1..km>; widths are 1 or more each."""
        levels = zip((*widths, 0), (1, *level_sizes(widths)), strict=True)
        return cls(tuple(width for width, nodes in levels for width in repeat(width, nodes)))

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """The tree of these nodes in any order, each named by the ranks on its path: (0, 2) is a first node's third.

        ValueError: a node is given twice, or without its parent or its elder sibling.
        """
        nodes = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        count = Counter(nodes)
        for node in nodes:
            if count[node] > 1:
                raise ValueError(f"{list(node)} is given {count[node]} times; give each node once")
            *parent, rank = node
            for kind, needed in (("parent", parent), ("elder sibling", [*parent, max(rank - 1, 0)])):
                if needed and tuple(needed) not in count:
                    raise ValueError(f"{list(node)} stands without its {kind} {needed}; add {needed}")
        below = Counter(node[:-1] for node in nodes)
        return cls(tuple(below[node] for node in ((), *nodes)))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, the root's level first; the last level, of leaves only, is left out."""
        levels, start, size = [], 0, 1
        while any(level := self.children[start : start + size]):
            levels.append(level)
            start, size = start + size, sum(level)
        return tuple(levels)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Each node as the ranks on its path, in the order of `children`, the root left out."""
        every, last = [], [()]
        for level in self.levels:
            last = [(*path, rank) for path, width in zip(last, level, strict=True) for rank in range(width)]
            every += last
        return every

    @property
    def expansion(self) -> tuple[int, ...] | None:
        """<k1..km>, None where nodes of one level differ in how many children they have."""
        if any(len(set(level)) > 1 for level in self.levels):
            return None
        return tuple(level[0] for level in self.levels)

    @property
    def depth(self) -> int:
        """Longest path below the root."""
        return len(self.levels)

    @property
    def num_nodes(self) -> int:
        """Nodes, the root not counted."""
        return len(self.children) - 1

    @property
    def num_read(self) -> int:
        """Nodes that an SSM reads to draw their children, the root not counted."""
        return sum(map(bool, self.children[1:]))

    @property
    def widest(self) -> int:
        """Most children of a node."""
        return max(self.children)
