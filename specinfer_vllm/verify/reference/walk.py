# SPDX-License-Identifier: Apache-2.0
"""VerifyGreedy and naive sampling as the paper states them: one tree, plain Python, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ROOT = 0


def descend(
    tokens: Sequence[int], parent: Sequence[int], token_at: Callable[[int], int]
) -> tuple[list[int], list[int]]:
    """Walk from the root while a child carries `token_at(node)`.

    Node 0 is the root; parent[i] < i. Returns the emitted tokens and the nodes whose laws gave them.
    """
    node, emitted, nodes = ROOT, [], [ROOT]
    while True:
        token = token_at(node)
        emitted.append(token)
        children = [child for child in range(1, len(parent)) if parent[child] == node and tokens[child] == token]
        if not children:
            return emitted, nodes
        node = children[0]
        nodes.append(node)


def greedy(tokens: Sequence[int], parent: Sequence[int], logits: np.ndarray) -> tuple[list[int], list[int]]:
    """VerifyGreedy. logits [nodes, vocab]."""
    return descend(tokens, parent, lambda node: int(np.argmax(logits[node])))


def naive(
    tokens: Sequence[int], parent: Sequence[int], law: np.ndarray, coin: Callable[[int], float]
) -> tuple[list[int], list[int]]:
    """Naive sampling. law [nodes, vocab] float64 sums to 1; coin(node) uniform in [0, 1)."""

    def token_at(node: int) -> int:
        cdf = np.cumsum(law[node], dtype=np.float64)
        return int(np.searchsorted(cdf, min(coin(node) * cdf[-1], np.nextafter(cdf[-1], 0)), side="right"))

    return descend(tokens, parent, token_at)
