# SPDX-License-Identifier: Apache-2.0
"""What the references of the sampled rules share: a drafted tree, a source of chance, residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

ROOT = 0


@dataclass(frozen=True)
class Draw:
    """One sampled token: the node that carries it and the row of `laws` that it was drawn from."""

    node: int
    law: int


@dataclass(frozen=True)
class Drafted:
    """One request's tree. Node 0 is the root, parent[i] < i, siblings carry different tokens.

    draws   the sampled draws made at a node, in the order of drawing; nodes that no draw leads to are one-hot
    laws    [laws][vocab] float64, each summing to 1
    """

    tokens: Sequence[int]
    parent: Sequence[int]
    draws: Mapping[int, Sequence[Draw]] = field(default_factory=dict)
    laws: Sequence[np.ndarray] = ()

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`."""
        for other in range(node + 1, len(self.parent)):
            if self.parent[other] == node and self.tokens[other] == token:
                return other
        return None


class Chance(Protocol):
    """Coins, or an enumeration of everything that coins can do."""

    def accepts(self, node: int, number: int, target: float, drafted: float) -> bool:
        """True with probability min(1, target / drafted): coin * drafted < target. The coin is (node, number)'s."""
        ...

    def pick(self, node: int, law: np.ndarray) -> int:
        """A token of law `law`, by the coin of `node`."""
        ...


def after_refusal(residual: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(relu(R - q)); R itself if nothing is left, which only rounding brings about."""
    raw = np.maximum(residual - q, 0)
    return raw / raw.sum() if raw.any() else residual


def without(law: np.ndarray, drawn: Sequence[int]) -> np.ndarray:
    """`law` once `drawn` are taken out; uniform over the rest where that leaves nothing. float64, sums to 1."""
    rest = law.copy()
    rest[list(drawn)] = 0
    if not rest.any():
        rest = np.ones_like(law)
        rest[list(drawn)] = 0
    return rest / rest.sum()
