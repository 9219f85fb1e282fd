# SPDX-License-Identifier: Apache-2.0
"""Suffix matching over the request's own tokens for the V2 runner, on the device."""

from __future__ import annotations

import torch

from specinfer_vllm.tree.device import DeviceDraws
from specinfer_vllm.triton_kernels.recycle import NGRAM_WEIGHTS, Grown, ngram


class DeviceNgram:
    """What followed the last tokens earlier in this text, as a tree: every such place votes, a longer match for more.

    Stateless, as propose/ngram.py, with a context of 4 tokens and a window of 1024.
    """

    name = "ngram"

    def __init__(
        self, slots: int, nodes: int, max_depth: int, owner: int, vocab_size: int, device: torch.device | str
    ) -> None:
        """owner: this proposer's number; its draws carry that bit. vocab_size: no token from here on is proposed."""
        self.max_depth, self.vocab_size = max_depth, vocab_size
        self.weight = torch.tensor(NGRAM_WEIGHTS, dtype=torch.float32, device=device)
        self.grown = Grown.empty(slots, nodes, device)
        self.owner = torch.full((slots, nodes), 1 << owner, dtype=torch.int32, device=device)

    def reset(self, slots: torch.Tensor) -> None:
        """Nothing is known of slots [k] int64."""

    def propose(
        self,
        history: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        branches: torch.Tensor,
        last: torch.Tensor,
    ) -> DeviceDraws:
        """Trees of slots [requests] int64; tensors as in the kernel's contract."""
        grown = ngram(
            history,
            length,
            slots,
            branches,
            last,
            self.weight,
            max_depth=self.max_depth,
            out=self.grown,
            vocab=self.vocab_size,
        )
        return draws_of(grown, self.owner, len(slots))


def draws_of(grown: Grown, owner: torch.Tensor, requests: int) -> DeviceDraws:
    """The first `requests` trees that a kernel grew, as draws. owner: as in DeviceDraws."""
    arrays = (grown.tokens, grown.parent, grown.score, grown.depth, grown.path, owner)
    return DeviceDraws(*(each[:requests] for each in arrays))
