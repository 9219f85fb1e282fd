# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's speculator: the configured proposers, and the trees of all requests, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from specinfer_vllm.engine.device_requests import DeviceRequests
from specinfer_vllm.engine.device_stats import DeviceStats
from specinfer_vllm.engine.device_trees import DeviceTrees
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.device_recycling import DeviceRecycling
from specinfer_vllm.propose.device_ssm import DeviceSsm, DeviceStep
from specinfer_vllm.tree.device import best_nodes, merged


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree of a fixed number of nodes for every request of the batch; the host learns nothing of it.

    trees     what is verified in the next pass, by vLLM's slot
    requests  limits of the slots' trees
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        self.options = tree_config(vllm_config).tree
        self.req_states = req_states
        slots, nodes = self.max_num_reqs, self.num_speculative_steps
        self.trees = DeviceTrees(slots, nodes, slots, device)
        self.requests = DeviceRequests(slots, self.max_model_len, self.options)
        self.ssms = [DeviceSsm(vllm_config, index) for index in range(len(self.options.ssms))]
        self.ssm_groups: list[int] = []
        self.recycling = None
        if "recycling" in self.options.free_proposers:
            depth, owner = self.options.max_depth, len(self.ssms)
            self.recycling = DeviceRecycling(slots, self.max_model_len, nodes, depth, owner, device)
        names = [each.name for each in (*self.ssms, self.recycling) if each is not None]
        self.stats = DeviceStats(names, device)
        self.draft_attn_layer_names: set[str] = set()

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """Unused: there may be several models, or none."""
        raise NotImplementedError

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the SSMs; called once the LLM is loaded, so that memory profiling sees both."""
        for ssm in self.ssms:
            ssm.load()
        self.model = self.ssms[0].model if self.ssms else None
        self.draft_attn_layer_names = {name for ssm in self.ssms for name in ssm.layer_names}

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; the SSMs' layers are in the cache now."""
        super().set_attn(*args, **kwargs)
        self.ssm_groups = [ssm.bind(self.attn_groups) for ssm in self.ssms]

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured yet."""

    def capture(self) -> None:
        """Nothing is captured yet."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def start(self, slots: torch.Tensor) -> None:
        """New requests begin on slots [k] int64: nothing of those that had them before is left."""
        self.trees.reset(slots)
        if self.recycling is not None:
            self.recycling.reset(slots)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft the next trees. Returns their tokens [requests, nodes] int64; 0 where there is no node."""
        if dummy_run:
            return self.draft_tokens[: input_batch.num_reqs]
        slots, states = input_batch.idx_mapping, self.req_states
        draws = []
        if self.recycling is not None:
            history, length = states.all_token_ids.gpu, states.total_len.gpu
            limits = self.requests.branches.gpu, self.requests.last.gpu
            draws.append(self.recycling.propose(history, length, slots, *limits))
        draws += [
            ssm.draws(self._step(input_batch, group)) for ssm, group in zip(self.ssms, self.ssm_groups, strict=True)
        ]
        depth = self.requests.last.gpu[slots] - states.total_len.gpu[slots] - 1
        nodes = best_nodes(merged(draws), self.num_speculative_steps, depth)
        return self.trees.write(slots, nodes).clamp(min=0).to(torch.int64)

    def _step(self, input_batch: Any, group: int) -> DeviceStep:
        """What the LLM read, for SSMs whose layers stand in this KV cache group."""
        slots, states, count = input_batch.idx_mapping, self.req_states, input_batch.num_reqs
        read = input_batch.num_scheduled_tokens[:count].astype(np.int64)
        # Of a tree nothing is committed but its longest path, with the root in front and the next one behind.
        drafts = input_batch.num_draft_tokens_per_req
        rows = read + 1
        if drafts is not None:
            longest = np.minimum(drafts, self.options.max_depth) + 2
            rows = np.where(drafts > 0, np.minimum(rows, longest), rows)
        return DeviceStep(
            slots=slots,
            history=states.all_token_ids.gpu,
            length=states.total_len.gpu[slots].long(),
            first=(input_batch.seq_lens[:count] - input_batch.query_start_loc[: count + 1].diff()).long(),
            counts=rows,
            table=self.block_tables.input_block_tables[group][:count],
            branches=self.requests.branches.gpu[slots],
            max_len=int(input_batch.seq_lens_cpu_upper_bound[:count].max()) + 1,
        )
