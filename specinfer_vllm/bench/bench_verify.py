# SPDX-License-Identifier: Apache-2.0
"""Time of the sampled acceptance rules per decoding step, walk and residuals included.

    pytest specinfer_vllm/bench/bench_verify.py --benchmark-enable --benchmark-only

One tree of 32 nodes for each request, two draws a node, five levels, over SmolLM2's vocabulary of 49,152 tokens; the
LLM's law in float32 as the engine hands it over. A rule reads the rows that it visits: the work is linear in the
requests and, but for naive (every row) and traversal (every draw), does not grow with the tree's width. Times are
reported, never asserted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specinfer_vllm.tree.topology import from_arrays
from specinfer_vllm.verify import draft
from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.rules import RULES
from specinfer_vllm.verify.walk import TreeRows

VOCAB = 49_152
NODES = 32
LAWS = 128
REQUESTS = [8, 16, 32, 64]

Arguments = tuple[TreeRows, Draws, torch.Tensor, torch.Tensor, torch.Tensor]


def arguments(requests: int, vocab: int = VOCAB) -> Arguments:
    """A rule's arguments: 16 internal nodes of two draws each, breadth first, in every tree.

    Of the draws' laws only 128 different ones are kept, to save memory; the LLM's law is the draft's, blurred, so that
    about three draws of four are accepted.
    """
    generator = torch.Generator().manual_seed(0)
    size = NODES + 1
    laws = torch.randn((LAWS, vocab), generator=generator).mul_(4).softmax(dim=-1)
    law = torch.empty((requests * size, vocab))
    used = torch.arange(requests * size) % LAWS
    for part in range(0, len(law), size):
        rows = slice(part, part + size)
        torch.rand((size, vocab), generator=generator, out=law[rows]).add_(0.5).mul_(laws[used[rows]])
        law[rows] /= law[rows].sum(dim=-1, keepdim=True)
    parent = np.tile(np.array([-1, *((np.arange(NODES)) // 2)]), requests)
    key = torch.arange(LAWS)
    drawn = draft.without_replacement(laws, 2, key, key, key)
    row = torch.arange(requests * size).reshape(requests, size)[:, 1:].flatten()
    offsets = np.arange(requests + 1) * size
    above = torch.from_numpy(parent)[row] + row // size * size
    order = (torch.arange(NODES) % 2).repeat(requests)
    tokens = torch.zeros(requests * size, dtype=torch.int64)
    tokens[row] = drawn[used[above], order]
    rows = TreeRows.of(from_arrays(offsets, tokens.numpy(), parent))
    draws = Draws(row, used[above], order, laws, max_order=2, max_per_request=NODES)
    return rows, draws, law, rows.request + 1, rows.depth


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("name", RULES)
def test_rule(benchmark: Callable, name: str, requests: int) -> None:
    """One step of one rule."""
    step = arguments(requests)
    with torch.inference_mode():
        benchmark(lambda: RULES[name].verify(*step))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", ["iid", "without_replacement", "top_k_plus_one"])
def test_draft(benchmark: Callable, name: str, k: int) -> None:
    """k children for 8 nodes."""
    law = torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(0)).mul_(4).softmax(dim=-1)
    key = torch.arange(8)
    with torch.inference_mode():
        benchmark(lambda: getattr(draft, name)(law, k, key, key, key))
