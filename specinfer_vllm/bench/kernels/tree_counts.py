# SPDX-License-Identifier: Apache-2.0
"""A step's counters: checked against triton_kernels/reference/tree_counts.py, then timed.

    python -m specinfer_vllm.bench.kernels.tree_counts [--tiny]

Timed: steps with trees, one without, and the same sums as operators of torch. Bound by latency: a program makes few
reads that depend on one another, then adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.reference import tree_counts as reference
from specinfer_vllm.triton_kernels.tree_counts import SUMS, CountedTrees, count

# Rows of the requests of a checked batch, and proposers.
CHECKED = [([1], 1), ([7, 0, 1, 33], 3), ([63, 64, 65, 129], 31), ([1024, 5, 0, 300], 2), ([9] * 256, 2)]
TIMED = [([9] * 64, 2), ([65] * 64, 2), ([1025] * 64, 2)]
TINY = [([9] * 2, 2)]

Sums = tuple[torch.Tensor, torch.Tensor]


def sums(device: torch.device, owners: int) -> Sums:
    """`sums` and `owned` that counted nothing yet."""
    return tuple(torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((len(SUMS),), (2, owners)))


def inputs(device: torch.device, rows: Sequence[int], owners: int, seed: int = 0) -> tuple[torch.Tensor, CountedTrees]:
    """`emitted` and trees: random ones, a random node of each accepted."""
    generator = torch.Generator().manual_seed(seed)
    parent, start = measure.random_forest(rows, seed)
    tokens = torch.randint(0, 1000, parent.shape, generator=generator, dtype=torch.int32)
    owner = torch.randint(0, 2**owners, parent.shape, generator=generator).int()
    tokens[parent < 0], owner[parent < 0] = -1, 0
    paths = []
    for first, end in zip(start.tolist(), start.tolist()[1:], strict=False):
        path: list[int] = []
        node = int(torch.randint(first, end, (), generator=generator)) - first if first < end else -1
        while node >= 0:
            path.insert(0, first + node)
            node = int(parent[first + node])
        paths.append(path)
    width = max(map(len, paths))
    path = torch.tensor([each + [-1] * (width - len(each)) for each in paths])
    emitted = (path >= 0).sum(1, dtype=torch.int32)
    lists = (each.to(device) for each in (path, start, tokens, owner))
    return emitted.to(device), CountedTrees(*lists)


def _mismatches(device: torch.device, rows: Sequence[int], owners: int) -> int:
    emitted, trees = inputs(device, rows, owners)
    made, expected = sums(device, owners), sums(device, owners)
    for each in (trees, None, trees):
        count(*made, emitted, each)
        reference.count(*expected, emitted, each)
    return sum(int((a != b).sum()) for a, b in zip(made, expected, strict=True))


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Sums that differ from the reference's, of which none may."""
    for rows, owners in CHECKED[:3] if tiny else CHECKED:
        shape = f"{len(rows)} x {rows[0]}" if len(set(rows)) == 1 else ", ".join(map(str, rows))
        yield measure.checked(f"{shape} rows, {owners} proposers", 0, _mismatches, device, rows, owners)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per step."""
    for rows, owners in TINY if tiny else TIMED:
        emitted, trees = inputs(device, rows, owners)
        totals = sums(device, owners)
        cases = {
            "count": partial(count, *totals, emitted, trees),
            "count, no trees": partial(count, *totals, emitted),
            "torch": partial(_in_torch, *totals, emitted, trees, torch.arange(owners, device=device).int()),
        }
        for case, call in cases.items():
            found = measure.attempted(deadline, measure.graph_time, [call])
            yield {"case": case, "requests": len(rows), "rows": rows[0]} | measure.time_cells(found)


def _in_torch(
    totals: torch.Tensor, owned: torch.Tensor, emitted: torch.Tensor, trees: CountedTrees, bit: torch.Tensor
) -> None:
    """The sums in torch; bit [proposers] int32 = 0, 1, and so on."""
    sampled = (emitted > 0).sum()
    first, is_node = trees.start[:-1], trees.tokens >= 0
    has_tree = is_node[(first + 1).clamp(max=len(is_node) - 1)]
    node = trees.path - first[:, None]
    level = torch.arange(node.shape[1], device=node.device)
    counts = [each.sum() for each in (has_tree, is_node, node > 0, node > level)]
    totals.add_(torch.stack([sampled.clamp(max=1), sampled, emitted.sum(), *counts]))
    accepted = trees.owner[trees.path.clamp(min=0)]
    for row, bits in enumerate((trees.owner, accepted.flatten())):
        owned[row].add_(((bits[:, None] >> bit) & 1).sum(dim=0))


if __name__ == "__main__":
    measure.main(check, times, __doc__)
