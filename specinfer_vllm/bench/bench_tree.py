# SPDX-License-Identifier: Apache-2.0
"""Host time of token trees per decoding step.

    pytest specinfer_vllm/bench/bench_tree.py --benchmark-enable --benchmark-only

Targets on one core: 64 requests x 32 nodes built in 2 ms, three proposers' trees of that size merged in 5 ms. Every
step pays this between two LLM passes, so small batches count as much as large ones. Times are reported, never asserted.
"""

from collections.abc import Callable

import numpy as np
import pytest

from specinfer_vllm.tree.expand import prune
from specinfer_vllm.tree.merge import merge
from specinfer_vllm.tree.topology import TokenTrees, depth_first, from_arrays

SIZES = [(1, 8), (4, 16), (8, 32), (64, 32)]
PROPOSERS = 3
MAX_DEPTH = 8

Raw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
sizes = pytest.mark.parametrize(("requests", "nodes"), SIZES, ids=[f"{r}x{n}" for r, n in SIZES])


def raw_trees(requests: int, nodes: int, seed: int) -> Raw:
    """(offsets, tokens, parent, score) of random trees over a small vocabulary, so that proposers often agree."""
    rng = np.random.default_rng(seed)
    grown = [_grow(rng, nodes) for _ in range(requests)]
    tokens, parent, score = (np.concatenate(columns) for columns in zip(*grown, strict=True))
    return (
        np.arange(requests + 1) * (nodes + 1),
        tokens.astype(np.int32),
        parent.astype(np.int32),
        score.astype(np.float32),
    )


def _grow(rng: np.random.Generator, nodes: int) -> tuple[list[int], list[int], list[float]]:
    tokens, parent, score, depth, taken = [7], [-1], [0.0], [0], set()
    while len(tokens) <= nodes:
        # Mostly onto the last few nodes, for long paths; now and then anywhere, so that growth never gets stuck.
        oldest = 0 if rng.random() < 0.1 else max(0, len(tokens) - 6)
        node, token = int(rng.integers(oldest, len(tokens))), int(rng.integers(8))
        if (node, token) in taken or depth[node] == MAX_DEPTH:
            continue
        taken.add((node, token))
        tokens.append(token)
        parent.append(node)
        depth.append(depth[node] + 1)
        score.append(score[node] - rng.exponential())
    return tokens, parent, score


def _proposals(requests: int, nodes: int) -> list[Raw]:
    return [raw_trees(requests, nodes, seed) for seed in range(PROPOSERS)]


def _ready(trees: TokenTrees) -> TokenTrees:
    """What verification and the exchange format read."""
    _ = trees.ancestors, trees.first_child, trees.next_sibling
    return trees


@sizes
def test_build(benchmark: Callable, requests: int, nodes: int) -> None:
    """Validated arrays, depth-first order, ancestor bits, child and sibling links."""
    raw = raw_trees(requests, nodes, seed=0)
    benchmark(lambda: _ready(depth_first(from_arrays(*raw))))


@sizes
def test_merge(benchmark: Callable, requests: int, nodes: int) -> None:
    """Three proposers' trees into one; fresh inputs, so that nothing computed earlier helps."""
    built = [from_arrays(*raw) for raw in _proposals(requests, nodes)]
    arrays = [[getattr(trees, name) for name in TokenTrees.__dataclass_fields__] for trees in built]
    benchmark(lambda: merge([TokenTrees(*fields) for fields in arrays]))


@sizes
def test_build_merge_prune(benchmark: Callable, requests: int, nodes: int) -> None:
    """A step's tree work: three proposers' trees built, merged, pruned to the budget, made ready for verification."""
    raws = _proposals(requests, nodes)
    benchmark(lambda: _ready(prune(merge([from_arrays(*raw) for raw in raws]), nodes)))
