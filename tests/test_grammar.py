# SPDX-License-Identifier: Apache-2.0
"""Grammar masks per node against masks of every path accepted from scratch."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer_vllm.engine.grammar import fill_tree

VOCAB = 6


class ToyGrammar:
    """Allows token t behind a path unless (sum of the path + t) is a multiple of 3; ends behind `length` tokens."""

    def __init__(self, length: int = 50) -> None:
        self.path: list[int] = []
        self.length = length

    def allowed(self) -> tuple[int, ...]:
        return tuple(t for t in range(VOCAB) if (sum(self.path) + t) % 3)

    def is_terminated(self) -> bool:
        return len(self.path) >= self.length

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens if tokens[0] in self.allowed() else []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        assert tokens[0] in self.allowed()
        self.path += tokens
        return True

    def rollback(self, count: int) -> None:
        del self.path[len(self.path) - count :]


def expected(tokens, parents, node, length) -> tuple[int, ...] | None:
    """Mask of a node whose path the grammar allows, None when it forbids it."""
    path = []
    while node:
        path.insert(0, tokens[node - 1])
        node = parents[node - 1]
    grammar = ToyGrammar(length)
    for token in path:
        if token < 0 or grammar.is_terminated() or token not in grammar.allowed():
            return None
        grammar.accept_tokens("", [token])
    return grammar.allowed()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("length", [2, 50])
def test_every_allowed_node_gets_the_mask_of_its_path(seed, length):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 25))
    parents = [int(rng.integers(0, i + 1)) for i in range(count)]
    tokens = [int(rng.integers(-1, VOCAB)) for _ in range(count)]
    grammar, masks = ToyGrammar(length), {}
    fill_tree(
        grammar,
        "r",
        tokens,
        parents,
        fill=lambda row: masks.__setitem__(row, grammar.allowed()),
        copy=lambda row, other: masks.__setitem__(row, masks[other]),
    )
    assert grammar.path == []
    assert sorted(masks) == list(range(count + 1))
    for node in range(count + 1):
        mask = expected(tokens, parents, node, length)
        if mask is not None:
            assert masks[node] == mask


def test_a_chain_walk_over_a_tree_is_wrong():
    """Negative control: the chain reading of the same nodes gives other masks, as vLLM's own filling would."""
    tokens, parents = [1, 4], [0, 0]
    assert expected(tokens, parents, 2, 50) != expected(tokens, [0, 1], 2, 50)
