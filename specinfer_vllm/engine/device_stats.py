# SPDX-License-Identifier: Apache-2.0
"""Counters of the V2 runner, summed on the device and read when someone asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from specinfer_vllm.metrics import TreeStats
from specinfer_vllm.triton_kernels.tree_verify import Walk

SUMS = ("steps", "request_steps", "tokens", "drafted_steps", "nodes", "accepted", "moved")


class DeviceStats:
    """Sums since the start of the worker, named as in TreeStats; its showcase has no place here.

    sums   [SUMS] int64
    owned  [2, proposers] int64    verified and accepted nodes that carry a draw of each proposer
    """

    def __init__(self, owners: Sequence[str], device: torch.device | str) -> None:
        self.owners = list(owners)
        self.sums = torch.zeros(len(SUMS), dtype=torch.int64, device=device)
        self.owned = torch.zeros(2, len(owners), dtype=torch.int64, device=device)
        self.bits = torch.arange(len(owners), dtype=torch.int32, device=device)
        self.undrafted: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def observe(self, emitted: torch.Tensor) -> None:
        """Add a step: emitted [requests] int, tokens that each request got, 0 while its prompt is not done."""
        sampled = (emitted > 0).sum()
        self.sums[:3].add_(torch.stack([sampled.clamp(max=1), sampled, emitted.sum()]))

    def observe_trees(self, walked: Walk, start: torch.Tensor, tokens: torch.Tensor, owner: torch.Tensor) -> None:
        """Add what the step did with its trees.

        start          [requests + 1] int32    rows of each request, one at least
        tokens, owner  [rows] int32            of the nodes: token -1 and owner 0 = none, as at roots; owner = bits of
                                               the proposers
        """
        is_node = tokens >= 0
        # A tree's first node stands behind the root; behind a single row stands the next request's root.
        has_tree = is_node[(start[:-1] + 1).clamp(max=len(tokens) - 1)]
        node = walked.rows - start[:-1, None]  # negative behind the path's last
        level = torch.arange(node.shape[1], device=tokens.device)
        self.sums[3:].add_(torch.stack([each.sum() for each in (has_tree, is_node, node > 0, node > level)]))
        accepted = owner[walked.rows.clamp(min=0)]
        for row, bits in enumerate((owner, accepted.flatten())):
            self.owned[row].add_(((bits[:, None] >> self.bits) & 1).sum(dim=0))

    def count_undrafted(self, refused: dict[int, str], slots: np.ndarray) -> None:
        """Add the requests of a batch that get no tree, by reason; slots of the batch, refused by slot."""
        if refused:
            self.undrafted.update(refused[slot] for slot in slots.tolist() if slot in refused)

    def read(self) -> TreeStats:
        """All counters; waits for the device."""
        stats = TreeStats(**dict(zip(SUMS, self.sums.tolist(), strict=True)))
        proposed, accepted = self.owned.tolist()
        stats.proposed_by.update(dict(zip(self.owners, proposed, strict=True)))
        stats.accepted_by.update(dict(zip(self.owners, accepted, strict=True)))
        stats.undrafted.update(self.undrafted)
        stats.proposer_failures.update(self.failures)
        return stats
