# SPDX-License-Identifier: Apache-2.0
"""A step's counters, one request and one row at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from specinfer_vllm.triton_kernels.tree_counts import SUMS, CountedTrees


def count(sums: torch.Tensor, owned: torch.Tensor, emitted: torch.Tensor, trees: CountedTrees | None = None) -> None:
    """Tensors as in the kernel's contract."""
    found = dict.fromkeys(SUMS, 0)
    for tokens in emitted.tolist():
        found["request_steps"] += tokens > 0
        found["tokens"] += tokens
    found["steps"] = min(1, found["request_steps"])
    if trees is not None:
        for path, (root, end) in zip(trees.path.tolist(), pairwise(trees.start.tolist()), strict=True):
            rows = range(root, end)
            nodes = [row for row in rows if trees.tokens[row] >= 0]
            found["drafted_steps"] += root + 1 in nodes
            found["nodes"] += len(nodes)
            for level, row in enumerate(path):
                found["accepted"] += row > root
                found["moved"] += row > root + level
            _add(owned[0], trees.owner, rows)
            _add(owned[1], trees.owner, [row for row in path if row >= 0])
    sums += torch.tensor([found[name] for name in SUMS], device=sums.device)


def _add(counts: torch.Tensor, owner: torch.Tensor, rows: range | list[int]) -> None:
    for row in rows:
        for proposer in range(len(counts)):
            counts[proposer] += int(owner[row]) >> proposer & 1
