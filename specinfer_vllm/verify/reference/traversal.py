# SPDX-License-Identifier: Apache-2.0
"""Traversal verification, one tree, plain Python, float64."""

from __future__ import annotations

import numpy as np

from specinfer_vllm.verify.reference.drafted import ROOT, Chance, Drafted, without


def traversal(tree: Drafted, p: np.ndarray, chance: Chance, replacement: bool = False) -> tuple[list[int], list[int]]:
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398), the paper's loop as a recursion.

    p [nodes, vocab] float64 = the LLM's law at each node. Returns emitted tokens and the nodes whose laws gave them.
    One-hot children take no part; if one of them carries the token emitted behind the accepted path, the naive rule
    goes on below it.
    """
    visit = _Visit(tree, p, chance, replacement)
    v = visit.leave(ROOT)
    emitted, nodes = _path(tree, v)
    token = chance.pick(v, visit.p[v])
    emitted.append(token)
    v = tree.child(v, token)
    if v in visit.h:  # its draw was refused; only rounding leads here
        v = None
    while v is not None:
        nodes.append(v)
        emitted.append(chance.pick(v, p[v]))
        v = tree.child(v, emitted[-1])
    return emitted, nodes


class _Visit:
    """h and P of every node, and the number of draws left so far."""

    def __init__(self, tree: Drafted, p: np.ndarray, chance: Chance, replacement: bool) -> None:
        self.tree, self.chance, self.replacement = tree, chance, replacement
        self.p, self.h, self.number = {node: p[node] for node in range(len(tree.tokens))}, {ROOT: 1.0}, 0

    def leave(self, n: int) -> int | None:
        """The accepted node at or below n; None if all are refused."""
        law, drawn = None, []
        for draw in self.tree.draws.get(n, ()):
            if draw.law != law:
                law, drawn = draw.law, []
            q = self.tree.laws[law]
            q = q if self.replacement else without(q, drawn)
            x = self.tree.tokens[draw.node]
            if draw.node in self.h:  # drawn before and refused: P_n[x] is 0
                self.number += 1
            else:
                self.h[draw.node] = min(1.0, self.h[n] * self.p[n][x] / q[x])
                accepted = self.leave(draw.node)
                if accepted is not None:
                    return accepted
            self.refuse(n, q)
            drawn.append(x)
        if n == ROOT:
            return n
        self.number += 1
        return n if self.chance.accepts(ROOT, self.number - 1, self.h[n], 1.0) else None

    def refuse(self, n: int, q: np.ndarray) -> None:
        """What a refused draw from q leaves of h[n] and P_n."""
        raw = np.maximum(self.h[n] * self.p[n] - q, 0)
        s = raw.sum()
        if s > 0:
            self.h[n], self.p[n] = s / (s + (1 - self.h[n])), raw / s
        elif self.h[n] < 1:  # at 1 only rounding leaves nothing: keep what is there
            self.h[n] = 0.0


def _path(tree: Drafted, v: int) -> tuple[list[int], list[int]]:
    """Tokens and nodes from the root to v; the root's own token was emitted earlier."""
    nodes = [v]
    while nodes[-1] != ROOT:
        nodes.append(tree.parent[nodes[-1]])
    nodes.reverse()
    return [tree.tokens[node] for node in nodes[1:]], nodes
