# SPDX-License-Identifier: Apache-2.0
"""What proposers read of a step, in buffers that stay: a CUDA graph reads the addresses it was captured with.

vLLM's own per-request values change their buffer with every step (vllm/v1/worker/gpu/buffer_utils.py, UvaBackedTensor).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specinfer_vllm.engine.device_requests import DeviceRequests
from specinfer_vllm.engine.sampling import GREEDY_BELOW
from specinfer_vllm.propose.device_children import DeviceDraftSampling
from specinfer_vllm.propose.device_ssm import DeviceStep
from specinfer_vllm.verify.rules import Rule

SAMPLING = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64}


class DraftInputs:
    """The requests of a step's batch, in its order, behind them nobody's.

    numbers   [3, requests] int64      slot, sequence index of the first token that was read, tokens that were emitted
    nobody    [3, requests] int64      of a place in the batch without a request
    sampling  temperature, top_k, top_p and seed [requests], None when the rule samples no children
    """

    def __init__(self, states: Any, limits: DeviceRequests, rule: Rule | None) -> None:
        """states: vLLM's RequestState."""
        self.history, self.length, self.limits = states.all_token_ids.gpu, states.total_len.gpu, limits
        self.slots, device = states.max_num_reqs, self.history.device
        self.rule = rule
        self.nobody = torch.zeros(3, self.slots, dtype=torch.int64, device=device)
        self.nobody[0] = self.slots
        self.numbers = self.nobody.clone()
        self.sampling: dict[str, torch.Tensor] | None = None
        if rule is not None:
            self.sampling = {
                name: torch.ones(self.slots, dtype=dtype, device=device) for name, dtype in SAMPLING.items()
            }

    def write(self, *numbers: torch.Tensor) -> None:
        """Rows of `numbers`, each [requests] int32."""
        self.clear()
        self.numbers[:, : len(numbers[0])] = torch.stack(numbers)

    def clear(self) -> None:
        """Of no request at all: nothing is read, and no K/V written."""
        self.numbers.copy_(self.nobody)

    def write_sampling(self, states: Any, slots: torch.Tensor) -> None:
        """How children are sampled, by the slots [requests] int64 of vLLM's SamplingStates."""
        if self.sampling is None:
            return
        given = (states.temperature, states.top_k, states.top_p, states.seeds)
        for buffer, values in zip(self.sampling.values(), given, strict=True):
            buffer[: len(slots)] = values.gpu[slots]

    def step(self, counts: np.ndarray, max_len: int, bounded: bool = False) -> DeviceStep:
        """Of the first requests: counts, max_len as of DeviceStep, bounded as of DeviceDraftSampling."""
        requests = len(counts)
        place, first, emitted = self.numbers[:, :requests]
        slots = place.clamp(max=self.slots - 1)
        branches, last = self.limits.limits[:, slots].long()
        return DeviceStep(
            place=place,
            slots=slots,
            history=self.history,
            length=self.length[slots].long() * (place < self.slots),
            first=first,
            counts=counts,
            sampled=emitted > 0,
            branches=branches,
            last=last,
            sampling=self._sampling(requests, bounded),
            max_len=max_len,
        )

    def _sampling(self, requests: int, bounded: bool) -> DeviceDraftSampling | None:
        if self.sampling is None:
            return None
        values = {name: buffer[:requests] for name, buffer in self.sampling.items()}
        is_sampled = values["temperature"] >= GREEDY_BELOW
        return DeviceDraftSampling(drafting=self.rule.drafting, sampled=is_sampled, bounded=bounded, **values)
