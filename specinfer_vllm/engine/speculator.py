# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's speculator: the configured proposers, and the trees of all requests, on the device."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from specinfer_vllm.engine.device_draws import SampledDraws
from specinfer_vllm.engine.device_requests import DeviceRequests
from specinfer_vllm.engine.device_stats import DeviceStats
from specinfer_vllm.engine.device_trees import DeviceTrees
from specinfer_vllm.engine.sampling import GREEDY_BELOW
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.device_children import DeviceDraftSampling
from specinfer_vllm.propose.device_ngram import DeviceNgram
from specinfer_vllm.propose.device_primer import device_primer
from specinfer_vllm.propose.device_recycling import DeviceRecycling
from specinfer_vllm.propose.device_ssm import DeviceSsm, DeviceStep
from specinfer_vllm.propose.primer import find_primer
from specinfer_vllm.tree.device import DeviceDraws, DeviceNodes, best_nodes, first_of, merged, united
from specinfer_vllm.verify.rules import RULES

logger = logging.getLogger("vllm.specinfer")


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree of a fixed number of nodes for every request of the batch; the host learns nothing of it.

    trees     what is verified in the next pass, by vLLM's slot
    requests  limits of the slots' trees
    rule      one that weighs sampled draws, None = the SSMs' likeliest children are drafted
    drawn     the draws of the trees drafted last, with such a rule
    sampling_states  of vLLM's sampler, which the runner hands over
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        self.options = tree_config(vllm_config).tree
        self.req_states = req_states
        slots, nodes = self.max_num_reqs, self.num_speculative_steps
        self.rule = RULES[self.options.verifier] if self.options.samples_drafts else None
        self.drawn: SampledDraws | None = None
        self.sampling_states: Any = None
        self.trees = DeviceTrees(slots, nodes, slots, device)
        self.requests = DeviceRequests(slots, self.max_model_len, self.options)
        self.ssms = [DeviceSsm(vllm_config, index) for index in range(len(self.options.ssms))]
        self.ssm_groups: list[int] = []
        self.recycling: DeviceRecycling | None = None
        self.free = [self._free_proposer(name) for name in self.options.free_proposers]
        self.stats = DeviceStats([each.name for each in (*self.ssms, *self.free)], device)
        self.draft_attn_layer_names: set[str] = set()

    def _free_proposer(self, name: str) -> DeviceNgram | DeviceRecycling:
        """The draft-free proposer of that name; proposers are numbered as they are configured, SSMs first."""
        slots, nodes, depth = self.max_num_reqs, self.num_speculative_steps, self.options.max_depth
        owner = len(self.ssms) + self.options.free_proposers.index(name)
        model = self.vllm_config.model_config
        vocab = model.get_vocab_size()
        if name == "ngram":
            return DeviceNgram(slots, nodes, depth, owner, vocab, self.device)
        path = find_primer(self.options.primer, model.model, model.revision)
        primer = None if path is None else device_primer(path, vocab, self.device)
        self.recycling = DeviceRecycling(slots, self.max_model_len, nodes, depth, owner, vocab, self.device, primer)
        return self.recycling

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
        for ssm in self.ssms:
            ssm.lost[slots] = False
        for each in self.free:
            each.reset(slots)

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
        is_profile: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft the next trees. Returns their tokens [requests, nodes] int64; 0 where there is no node."""
        if dummy_run:
            if is_profile:
                self._profile(input_batch.num_tokens)
            return self.draft_tokens[: input_batch.num_reqs]
        slots, states = input_batch.idx_mapping, self.req_states
        history, length = states.all_token_ids.gpu, states.total_len.gpu
        limits = self.requests.branches.gpu, self.requests.last.gpu
        draws = [each.propose(history, length, slots, *limits) for each in self.free]
        failed = False
        step = self._step(input_batch, num_sampled) if self.ssms else None
        for ssm, group in zip(self.ssms, self.ssm_groups, strict=True):
            try:
                table = self.block_tables.input_block_tables[group][: len(slots)]
                draws.append(ssm.draws(step, table))
            except Exception:
                self._failed(ssm, slots)
                failed = True
        if not draws:
            self.trees.reset(slots)
            return torch.zeros_like(self.draft_tokens[: len(slots)])
        if self.options.merge == "first":  # SSMs come before draft-free proposers, as on the V1 runner
            free = len(self.free)
            chosen = first_of(draws[free:] + draws[:free])
            draws = chosen[len(draws) - free :] + chosen[: len(draws) - free]
        depth = self.requests.last.gpu[slots] - states.total_len.gpu[slots] - 1
        union, place = (merged(draws), None) if self.rule is None else united(draws)
        nodes = best_nodes(union, self.num_speculative_steps, depth)
        tokens = self.trees.write(slots, nodes).clamp(min=0).to(torch.int64)
        if place is not None:  # without one SSM's laws all nodes count as not sampled, which the walk takes too
            self.drawn = None if failed else self._drawn(slots, draws, union, place, nodes)
        return tokens

    def _failed(self, ssm: DeviceSsm, slots: torch.Tensor) -> None:
        """An SSM raised: these requests go on without it. Raises with several ranks: one would draft differently."""
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            raise
        if not self.stats.failures[ssm.name]:
            logger.exception("SSM %r failed and is left out of this step; further failures are counted", ssm.name)
        self.stats.failures[ssm.name] += 1
        ssm.lost[slots] = True

    def _profile(self, rows: int) -> None:
        """Take the memory that a full step takes beside the LLM's pass, so that vLLM leaves it free of KV blocks.

        The SSMs' passes; and laws of every row of as many trees as a step can verify: vLLM's own dummy run has one row
        per request.
        """
        for ssm in self.ssms:
            ssm.logits(ssm.warm_up(rows)[: self.max_num_reqs * ssm.options.width])
        rows = min(self.max_num_reqs * self.trees.rows, self.max_num_tokens)
        model = self.vllm_config.model_config
        vocab = model.get_vocab_size()
        torch.empty(2, rows, vocab, dtype=torch.float32, device=self.device)  # freed at once; the peak is what counts

    def _drawn(
        self, slots: torch.Tensor, draws: list[DeviceDraws], union: DeviceDraws, place: torch.Tensor, nodes: DeviceNodes
    ) -> SampledDraws:
        """What was sampled, by the rows of the trees as they were written."""
        requests = len(slots)
        rows = self.trees.rows_of(requests)
        known, laws = zip(*(ssm.laws() for ssm in self.ssms), strict=True)
        per_request = sum(each.shape[1] for each in laws)
        law, first = [], 0
        for mine, theirs in zip(known, laws, strict=True):
            law.append(torch.where(mine >= 0, mine + first, -1))
            first += theirs.shape[1]
        free = place.shape[1] - sum(each.shape[1] for each in law)
        law = torch.cat([law[0].new_full((requests, free), -1), *law], dim=1)
        number = nodes.numbers(place)
        above = union.parent.long()
        above = torch.where(above > 0, nodes.numbers((above - 1).clamp(min=0)), 0)
        score = torch.cat([part.score for part in draws], dim=1)
        at = torch.full((self.max_num_reqs,), -1, dtype=torch.int64, device=self.device)
        at[slots] = torch.arange(requests, device=self.device)
        return SampledDraws(
            place=at,
            node=rows.gather(1, number),
            parent=rows.gather(1, above),
            law=law.clamp(min=0) + torch.arange(requests, device=self.device)[:, None] * per_request,
            kept=(law >= 0) & (number > 0) & (score > -torch.inf),
            laws=torch.cat(laws, dim=1).flatten(0, 1),
        )

    def _sampling(self, input_batch: Any) -> DeviceDraftSampling | None:
        """How SSMs sample the children of the batch's requests; None when the rule samples none."""
        if self.rule is None:
            return None
        states, slots, known = self.sampling_states, input_batch.idx_mapping, input_batch.idx_mapping_np
        bounded = (states.top_k.np[known] != states.vocab_size).any() or (states.top_p.np[known] != 1).any()
        temperature = states.temperature.gpu[slots]
        return DeviceDraftSampling(
            drafting=self.rule.drafting,
            sampled=temperature >= GREEDY_BELOW,
            temperature=temperature,
            top_k=states.top_k.gpu[slots],
            top_p=states.top_p.gpu[slots],
            seed=states.seeds.gpu[slots],
            bounded=bool(bounded),
        )

    def _step(self, input_batch: Any, num_sampled: torch.Tensor) -> DeviceStep:
        """What the LLM read, the same for all SSMs."""
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
            sampled=num_sampled > 0,
            branches=self.requests.branches.gpu[slots],
            sampling=self._sampling(input_batch),
            max_len=int(input_batch.seq_lens_cpu_upper_bound[:count].max()) + 1,
        )
