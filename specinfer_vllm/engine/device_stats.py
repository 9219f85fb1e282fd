# SPDX-License-Identifier: Apache-2.0
"""Counters of the V2 runner, summed on the device and read when someone asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from specinfer_vllm.metrics import TreeStats
from specinfer_vllm.triton_kernels.tree_counts import SUMS, CountedTrees, count


class DeviceStats:
    """Sums since the start of the worker, named as in TreeStats; its showcase has no place here.

    sums   [SUMS] int64
    owned  [2, proposers] int64    verified and accepted nodes that carry a draw of each proposer
    """

    def __init__(self, owners: Sequence[str], device: torch.device | str) -> None:
        self.owners = list(owners)
        self.sums = torch.zeros(len(SUMS), dtype=torch.int64, device=device)
        self.owned = torch.zeros(2, len(owners), dtype=torch.int64, device=device)
        self.undrafted: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def observe(self, emitted: torch.Tensor, trees: CountedTrees | None = None) -> None:
        """Add a step, in one launch.

        emitted  [requests] int32    tokens that each request got, 0 while its prompt is not done
        trees    what the step did with its trees, None without any
        """
        count(self.sums, self.owned, emitted, trees)

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
