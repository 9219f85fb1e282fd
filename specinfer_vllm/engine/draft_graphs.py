# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of drafting: one launch where there were hundreds, for as many requests as vLLM captures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


class DraftGraphs(CudaGraphManager):
    """One part of drafting, captured per number of requests; vLLM's manager counts a request as one token."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, mode: CUDAGraphMode) -> None:
        """mode: of the LLM. Without full graphs of decoding steps there are none here either."""
        is_full = mode.decode_mode() == CUDAGraphMode.FULL
        mine = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, mine, decode_query_len=1)

    def capture(self, part: Callable[[int], None], name: str) -> None:
        """Capture part(requests), for the largest number first, once it has run outside of a graph."""
        super().capture(lambda desc, warmup: lambda mode: part(desc.num_reqs), f"Capturing CUDA graphs of {name}")

    def replay(self, requests: int) -> bool:
        """Run the graph of so many requests or the next larger one. False when there is none: nothing has run."""
        found = self.dispatch(requests, requests, 1, 0)
        if found.cg_mode != CUDAGraphMode.FULL:
            return False
        self.run_fullgraph(found)
        return True
