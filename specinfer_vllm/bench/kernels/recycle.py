# SPDX-License-Identifier: Apache-2.0
"""Token recycling's trees: checked against triton_kernels/reference/recycle.py, then timed.

    python -m specinfer_vllm.bench.kernels.recycle [--tiny]

A decision between two scores that lie closer than rounding reaches may fall either way, so requests with such a
decision are not compared. Bound by latency: a node is one pass over a window in registers and two dependent reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.recycle import CONTEXT, WINDOW, Grown, recycle
from specinfer_vllm.triton_kernels.reference import recycle as reference

CLOSE = 1e-5  # what sums of float32 logarithms along a path may be off by
WIDTH = 8
VOCAB = 50  # of the random texts: contexts of several tokens recur


@dataclass(frozen=True)
class Size:
    """requests trees of `nodes` nodes out of texts of `length` tokens."""

    requests: int
    nodes: int
    length: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.nodes} nodes, texts of {self.length}"


CHECKED = [Size(64, 8, 300), Size(33, 64, 1500), Size(5, 5, 40), Size(16, 1024, 1024)]
TIMED = [Size(64, 8, 1024), Size(64, 64, 1024), Size(64, 1024, 1024), Size(1, 8, 1024)]
TINY = Size(3, 5, 40)


def inputs(device: torch.device, size: Size, seed: int = 0) -> dict[str, object]:
    """Arguments of recycle: random texts of different lengths, successors recorded at two places of three."""
    generator = torch.Generator().manual_seed(seed)
    slots, ring = size.requests, min(WINDOW, size.length)
    shape = slots, ring, WIDTH
    length = size.length - torch.randint(0, size.length // 4, (slots,), generator=generator, dtype=torch.int32)
    behind = (length[:, None] - 2 - torch.arange(ring)).flip(1)  # the last places that something follows
    known = (behind >= 0) & (torch.rand(slots, ring, generator=generator) < 2 / 3)
    place = torch.full((slots, ring), -1)
    place.scatter_(1, behind % ring, torch.where(known, behind, -1))
    chances = torch.rand(shape, generator=generator).log().neg().pow(2)
    tensors = {
        "history": torch.randint(0, VOCAB, (slots, size.length), generator=generator, dtype=torch.int32),
        "length": length,
        "slot": torch.randperm(slots, generator=generator),
        "place": place.int(),
        "successors": torch.rand(slots, ring, VOCAB, generator=generator).argsort(dim=2)[:, :, :WIDTH].int(),
        "chances": (chances / chances.sum(2, keepdim=True)).sort(dim=2, descending=True).values,
        "branches": torch.full((slots,), WIDTH, dtype=torch.int32),
        "last": torch.full((slots,), size.length + 100, dtype=torch.int32),
        "weight": torch.full((CONTEXT,), 100.0),  # so that few paths are too unlikely
    }
    moved = {name: tensor.contiguous().to(device) for name, tensor in tensors.items()}
    return moved | {"max_depth": 8}


def _mismatches(device: torch.device, size: Size) -> int:
    """Requests whose trees differ although no decision was close. RuntimeError when few remain."""
    arguments = inputs(device, size)
    made, expected = (Grown.empty(size.requests, size.nodes, device) for _ in range(2))
    margin = torch.empty(size.requests, dtype=torch.float64)
    recycle(**arguments, out=made)
    reference.recycle(**arguments, out=expected, margin=margin)
    clear = margin.to(device) > CLOSE
    if not clear.any():
        raise RuntimeError("every request has a close decision")
    differ = ~torch.isclose(made.score, expected.score, rtol=0, atol=CLOSE).all(1)
    for name in ("tokens", "parent", "depth", "path"):
        differ |= (getattr(made, name) != getattr(expected, name)).any(1)
    return int((differ & clear).sum())


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Requests whose tree is not the reference's, of which none may be."""
    for size in [TINY] if tiny else CHECKED:
        yield measure.checked(str(size), 0, _mismatches, device, size)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch."""
    for size in [TINY] if tiny else TIMED:
        arguments, out = inputs(device, size), Grown.empty(size.requests, size.nodes, device)
        found = measure.attempted(deadline, measure.graph_time, [partial(recycle, **arguments, out=out)])
        row: measure.Row = {"requests": size.requests, "nodes": size.nodes, "length": size.length}
        yield row | measure.time_cells(found)


if __name__ == "__main__":
    measure.main(check, times, __doc__)
