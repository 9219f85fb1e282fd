# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's speculator: the configured proposers, and the trees of all requests, on the device."""

from __future__ import annotations

from functools import cache
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
from specinfer_vllm.engine.draft_graphs import DraftGraphs
from specinfer_vllm.engine.draft_inputs import DraftInputs
from specinfer_vllm.engine.ssm_drafting import SsmDrafting
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.device_ngram import DeviceNgram
from specinfer_vllm.propose.device_primer import device_primer
from specinfer_vllm.propose.device_recycling import DeviceRecycling
from specinfer_vllm.propose.device_ssm import DeviceStep, Drafted
from specinfer_vllm.propose.primer import find_primer
from specinfer_vllm.tree.device import DeviceDraws, DeviceNodes, best_nodes, first_of, merged, united
from specinfer_vllm.verify.rules import RULES


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree of a fixed number of nodes for every request of the batch; the host learns nothing of it.

    trees     what is verified in the next pass, by vLLM's slot
    requests  limits of the slots' trees
    inputs    what was committed in the step
    rule      one that weighs sampled draws, None = the SSMs' likeliest children are drafted
    drawn     the draws of the trees drafted last, with such a rule
    sampling_states  of vLLM's sampler, which the runner hands over
    read_graphs, draft_graphs    of the SSMs' reading, and of all that follows; None until vLLM knows its KV cache
    kept      what each SSM drew in a graph, where growing trees is no part of it
    """

    read_graphs: DraftGraphs | None = None
    draft_graphs: DraftGraphs | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        self.options = tree_config(vllm_config).tree
        slots, nodes = self.max_num_reqs, self.num_speculative_steps
        self.rule = RULES[self.options.verifier] if self.options.samples_drafts else None
        self.drawn: SampledDraws | None = None
        self.sampling_states: Any = None
        self.trees = DeviceTrees(slots, nodes, slots, device)
        self.requests = DeviceRequests(slots, self.max_model_len, self.options, device)
        self.inputs = DraftInputs(req_states, self.requests, self.rule)
        self.ssms = SsmDrafting(vllm_config, device)
        self.recycling: DeviceRecycling | None = None
        self.free = [self._free_proposer(name) for name in self.options.free_proposers]
        self.stats = DeviceStats([each.name for each in (*self.ssms.every, *self.free)], device)
        self.stats.failures = self.ssms.failures
        self.kept: list[Drafted] = []
        self.draft_attn_layer_names: set[str] = set()

    def _free_proposer(self, name: str) -> DeviceNgram | DeviceRecycling:
        """The draft-free proposer of that name; proposers are numbered as they are configured, SSMs first."""
        slots, nodes, depth = self.max_num_reqs, self.num_speculative_steps, self.options.max_depth
        owner = len(self.ssms.every) + self.options.free_proposers.index(name)
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
        self.ssms.load()
        self.model = self.ssms.placed[0].model if self.ssms.placed else None
        self.draft_attn_layer_names = self.ssms.layer_names

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; the SSMs' layers are in the cache now."""
        super().set_attn(*args, **kwargs)
        self.ssms.bind(self.attn_groups, self.block_tables)

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Forget all graphs, which hold the addresses of an earlier KV cache."""
        self.kept = []
        self.read_graphs = DraftGraphs(
            self.vllm_config, self.device, cudagraph_mode, row_limit=self.options.longest_path
        )
        self.draft_graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode)

    def capture(self) -> None:
        """Capture what follows a step that verified trees only; on every rank, since ranks exchange addresses."""
        if not self.draft_graphs.needs_capture():
            return
        self.inputs.clear()  # vLLM's warm-up left requests there, whose K/V nobody may write now
        self.ssms.may_fail, may_fail = False, self.ssms.may_fail
        if self.ssms.every:
            self.read_graphs.capture(lambda requests: self.ssms.read(self._captured(requests)), "SSMs' reading")
        self.draft_graphs.capture(lambda requests: self._draft_and_keep(self._captured(requests)), "drafting")
        self.ssms.may_fail = may_fail

    def _captured(self, requests: int) -> DeviceStep:
        """The step that graphs are captured with: texts of any length, of which a longest path is read."""
        return self.inputs.step(np.full(requests, self.options.longest_path), self.max_model_len)

    def _draft_and_keep(self, step: DeviceStep) -> None:
        """Draft to where the graph ends. The first batch, which is the largest, makes buffers for what it keeps."""
        drafted = self.ssms.draft(step)
        if self.grows_in_graphs:
            self._grow(step, drafted)
            return
        self.kept = self.kept or [each.each(torch.empty_like) for each in drafted]
        for kept, each in zip(self.kept, drafted, strict=True):
            kept.copy_(each)

    @property
    def grows_in_graphs(self) -> bool:
        """Whether trees are grown in the graph that drafts: no other rank is asked, and no laws outlive the step."""
        return self.rule is None and self.ssms.exchange is None

    # -- a step --------------------------------------------------------------------------------------------------------

    def start(self, slots: torch.Tensor) -> None:
        """New requests begin on slots [k] int64: nothing of those that had them before is left."""
        self.trees.reset(slots)
        self.ssms.reset(slots)
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
        counts, max_len, bounded = self._stage(input_batch, num_sampled)
        requests = len(counts)
        step = cache(lambda: self.inputs.step(counts, max_len, bounded))  # graphs make their own
        if self.ssms.every and not ((counts == self.options.longest_path).all() and self.read_graphs.replay(requests)):
            self.ssms.read(step())
        if bounded or not self.draft_graphs.replay(requests):
            return self._grow(step(), self.ssms.draft(step()))
        if self.grows_in_graphs:
            return self.draft_tokens[:requests]
        return self._grow(step(), [each.each(lambda kept: kept[:requests]) for each in self.kept])

    def _grow(self, step: DeviceStep, drafted: list[Drafted | None]) -> torch.Tensor:
        """Unite what all proposers draw in one tree per request. Returns the tokens as `propose` does."""
        drafted = self.ssms.shared(drafted, len(step.counts))
        limits = self.requests.branches, self.requests.last
        draws = [each.propose(step.history, self.inputs.length, step.slots, *limits) for each in self.free]
        draws += [each.draws for each in drafted if each is not None]
        if not draws:
            self.trees.reset(step.place)
            return torch.zeros_like(self.draft_tokens[: len(step.counts)])
        if self.options.merge == "first":  # SSMs come before draft-free proposers, as on the V1 runner
            free = len(self.free)
            chosen = first_of(draws[free:] + draws[:free])
            draws = chosen[len(draws) - free :] + chosen[: len(draws) - free]
        union, place = (merged(draws), None) if self.rule is None else united(draws)
        nodes = best_nodes(union, self.num_speculative_steps, step.last - step.length - 1)
        tokens = self.draft_tokens[: len(step.counts)]
        torch.maximum(self.trees.write(step.place, nodes), self.trees.no_prefix[:1], out=tokens)  # -1 becomes 0
        if place is not None:  # without one SSM's laws all nodes count as not sampled, which the walk takes too
            self.drawn = None if None in drafted else self._drawn(step.slots, draws, drafted, union, place, nodes)
        return tokens

    def _profile(self, rows: int) -> None:
        """Take the memory that a full step takes beside the LLM's pass, so that vLLM leaves it free of KV blocks.

        The SSMs' passes; and laws of every row of as many trees as a step can verify: vLLM's own dummy run has one row
        per request. Rules that weigh draws keep residuals beside, traversal one of every level.
        """
        self.ssms.profile(rows)
        rows = min(self.max_num_reqs * self.trees.rows, self.max_num_tokens)
        vocab = self.vllm_config.model_config.get_vocab_size()
        residuals = 0
        if self.rule is not None:
            residuals = self.max_num_reqs * (self.options.max_depth + 1 if self.rule.looks_everywhere else 2)
        held = 2 * rows + residuals
        torch.empty(held, vocab, dtype=torch.float32, device=self.device)  # freed at once; the peak is what counts

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
        laws = [ssm.widened(each.laws) for ssm, each in zip(self.ssms.every, drafted, strict=True)]
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

    def _stage(self, batch: Any, num_sampled: torch.Tensor) -> tuple[np.ndarray, int, bool]:
        """Write what the LLM read and emitted into `inputs`. Returns what the host knows of it, as DraftInputs.step."""
        slots, count = batch.idx_mapping, batch.num_reqs
        read = batch.num_scheduled_tokens[:count].astype(np.int64)
        # Of a tree nothing is committed but its longest path, with the root in front and the next one behind.
        drafts = batch.num_draft_tokens_per_req
        rows = read + 1
        if drafts is not None:
            longest = np.minimum(drafts, self.options.max_depth) + 2
            rows = np.where(drafts > 0, np.minimum(rows, longest), rows)
        first = batch.seq_lens[:count] - batch.query_start_loc[: count + 1].diff()
        self.inputs.write(slots.int(), first, num_sampled)
        self.inputs.write_sampling(self.sampling_states, slots)
        max_len = int(batch.seq_lens_cpu_upper_bound[:count].max()) + 1
        return rows, max_len, self._is_bounded(batch.idx_mapping_np)

    def _is_bounded(self, slots: np.ndarray) -> bool:
        """Whether the children of some request are sampled from a law with a top-k or a top-p."""
        states = self.sampling_states
        if self.rule is None:
            return False
        return bool((states.top_k.np[slots] != states.vocab_size).any() or (states.top_p.np[slots] != 1).any())
