# SPDX-License-Identifier: Apache-2.0
"""Traversal: checked against the torch reference, then timed, on the trees of bench/kernels/tree_verify.py.

python -m specinfer_vllm.bench.kernels.tree_traversal [--tiny]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.bench.kernels.tree_verify import CHECKED, FULL, TINY, inputs, mismatches, mixed
from specinfer_vllm.triton_kernels.reference import tree_traversal as reference
from specinfer_vllm.triton_kernels.tree_traversal import traverse

RULE = "without_replacement"
COMPARED = RULE, traverse, reference.traverse


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Requests whose walk is not the reference's, of which none may be."""
    for size in [replace(TINY, ssms=2)] if tiny else CHECKED:
        try:
            batch = inputs(device, size)
        except Exception as error:
            yield measure.Check(str(size), measure.first_line(error), 0)
            continue
        yield measure.checked(f"traversal, {size}", 0, mismatches, batch, *COMPARED)
        yield measure.checked(f"traversal, some greedy, a row of NaN, {size}", 0, mismatches, mixed(batch), *COMPARED)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch. Bytes as if every draw were refused: one read of its q and one write of P."""
    size = TINY if tiny else FULL
    try:
        batch = inputs(device, size)
    except torch.OutOfMemoryError:
        yield {"rule": "traversal", "us": measure.NO_MEMORY}
        return
    most = len(batch.draws.row) * size.vocab * 8
    row: measure.Row = {"rule": "traversal", "requests": size.requests, "nodes": size.nodes, "vocab": size.vocab}
    found = measure.attempted(deadline, measure.graph_time, [partial(traverse, **batch.arguments(RULE))])
    yield row | measure.time_cells(found, most, device)


if __name__ == "__main__":
    measure.main(check, times, __doc__)
