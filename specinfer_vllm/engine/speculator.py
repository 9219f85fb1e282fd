# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's speculator: the configured proposers, and the trees of all requests, on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from specinfer_vllm.config import ONE_PER_RANK
from specinfer_vllm.engine.device_draws import SampledDraws
from specinfer_vllm.engine.device_requests import DeviceRequests
from specinfer_vllm.engine.device_stats import DeviceStats
from specinfer_vllm.engine.device_trees import DeviceTrees
from specinfer_vllm.engine.draft_exchange import DraftExchange
from specinfer_vllm.engine.draft_graphs import DraftGraphs
from specinfer_vllm.engine.draft_inputs import DraftInputs
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.device_ngram import DeviceNgram
from specinfer_vllm.propose.device_recycling import DeviceRecycling
from specinfer_vllm.propose.device_ssm import DeviceSsm, DeviceStep, Drafted
from specinfer_vllm.tree.device import DeviceDraws, DeviceNodes, best_nodes, merged, united
from specinfer_vllm.verify.rules import RULES

logger = logging.getLogger("vllm.specinfer")


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree of a fixed number of nodes for every request of the batch; the host learns nothing of it.

    trees     what is verified in the next pass, by vLLM's slot
    requests  limits of the slots' trees
    rule      one that weighs sampled draws, None = the SSMs' likeliest children are drafted
    drawn     the draws of the trees drafted last, with such a rule
    ssms      all SSMs; placed: those whose weights are on this rank
    exchange  of what the ranks draft, when each has SSMs of its own
    sampling_states  of vLLM's sampler, which the runner hands over
    inputs    of the SSMs, in buffers that stay
    states    of each SSM [max_num_reqs, hidden]: at every request's last token
    kept      what each SSM drew in a graph
    read_graphs, draft_graphs    None until vLLM knows whether it captures any
    """

    read_graphs: DraftGraphs | None = None
    draft_graphs: DraftGraphs | None = None

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
        is_spread = self.options.ssm_placement == ONE_PER_RANK and any(ssm.is_whole for ssm in self.ssms)
        self.exchange = DraftExchange.of(self.ssms, self.options) if is_spread else None
        self.placed = self.ssms if self.exchange is None else [self.ssms[index] for index in self.exchange.mine]
        self.ssm_groups: list[int] = []
        self.inputs = DraftInputs(slots, req_states.all_token_ids.gpu, self.rule)
        self.states: dict[str, torch.Tensor] = {}
        self.kept: dict[str, Drafted] = {}
        self.recycling: DeviceRecycling | None = None
        self.free = [self._free_proposer(name) for name in self.options.free_proposers]
        self.stats = DeviceStats([each.name for each in (*self.ssms, *self.free)], device)
        self.draft_attn_layer_names: set[str] = set()

    def _free_proposer(self, name: str) -> DeviceNgram | DeviceRecycling:
        """The draft-free proposer of that name; proposers are numbered as they are configured, SSMs first."""
        slots, nodes, depth = self.max_num_reqs, self.num_speculative_steps, self.options.max_depth
        owner = len(self.ssms) + self.options.free_proposers.index(name)
        vocab = self.vllm_config.model_config.get_vocab_size()
        if name == "ngram":
            return DeviceNgram(slots, nodes, depth, owner, vocab, self.device)
        self.recycling = DeviceRecycling(slots, self.max_model_len, nodes, depth, owner, vocab, self.device)
        return self.recycling

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """Unused: there may be several models, or none."""
        raise NotImplementedError

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the SSMs; called once the LLM is loaded, so that memory profiling sees both."""
        for ssm in self.placed:
            ssm.load()
            size = self.max_num_reqs, ssm.model_config.get_hidden_size()
            self.states[ssm.name] = torch.zeros(size, dtype=ssm.model_config.dtype, device=self.device)
        self.model = self.placed[0].model if self.placed else None
        self.draft_attn_layer_names = {name for ssm in self.placed for name in ssm.layer_names}

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; the SSMs' layers are in the cache now."""
        super().set_attn(*args, **kwargs)
        self.ssm_groups = [ssm.bind(self.attn_groups) for ssm in self.placed]

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Forget all graphs, which hold the addresses of an earlier KV cache."""
        self.kept.clear()
        self.read_graphs = self.draft_graphs = None
        if self.ssms:  # on every rank, with or without one of its own: capturing exchanges addresses between ranks
            self.read_graphs, self.draft_graphs = (
                DraftGraphs(self.vllm_config, self.device, cudagraph_mode) for _ in range(2)
            )

    def capture(self) -> None:
        """Capture what the SSMs do in a step that verifies trees only."""
        if self.read_graphs is not None and self.read_graphs.needs_capture():
            self.read_graphs.capture(self._read_longest, "SSMs' reading")
            self.draft_graphs.capture(self._draft_and_keep, "SSMs' drafting")

    def _read_longest(self, requests: int) -> None:
        """Every SSM reads as much as a longest path, of every request."""
        step = self._captured_step(requests)
        for ssm, table in self._tables(requests):
            self._read(ssm, step, table)

    def _read(self, ssm: DeviceSsm, step: DeviceStep, table: torch.Tensor) -> None:
        self.states[ssm.name][: len(step.counts)] = ssm.read(step, table)

    def _draft_and_keep(self, requests: int) -> None:
        """Every SSM drafts for all requests; the first, and largest, batch makes the buffers of what they drew."""
        step = self._captured_step(requests)
        for ssm, table in self._tables(requests):
            drafted = ssm.draft(step, table, self.states[ssm.name][:requests])
            if ssm.name not in self.kept:
                self.kept[ssm.name] = drafted.each(torch.empty_like)
            self.kept[ssm.name].copy_(drafted)

    def _captured_step(self, requests: int) -> DeviceStep:
        return self.inputs.step(np.full(requests, self.longest_path), self.max_model_len)

    @property
    def longest_path(self) -> int:
        """Most rows that an SSM reads of a verified tree: its longest path, the root before and the one behind."""
        return self.options.max_depth + 2

    def _tables(self, requests: int) -> list[tuple[DeviceSsm, torch.Tensor]]:
        """Each SSM with the block table of its KV cache group [requests, blocks] int32."""
        tables = self.block_tables.input_block_tables
        return [(ssm, tables[group][:requests]) for ssm, group in zip(self.placed, self.ssm_groups, strict=True)]

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
        drafted = self._draft(input_batch, num_sampled) if self.placed else []
        if self.exchange is not None:
            drafted = self.exchange.share(drafted, len(slots), self.device)
        draws += [each.draws for each in drafted if each is not None]
        if not draws:
            self.trees.reset(slots)
            return torch.zeros_like(self.draft_tokens[: len(slots)])
        depth = self.requests.last.gpu[slots] - states.total_len.gpu[slots] - 1
        union, place = (merged(draws), None) if self.rule is None else united(draws)
        nodes = best_nodes(union, self.num_speculative_steps, depth)
        tokens = self.trees.write(slots, nodes).clamp(min=0).to(torch.int64)
        if place is not None:  # without one SSM's laws all nodes count as not sampled, which the walk takes too
            self.drawn = None if None in drafted else self._drawn(slots, draws, drafted, union, place, nodes)
        return tokens

    def _draft(self, batch: Any, num_sampled: torch.Tensor) -> list[Drafted | None]:
        """What each SSM of this rank draws for the batch's requests, None where one failed."""
        requests = batch.num_reqs
        step = self._step(batch, num_sampled)
        tables = self._tables(requests)
        if not ((step.counts == self.longest_path).all() and self.read_graphs.replay(requests)):
            for ssm, table in tables:
                self._attempt(ssm, self._read, ssm, step, table)
        bounded = step.sampling is not None and step.sampling.bounded
        if not bounded and self.draft_graphs.replay(requests):
            return [self.kept[ssm.name].each(lambda kept: kept[:requests]) for ssm in self.placed]
        return [self._attempt(ssm, ssm.draft, step, table, self.states[ssm.name][:requests]) for ssm, table in tables]

    def _attempt(self, ssm: DeviceSsm, part: Callable[..., Any], *args: Any) -> Any:
        """What part(*args) of an SSM's work returns, None when it raised."""
        try:
            return part(*args)
        except Exception:
            self._failed(ssm)
            return None

    def _failed(self, ssm: DeviceSsm) -> None:
        """An SSM raised: the batch's requests go on without it. Raises with several ranks: one would draft alone."""
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            raise
        if not self.stats.failures[ssm.name]:
            logger.exception("SSM %r failed and is left out of this step; further failures are counted", ssm.name)
        self.stats.failures[ssm.name] += 1
        ssm.lost[self.inputs.slots] = True

    def _profile(self, rows: int) -> None:
        """Take the memory that a full step takes beside the LLM's pass, so that vLLM leaves it free of KV blocks.

        The SSMs' passes; and laws of every row of as many trees as a step can verify: vLLM's own dummy run has one row
        per request.
        """
        if self.exchange is not None:
            self.exchange.reserve(self.max_num_reqs, self.device)
        for ssm in self.placed:
            ssm.logits(ssm.warm_up(rows)[: self.max_num_reqs * ssm.options.width])
        rows = min(self.max_num_reqs * self.trees.rows, self.max_num_tokens)
        vocab = self.vllm_config.model_config.get_vocab_size()
        torch.empty(2, rows, vocab, dtype=torch.float32, device=self.device)  # freed at once; the peak is what counts

    def _drawn(
        self,
        slots: torch.Tensor,
        draws: list[DeviceDraws],
        drafted: list[Drafted],
        union: DeviceDraws,
        place: torch.Tensor,
        nodes: DeviceNodes,
    ) -> SampledDraws:
        """What was sampled, by the rows of the trees as they were written."""
        requests = len(slots)
        rows = self.trees.rows_of(requests)
        known = [each.law for each in drafted]
        laws = [ssm.widened(each.laws) for ssm, each in zip(self.ssms, drafted, strict=True)]
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

    def _step(self, batch: Any, num_sampled: torch.Tensor) -> DeviceStep:
        """What the LLM read, the same for all SSMs."""
        slots, states, count = batch.idx_mapping, self.req_states, batch.num_reqs
        read = batch.num_scheduled_tokens[:count].astype(np.int64)
        # Of a tree nothing is committed but its longest path, with the root in front and the next one behind.
        drafts = batch.num_draft_tokens_per_req
        rows = read + 1
        if drafts is not None:
            longest = np.minimum(drafts, self.options.max_depth) + 2
            rows = np.where(drafts > 0, np.minimum(rows, longest), rows)
        first = batch.seq_lens[:count] - batch.query_start_loc[: count + 1].diff()
        numbers = (slots.int(), states.total_len.gpu[slots], first, self.requests.branches.gpu[slots])
        self.inputs.write(numbers, num_sampled > 0)
        self.inputs.write_sampling(self.sampling_states, slots)
        max_len = int(batch.seq_lens_cpu_upper_bound[:count].max()) + 1
        return self.inputs.step(rows, max_len, self._is_bounded(batch.idx_mapping_np))

    def _is_bounded(self, slots: np.ndarray) -> bool:
        """Whether the children of some request are sampled from a law with a top-k or a top-p."""
        states = self.sampling_states
        if self.rule is None:
            return False
        return bool((states.top_k.np[slots] != states.vocab_size).any() or (states.top_p.np[slots] != 1).any())
