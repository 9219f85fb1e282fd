# SPDX-License-Identifier: Apache-2.0
"""Tree arrays and depth-first order: checked against triton_kernels/reference/tree_build.py, then timed.

    python -m specinfer_vllm.bench.kernels.tree_build [--tiny]

Both kernels are bound by latency, not by bytes: the arrays of 64 x 32 rows are some 100 KB, which stay in the L2 cache
here as they do in a decoding step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.reference import tree_build as reference
from specinfer_vllm.triton_kernels.tree_build import build, depth_first

BLOCK_SIZE = 16
# Rows of the requests of a checked batch: none, one, the edges of a word of bits, a large tree.
CHECKED = [[1], [7, 0, 1, 33], [63, 64, 65, 129], [1024, 5, 0, 300], [32] * 64]
TIMED = [[32] * 64, [1024] * 64]


def inputs(device: torch.device, nodes: Sequence[int], seed: int = 0) -> dict[str, object]:
    """Arguments of build, and with `tokens` and `score` of depth_first: random trees, shuffled blocks.

    Many scores are equal and some NaN. Block table entries past a request's last row are negative.
    """
    generator = torch.Generator().manual_seed(seed)
    parent, start = measure.random_forest(nodes, seed)
    prefix = torch.randint(0, 90, (len(nodes),), generator=generator, dtype=torch.int32)
    needed = (prefix + torch.tensor(nodes)) // BLOCK_SIZE + 1
    width = int(needed.max())
    table = torch.randperm(len(nodes) * width, generator=generator).view(-1, width).to(torch.int32)
    table[torch.arange(width) >= needed[:, None]] = -1
    score = torch.randint(0, 5, (len(parent),), generator=generator).float()
    score[score == 4] = torch.nan
    tensors = {
        "parent": parent,
        "start": start,
        "prefix_len": prefix,
        "block_table": table,
        "tokens": torch.arange(len(parent), dtype=torch.int32) + 1000,
        "score": score,
    }
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return moved | {"max_rows": max(nodes), "block_size": BLOCK_SIZE}


def for_build(arguments: dict[str, object]) -> dict[str, object]:
    """The arguments without those of depth_first alone."""
    return {name: value for name, value in arguments.items() if name not in ("tokens", "score")}


def _differences(made: object, expected: object, names: Sequence[str]) -> int:
    """Elements of the named tensors that differ."""
    return sum(int((getattr(made, name) != getattr(expected, name)).sum()) for name in names)


def _build_mismatches(device: torch.device, nodes: Sequence[int]) -> int:
    arguments = inputs(device, nodes)
    made, expected = build(**for_build(arguments)), reference.build(**for_build(arguments))
    return _differences(made, expected, ("depth", "position", "ancestors", "slot"))


def _order_mismatches(device: torch.device, nodes: Sequence[int]) -> int:
    arguments = inputs(device, nodes)
    made, expected = depth_first(**arguments), reference.depth_first(**arguments)
    return _differences(made, expected, ("tokens", "parent", "source")) + _differences(
        made.arrays, expected.arrays, ("depth", "position", "ancestors", "slot")
    )


def _named(nodes: Sequence[int]) -> str:
    return f"{len(nodes)} x {nodes[0]} nodes" if len(set(nodes)) == 1 else f"trees of {', '.join(map(str, nodes))}"


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Elements that differ from the reference's, of which none may."""
    for nodes in CHECKED[:3] if tiny else CHECKED:
        yield measure.checked(f"build, {_named(nodes)}", 0, _build_mismatches, device, nodes)
        yield measure.checked(f"depth_first, {_named(nodes)}", 0, _order_mismatches, device, nodes)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch of either kernel."""
    for nodes in [[9] * 2] if tiny else TIMED:
        arguments = inputs(device, nodes)
        calls = {"build": partial(build, **for_build(arguments)), "depth_first": partial(depth_first, **arguments)}
        for name, call in calls.items():
            found = measure.attempted(deadline, measure.graph_time, [call])
            yield {"kernel": name, "requests": len(nodes), "nodes": nodes[0]} | measure.time_cells(found)


if __name__ == "__main__":
    measure.main(check, times, __doc__)
