# SPDX-License-Identifier: Apache-2.0
"""Compaction of 64 accepted paths over 30 layers, against a plain copy of the same elements.

    pytest specinfer_vllm/bench/bench_compaction.py --benchmark-enable --benchmark-only

The plain copy moves the same tokens' elements with one indexed assignment per layer and ready-made indices; goal: at
least half its speed. A path in place costs nothing.
"""

import pytest
import torch

from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction

LAYERS, HEADS, BLOCK, DIM = 30, 3, 128, 64
REQUESTS, ACCEPTED = 64, 3


@pytest.fixture(scope="module")
def compaction() -> CpuKvCompaction:
    """A cache of two blocks per request."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    caches = [torch.randn(2 * REQUESTS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    return CpuKvCompaction(caches, CpuKvLayout.probe(BLOCK, DIM, torch.float32, "vec"))


def slots() -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations [64 * 3]: every path lies a few slots behind where it belongs."""
    request = torch.arange(REQUESTS).repeat_interleave(ACCEPTED)
    place = 2 * BLOCK * request + 100 + torch.arange(ACCEPTED).repeat(REQUESTS)
    return place + 2 + request % 5, place


def test_compaction(benchmark, compaction):
    """Indices and moves."""
    benchmark(compaction.move, *slots())


def test_plain_copy(benchmark, compaction):
    """The same elements, indices ready."""
    source, destination = (compaction.indices(each) for each in slots())

    def copy() -> None:
        for cache in compaction.flat:
            cache[destination] = cache[source]

    benchmark(copy)


def test_paths_in_place(benchmark, compaction):
    """Nothing to move."""
    nothing = torch.zeros(0, dtype=torch.int64)
    benchmark(compaction.move, nothing, nothing)
