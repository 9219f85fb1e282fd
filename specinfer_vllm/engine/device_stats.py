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
    """Sums since the start of the worker, named as in TreeStats; its showcase and its failures have no place here.

    sums   [SUMS] int64
    owned  [2, proposers] int64    verified and accepted nodes that carry a draw of each proposer
    """

    def __init__(self, owners: Sequence[str], device: torch.device | str) -> None:
        self.owners = list(owners)
        self.sums = torch.zeros(len(SUMS), dtype=torch.int64, device=device)
        self.owned = torch.zeros(2, len(owners), dtype=torch.int64, device=device)
        self.bits = torch.arange(len(owners), dtype=torch.int32, device=device)
        self.undrafted: Counter[str] = Counter()

    def observe(self, emitted: torch.Tensor) -> None:
        """Add a step: emitted [requests] int, tokens that each request got, 0 while its prompt is not done."""
        sampled = emitted > 0
        zero = emitted.new_zeros(())
        self._add(sampled.any(), sampled.sum(), emitted.sum(), *[zero] * 4)

    def observe_trees(
        self, walked: Walk, start: torch.Tensor, request: torch.Tensor, tokens: torch.Tensor, owner: torch.Tensor
    ) -> None:
        """Add what the step did with its trees.

        start          [requests + 1] int32    rows of each request
        request        [rows] int64            whose row it is
        tokens, owner  [rows] int32            of the nodes: token -1 = none, owner = bits of the proposers
        """
        is_node = tokens >= 0
        trees = torch.zeros_like(walked.num_tokens).index_add_(0, request, is_node.to(walked.num_tokens.dtype))
        level = torch.arange(walked.rows.shape[1], device=tokens.device)
        on_path = (level > 0) & (level < walked.num_tokens[:, None])
        moved = on_path & (walked.rows - start[:-1, None] != level)
        zero = tokens.new_zeros(())
        self._add(zero, zero, zero, (trees > 0).sum(), is_node.sum(), on_path.sum(), moved.sum())
        accepted = torch.where(on_path, owner[walked.rows.clamp(min=0)], 0)
        for row, bits in enumerate((torch.where(is_node, owner, 0), accepted.flatten())):
            self.owned[row] += ((bits[:, None] >> self.bits) & 1).sum(dim=0)

    def _add(self, *values: torch.Tensor) -> None:
        self.sums += torch.stack([each.to(torch.int64) for each in values])

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
        return stats
