# SPDX-License-Identifier: Apache-2.0
"""The engine's own state per request, in arrays indexed by a slot that a request keeps while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

NO_SLOT = -1


class RequestSlots:
    """Slots of the running requests.

    seed        [slots] int64    keys the request's coins
    max_tokens  [slots] int64    sequence length (prompt and output) at which the request ends
    refused     [slots] object   why the request is served without drafts, None when it is not
    sampled     [slots] bool     its children are sampled from the SSMs' laws, not their likeliest tokens
    temperature, top_k, top_p  [slots] of the request, for the SSMs' laws
    """

    def __init__(self, num_slots: int, seed: int, vocab_size: int) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self.slot: dict[str, int] = {}
        self.seed = np.zeros(num_slots, np.int64)
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.refused = np.full(num_slots, None, object)
        self.sampled = np.zeros(num_slots, bool)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.zeros(num_slots, np.float32)
        self.base_seed, self.vocab_size = seed, vocab_size

    def start(
        self, request_id: str, params: SamplingParams | None, prompt_len: int, refused: str | None, sampled: bool
    ) -> int | None:
        """Give a request its slot; None when it has one or none is free.

        sampled: whether its children are sampled.

        Seeds of unseeded requests come from torch's generator, which every rank seeds alike, in the order in which
        requests arrive.
        """
        if request_id in self.slot or not self.free:
            return None
        slot = self.slot[request_id] = self.free.pop()
        own = params.seed if params is not None else None
        self.seed[slot] = int(torch.randint(2**62, ())) if own is None else own ^ self.base_seed
        max_tokens = params.max_tokens if params is not None and params.max_tokens else 2**31
        self.max_tokens[slot] = prompt_len + max_tokens
        self.refused[slot] = refused
        self.sampled[slot] = sampled
        if sampled and params is not None:
            self.temperature[slot], self.top_p[slot] = params.temperature, params.top_p
            self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        return slot

    def finish(self, request_id: str) -> int | None:
        """Take a request's slot back; None when it had none."""
        slot = self.slot.pop(request_id, None)
        if slot is not None:
            self.free.append(slot)
        return slot

    def of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Slots [requests] int64, NO_SLOT where there is none."""
        return np.fromiter((self.slot.get(each, NO_SLOT) for each in request_ids), np.int64, len(request_ids))
