# SPDX-License-Identifier: Apache-2.0
"""Token recycling for the V2 runner: what the LLM said is kept on the device, and the trees grow there."""

from __future__ import annotations

import torch

from specinfer_vllm.propose.device_ngram import draws_of
from specinfer_vllm.propose.recycling import WIDTH
from specinfer_vllm.tree.device import DeviceDraws
from specinfer_vllm.triton_kernels.recycle import WEIGHTS, Grown, Primer, recycle

RING = 1024  # places of a request whose successors are kept: as far as the text is looked back


class DeviceRecycling:
    """The rows of every slot's last RING places, found by nobody but their own slot, and a primer for all.

    place       [slots + 1, ring] int32           as in the kernel's contract; the last slot takes what nobody wants
    successors  [slots + 1, ring, WIDTH] int32
    chances     [slots + 1, ring, WIDTH] float32
    """

    name = "recycling"

    def __init__(
        self,
        slots: int,
        max_len: int,
        nodes: int,
        max_depth: int,
        owner: int,
        vocab_size: int,
        device: torch.device | str,
        primer: Primer | None = None,
    ) -> None:
        """owner: this proposer's number; its draws carry that bit. vocab_size: no token from here on is proposed."""
        ring = min(RING, max_len)
        self.max_depth, self.vocab_size, self.nobody, self.primer = max_depth, vocab_size, slots, primer
        self.place = torch.full((slots + 1, ring), -1, dtype=torch.int32, device=device)
        self.successors = torch.full((slots + 1, ring, WIDTH), -1, dtype=torch.int32, device=device)
        self.chances = torch.zeros(slots + 1, ring, WIDTH, dtype=torch.float32, device=device)
        self.weight = torch.tensor(WEIGHTS, dtype=torch.float32, device=device)
        self.grown = Grown.empty(slots, nodes, device)
        self.owner = torch.full((slots, nodes), 1 << owner, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, the primer's included."""
        primed = () if self.primer is None else vars(self.primer).values()
        return sum(each.nbytes for each in (self.place, self.successors, self.chances, *primed))

    def reset(self, slots: torch.Tensor) -> None:
        """Forget the requests on slots [k] int64."""
        self.place.index_fill_(0, slots, -1)

    def observe(
        self, slots: torch.Tensor, index: torch.Tensor, is_seen: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Keep what the LLM said.

        slots    [requests] int64            whose places these are
        index    [requests, places] int64    sequence index of each place
        is_seen  [requests, places] bool     places that count
        best     tokens int64 and probabilities float32 [requests * places, WIDTH], best first
        """
        owner = torch.where(is_seen, slots[:, None], self.nobody).flatten()
        at = (index % self.place.shape[1]).flatten()
        self.place[owner, at] = index.flatten().int()
        self.successors[owner, at] = best[0].int()
        self.chances[owner, at] = best[1].float()

    def propose(
        self,
        history: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        branches: torch.Tensor,
        last: torch.Tensor,
    ) -> DeviceDraws:
        """Trees of slots [requests] int64; tensors as in the kernel's contract."""
        grown = recycle(
            history,
            length,
            slots,
            self.place,
            self.successors,
            self.chances,
            branches,
            last,
            self.weight,
            max_depth=self.max_depth,
            out=self.grown,
            primer=self.primer,
            vocab=self.vocab_size,
        )
        return draws_of(grown, self.owner, len(slots))
