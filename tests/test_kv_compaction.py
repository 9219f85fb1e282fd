# SPDX-License-Identifier: Apache-2.0
"""Accepted K/V moves to the slots of the path; everything else in the cache stays as it is."""

import numpy as np
import pytest
import torch

from specinfer_vllm.attention.cpu_kv_layout import CpuKvLayout
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction, moves, physical_slots
from specinfer_vllm.verify.walk import Accepted

BLOCK, DIM, HEADS = 32, 32, 3


@pytest.fixture(scope="module", autouse=True)
def kernels():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def read(cache, layout, slot):
    """K and V of one physical slot [heads, 2 * dim]."""
    interior = cache.view(len(cache), HEADS, -1)[slot // BLOCK]
    return torch.cat([interior[:, layout.key[slot % BLOCK]], interior[:, layout.value[slot % BLOCK]]], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_slots_hold_their_source_and_others_stay(dtype):
    rng = np.random.default_rng(0)
    layout = CpuKvLayout.probe(BLOCK, DIM, dtype, "vec")
    caches = [torch.randn(9, HEADS, BLOCK, 2 * DIM).to(dtype) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    source = torch.from_numpy(np.sort(rng.choice(9 * BLOCK, 40, replace=False)))
    destination = source - torch.from_numpy(rng.integers(0, 2, 40))  # may hit another move's source
    destination = torch.unique(destination.clamp(min=0))[: len(source)]
    source = source[: len(destination)]
    CpuKvCompaction(caches, layout).move(source, destination)
    moved = dict(zip(destination.tolist(), source.tolist(), strict=True))
    for cache, old in zip(caches, before, strict=True):
        for slot in range(9 * BLOCK):
            assert torch.equal(read(cache, layout, slot), read(old, layout, moved.get(slot, slot)))


def test_only_paths_out_of_place_move():
    rows = torch.tensor([[0, 1, 2, -1], [4, 5, 8, 9], [10, -1, -1, -1]])
    accepted = Accepted(tokens=rows, rows=rows, num_tokens=(rows >= 0).sum(1))
    request, (source, destination) = moves(accepted, torch.tensor([0, 4, 10]), torch.tensor([70, 30, 5]))
    assert request.tolist() == [1, 1]
    assert source.tolist() == [34, 35] and destination.tolist() == [32, 33]
    table = torch.tensor([[0, 0, 0], [7, 3, 0], [0, 0, 0]], dtype=torch.int32)
    assert physical_slots(table, request, source, BLOCK).tolist() == [3 * BLOCK + 2, 3 * BLOCK + 3]


def test_a_path_in_place_touches_nothing(monkeypatch):
    compaction = CpuKvCompaction(
        [torch.zeros(2, HEADS, BLOCK, 2 * DIM)], CpuKvLayout.probe(BLOCK, DIM, torch.float32, "vec")
    )
    monkeypatch.setattr(compaction, "indices", lambda slots: pytest.fail("indices were computed"))
    compaction.move(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_layers_of_different_shape_are_refused():
    layout = CpuKvLayout.probe(BLOCK, DIM, torch.float32, "vec")
    with pytest.raises(ValueError, match="one shape"):
        CpuKvCompaction([torch.zeros(2, HEADS, BLOCK, 2 * DIM), torch.zeros(2, 1, BLOCK, 2 * DIM)], layout)
