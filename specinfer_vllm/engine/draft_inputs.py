# SPDX-License-Identifier: Apache-2.0
"""What SSMs read of a step, in buffers that stay where they are: a CUDA graph reads the addresses it was captured with.

vLLM's own per-request values change their buffer with every step (vllm/v1/worker/gpu/buffer_utils.py, UvaBackedTensor).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specinfer_vllm.engine.sampling import GREEDY_BELOW
from specinfer_vllm.propose.device_children import DeviceDraftSampling
from specinfer_vllm.propose.device_ssm import DeviceStep
from specinfer_vllm.verify.rules import Rule

SAMPLING = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64}


class DraftInputs:
    """The requests of a step's batch, in its order.

    count     requests written last
    numbers   [4, requests] int64      slot, length, first and branches, as of DeviceStep
    sampled   [requests] bool          as of DeviceStep
    sampling  temperature, top_k, top_p and seed [requests], None when the rule samples no children
    """

    def __init__(self, max_requests: int, history: torch.Tensor, rule: Rule | None) -> None:
        """history [slots, max_model_len] int32 is vLLM's."""
        self.history, self.rule, device = history, rule, history.device
        self.count = 0
        self.numbers = torch.zeros(4, max_requests, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self.sampling: dict[str, torch.Tensor] | None = None
        if rule is not None:
            types = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64}
            self.sampling = {
                name: torch.ones(max_requests, dtype=dtype, device=device) for name, dtype in types.items()
            }

    @property
    def slots(self) -> torch.Tensor:
        """Slots of the requests written last, [count] int64."""
        return self.numbers[0, : self.count]

    def write(self, numbers: tuple[torch.Tensor, ...], sampled: torch.Tensor) -> None:
        """Of requests in front, each [requests] int32. Those behind have no tokens: they read and draw nothing."""
        self.count = requests = len(sampled)
        self.numbers.zero_()
        self.numbers[:, :requests] = torch.stack(numbers)
        self.sampled.zero_()
        self.sampled[:requests] = sampled

    def write_sampling(self, states: Any, slots: torch.Tensor) -> None:
        """How children are sampled, by the slots [requests] int64 of vLLM's SamplingStates."""
        if self.sampling is None:
            return
        given = (states.temperature, states.top_k, states.top_p, states.seeds)
        for buffer, values in zip(self.sampling.values(), given, strict=True):
            buffer[: len(slots)] = values.gpu[slots]

    def step(self, counts: np.ndarray, max_len: int, bounded: bool = False) -> DeviceStep:
        """Views of the first requests: counts, max_len as of DeviceStep, bounded as of DeviceDraftSampling."""
        requests = len(counts)
        slots, length, first, branches = self.numbers[:, :requests]
        return DeviceStep(
            slots=slots,
            history=self.history,
            length=length,
            first=first,
            counts=counts,
            sampled=self.sampled[:requests],
            branches=branches,
            sampling=self._sampling(requests, bounded),
            max_len=max_len,
        )

    def _sampling(self, requests: int, bounded: bool) -> DeviceDraftSampling | None:
        if self.sampling is None:
            return None
        values = {name: buffer[:requests] for name, buffer in self.sampling.items()}
        is_sampled = values["temperature"] >= GREEDY_BELOW
        return DeviceDraftSampling(drafting=self.rule.drafting, sampled=is_sampled, bounded=bounded, **values)
