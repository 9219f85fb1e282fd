# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of drafting: one launch where there were hundreds, for as many requests as vLLM captures."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


class DraftGraphs(CudaGraphManager):
    """One part of drafting, captured per number of requests; vLLM's manager counts a request as one token.

    limit  most requests that a graph is made for
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, mode: CUDAGraphMode, row_limit: int = 1) -> None:
        """mode: of the LLM. Without full graphs of decoding steps there are none here either.

        row_limit: most rows of a request in one pass; of more than max_num_batched_tokens no model is compiled for.
        """
        scheduler = vllm_config.scheduler_config
        self.limit = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // row_limit)
        is_full = mode.decode_mode() == CUDAGraphMode.FULL
        mine = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, mine, decode_query_len=1)

    def _init_candidates(self) -> None:
        """As upstream, up to the limit, which is a size as well: a full batch has a graph, too."""
        self.max_num_reqs = self.limit
        self.compilation_config = copy(self.compilation_config)  # the LLM's manager has it, too
        if sizes := self.compilation_config.cudagraph_capture_sizes:
            self.compilation_config.cudagraph_capture_sizes = sorted({*sizes, self.limit} - {0})
        super()._init_candidates()

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
