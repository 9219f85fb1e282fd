# SPDX-License-Identifier: Apache-2.0
"""The walk along chosen tokens: checked against triton_kernels/reference/tree_walk.py, then timed.

    python -m specinfer_vllm.bench.kernels.tree_walk [--tiny]

Bound by latency, not by bytes: a visited node reads its choice, then its request's tokens and parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.reference import tree_walk as reference
from specinfer_vllm.triton_kernels.tree_walk import walk

# Rows of the requests of a checked batch: none, one, the edges of a block of children, a large tree.
CHECKED = [[1], [7, 0, 1, 33], [63, 64, 65, 129], [1024, 5, 0, 300], [9] * 256]
TIMED = [[9] * 64, [65] * 64, [1025] * 64]
FOLLOWED = 7 / 8  # of the children: chosen at their parent, unless a later one is


def inputs(device: torch.device, rows: Sequence[int], seed: int = 0) -> dict[str, object]:
    """Arguments of walk: random trees, siblings of different tokens; the walks are as deep as chance has it."""
    generator = torch.Generator().manual_seed(seed)
    parent, start = measure.random_forest(rows, seed)
    tokens = torch.randperm(len(parent), generator=generator)
    chosen = torch.full_like(tokens, len(parent))
    depth = [0] * len(parent)
    first = start[:-1].repeat_interleave(torch.tensor(rows)).tolist()
    follows = torch.rand(len(parent), generator=generator) < FOLLOWED
    for row, above in enumerate(parent.tolist()):
        if above >= 0:
            depth[row] = depth[first[row] + above] + 1
            if follows[row]:
                chosen[first[row] + above] = tokens[row]
    tensors = {"chosen": chosen, "tokens": tokens.int(), "parent": parent, "start": start}
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return moved | {"max_depth": max(depth)}


def _mismatches(device: torch.device, rows: Sequence[int]) -> int:
    arguments = inputs(device, rows)
    made, expected = walk(**arguments), reference.walk(**arguments)
    names = ("tokens", "rows", "num_tokens")
    return sum(int((getattr(made, name) != getattr(expected, name)).sum()) for name in names)


def _named(rows: Sequence[int]) -> str:
    return f"{len(rows)} x {rows[0]} rows" if len(set(rows)) == 1 else f"trees of {', '.join(map(str, rows))}"


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Elements that differ from the reference's, of which none may."""
    for rows in CHECKED[:3] if tiny else CHECKED:
        yield measure.checked(_named(rows), 0, _mismatches, device, rows)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch."""
    for rows in [[9] * 2] if tiny else TIMED:
        arguments = inputs(device, rows)
        visited = float(walk(**arguments).num_tokens.float().mean())
        found = measure.attempted(deadline, measure.graph_time, [partial(walk, **arguments)])
        yield {"requests": len(rows), "rows": rows[0], "visited": visited} | measure.time_cells(found)


if __name__ == "__main__":
    measure.main(check, times, __doc__)
