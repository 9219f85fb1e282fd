# SPDX-License-Identifier: Apache-2.0
"""What the V2 runner's speculator knows of each running request, by vLLM's own slot, readable by the device."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from specinfer_vllm.config import MAX_WIDTH, TreeOptions
from specinfer_vllm.engine import sampling


class DeviceRequests:
    """Limits of each slot's tree.

    branches    [slots] int32    most children per node: 0 = no tree, 1 = a chain
    last        [slots] int32    sequence length at which the request ends
                                 Both on the device, where CUDA graphs read them: they stay where they are.
    refused     why the slot's request gets no tree, for those that do not
    has_custom  whether the user loaded logits processors, which may look at the drafts in front of a row
    """

    def __init__(self, slots: int, max_len: int, options: TreeOptions, device: torch.device) -> None:
        self.options, self.max_len = options, max_len
        self.known = UvaBackedTensor((2, slots), torch.int32)  # as the host knows them
        self.limits = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self.branches, self.last = self.limits
        self.refused: dict[int, str] = {}
        self.has_custom = False

    def start(self, slot: int, params: SamplingParams | None, prompt_len: int) -> None:
        """A request begins on a slot; `publish` lets the device see it."""
        reason = "pooling" if params is None else sampling.refusal(params, self.options.verifier)
        if self.has_custom:
            reason = "custom_processors"
        self.refused.pop(slot, None)
        if reason is not None:
            self.refused[slot] = reason
        widest = self.options.branches or MAX_WIDTH
        if params is not None and walks_back(params):
            widest = 1
        branches = 0 if reason is not None else widest
        max_tokens = params.max_tokens if params is not None and params.max_tokens else self.max_len
        self.known.np[:, slot] = branches, min(prompt_len + max_tokens, self.max_len)

    def publish(self) -> None:
        """Bring what `start` wrote to the device, in stream order."""
        self.limits.copy_(self.known.copy_to_uva(), non_blocking=True)


def walks_back(params: SamplingParams) -> bool:
    """Whether vLLM's V2 sampler looks at the drafts in front of a row, which it takes for a chain.

    vllm/v1/worker/gpu/sample/penalties.py, bad_words.py: row i is taken to follow row i - 1.
    """
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty not in (1.0, None)
    return bool(penalised or params.bad_words)
