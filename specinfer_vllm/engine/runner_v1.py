# SPDX-License-Identifier: Apache-2.0
"""Token trees on vLLM's V1 runner: hooks only, in the order in which a step calls them.

`_update_states` → `_prepare_inputs` → `_build_attention_metadata` → (LLM pass) → `_sample` → bookkeeping →
`propose_draft_token_ids` → `take_draft_token_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from specinfer_vllm.attention.cpu import TreeCPUAttentionImpl, TreePass
from specinfer_vllm.attention.cpu_kv_layout import layout_of
from specinfer_vllm.attention.tree_mask import TreeMask
from specinfer_vllm.engine import sampling
from specinfer_vllm.engine.draft_tokens import TreeDraftTokenIds
from specinfer_vllm.engine.drafter import TreeDrafter
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction, llm_layers, moves, physical_slots
from specinfer_vllm.engine.requests import NO_SLOT
from specinfer_vllm.engine.step import is_chain
from specinfer_vllm.engine.successors import best_successors
from specinfer_vllm.metrics import Showcase
from specinfer_vllm.propose.proposer import DraftBatch, Observation
from specinfer_vllm.propose.ssm import SsmStep
from specinfer_vllm.tree.topology import TokenTrees
from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.walk import Accepted, TreeRows, walk


@dataclass
class StepTrees:
    """The trees one LLM pass verifies; row i of the trees is row i of the logits.

    query_rows  [rows] int64        row of the LLM's input
    root_index  [requests] int64    sequence index of the root
    slots       [requests] int64    the engine's, NO_SLOT without one
    chains      [requests] bool     the nodes form a path
    mask        None when every tree is a chain: causal attention says the same
    """

    trees: TokenTrees
    rows: TreeRows
    query_rows: torch.Tensor
    root_index: torch.Tensor
    slots: np.ndarray
    chains: np.ndarray
    mask: TreeMask | None
    accepted: Accepted | None = None


class TreeRunnerMixin:
    """Overrides of GPUModelRunner's hooks; `drafter` is the TreeDrafter that vLLM built by its class path."""

    drafter: TreeDrafter
    step: StepTrees | None = None
    compactions: list[tuple[int, CpuKvCompaction]] | None = None

    # -- requests come and go ------------------------------------------------------------------------------------------

    def _update_states(self, scheduler_output: Any) -> Any:
        self.drafter.finish(scheduler_output.finished_req_ids)
        self.drafter.finish(scheduler_output.preempted_req_ids or ())
        result = super()._update_states(scheduler_output)
        for request_id in self.input_batch.req_ids:
            if request_id not in self.drafter.slots.slot:
                self._start_request(request_id)
        return result

    def _start_request(self, request_id: str) -> None:
        request = self.requests[request_id]
        params = request.sampling_params
        refused = "pooling" if params is None else self._refusal(params)
        self.drafter.start(request_id, params, request.num_prompt_tokens, refused)

    def _refusal(self, params: Any) -> str | None:
        if sampling.has_custom_processors(self.input_batch.sampling_metadata):
            return "custom_processors"
        return sampling.refusal(params, self.drafter.options.verifier)

    # -- the LLM pass --------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.step = self._plan(scheduler_output, prepared[0])
        return prepared

    def _plan(self, scheduler_output: Any, query_rows: torch.Tensor) -> StepTrees:
        """The trees this pass verifies, and their positions. query_rows [rows] int64: vLLM's logits_indices."""
        request_ids = self.input_batch.req_ids
        trees = self.drafter.drafted.scheduled(request_ids, scheduler_output.scheduled_spec_decode_tokens)
        if self.drafter.drafted.laws is not None:
            trees = trees.unsampled(self.drafter.drafted.may_be_cut(request_ids, self._room(scheduler_output)))
        rows = TreeRows.of(trees, self.device)
        seq_len = self.optimistic_seq_lens_cpu[: len(request_ids)].to(torch.int64)
        root_index = seq_len - 1 - torch.from_numpy(trees.num_nodes)
        covers_all = trees.num_rows == scheduler_output.total_num_scheduled_tokens
        chains = is_chain(trees)
        wide = np.flatnonzero(~chains)
        mask = build_mask(trees, wide, query_rows, root_index, covers_all) if len(wide) else None
        if mask is not None:
            # vLLM has derived the slots from linear positions; only now may the positions become depths.
            self.positions[query_rows] = root_index[rows.request] + rows.depth
        return StepTrees(trees, rows, query_rows, root_index, self.drafter.slots.of(request_ids), chains, mask)

    def _room(self, scheduler_output: Any) -> np.ndarray:
        """Tokens the scheduler had left when it came to each request [requests] int64; it fills its dict in order."""
        scheduled = scheduler_output.num_scheduled_tokens
        taken = np.cumsum([0, *scheduled.values()])
        left = dict(zip(scheduled, self.scheduler_config.max_num_batched_tokens - taken[:-1], strict=True))
        room = np.array([left[each] for each in self.input_batch.req_ids])
        most = self.scheduler_config.long_prefill_token_threshold
        return np.minimum(room, most) if most > 0 else room

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(*args, **kwargs)
        if self.step is not None and self.step.mask is not None:
            for metadata in {id(each): each for each in built[0].values()}.values():
                metadata.tree = TreePass.of(self.step.mask, metadata.block_table, self.cache_config.block_size)
        return built

    # -- acceptance ----------------------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        step, metadata = self.step, self.input_batch.sampling_metadata
        if step is None or len(step.rows.tokens) != len(logits):  # a dummy run
            return super()._sample(logits, spec_decode_metadata)
        stock = self._sample_refused(logits, step, metadata)
        if stock is not None and stock[1].all():
            return self._root_only(step, stock[0])
        laws = sampling.RowLaws(logits, metadata, step.rows, self.sampler)
        if stock is not None:
            laws.fix(step.rows.roots[stock[1]], stock[0].sampled_token_ids[stock[1], 0])
        step.accepted = self._accept(step, laws)
        self._compact(step)
        self._observe(step, logits)
        return SamplerOutput(step.accepted.tokens.to(torch.int32), self._logprobs(step, logits, laws))

    def _accept(self, step: StepTrees, laws: sampling.RowLaws) -> Accepted:
        """Walk every tree by its request's rule: greedy requests are sampled ones whose law is one token."""
        if laws.metadata.all_greedy:
            return walk(step.rows, laws.best())
        seed = torch.from_numpy(self.drafter.slots.seed[step.slots])[step.rows.request]
        position = step.root_index[step.rows.request] + step.rows.depth + 1
        draws = Draws.of(step.trees, self.drafter.drafted.laws, laws.shape[-1])
        rule = self.drafter.rule
        return rule.verify(step.rows, draws, laws.all() if rule.looks_everywhere else laws, seed, position)

    def _sample_refused(self, logits: torch.Tensor, step: StepTrees, metadata: Any) -> Any:
        """vLLM's own sampler on the roots' rows, which is plain decoding, when some request is served without drafts.

        Returns (SamplerOutput, refused [requests] bool), None when every request is served on its tree.
        """
        reasons = np.where(step.slots == NO_SLOT, "no_slot", self.drafter.slots.refused[step.slots])
        refused = np.not_equal(reasons, None)
        if not refused.any():
            return None
        self.drafter.stats.undrafted.update(reasons[refused].tolist())
        if not refused.all():  # the rows' own logprobs are gathered for all at once
            metadata = replace(metadata, max_num_logprobs=None, logprob_token_ids=None)
        unread = self.discard_request_mask.np
        kept = [(each, each.get_state()) for i, each in metadata.generators.items() if unread[i]]
        output = self.sampler(logits[step.rows.roots], metadata)
        for generator, state in kept:  # a prompt that is not read to its end draws nothing
            generator.set_state(state)
        return output, torch.from_numpy(refused)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which winds back the generators of unfinished prompts: a CPU's have no offset and raise."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _root_only(self, step: StepTrees, output: SamplerOutput) -> SamplerOutput:
        """Plain decoding's output: one token per request, no node accepted."""
        tokens = output.sampled_token_ids.to(torch.int64)
        roots = step.rows.roots[:, None]
        step.accepted = Accepted(tokens=tokens, rows=roots, num_tokens=torch.ones(len(roots), dtype=torch.int64))
        return output

    def _compact(self, step: StepTrees) -> None:
        request, (source, destination) = moves(step.accepted, step.rows.roots, step.root_index)
        self.drafter.stats.moved += len(request)
        if not len(request):
            return
        for group, compaction in self._compactions():
            table = self.input_batch.block_table[group].get_device_tensor(self.input_batch.num_reqs)
            slots = physical_slots(table, request, torch.stack([source, destination]), compaction.block_size)
            compaction.move(*slots)

    def _compactions(self) -> list[tuple[int, CpuKvCompaction]]:
        """One compaction per KV cache group and shape of the LLM's layers; SSMs re-read the path instead."""
        if self.compactions is None:
            self.compactions = [
                (group, CpuKvCompaction([layer.kv_cache for layer in layers], layout_of(layers[0], layers[0].kv_cache)))
                for group, layers in llm_layers(
                    self.kv_cache_config,
                    self.compilation_config.static_forward_context,
                    {name for ssm in self.drafter.ssms for name in ssm.layer_names},
                )
            ]
        return self.compactions

    def _logprobs(self, step: StepTrees, logits: torch.Tensor, laws: sampling.RowLaws) -> LogprobsTensors | None:
        """Logprobs of every emitted token from the row that emitted it, [requests * width] rows for vLLM to filter."""
        width, wanted = laws.metadata.max_num_logprobs, laws.metadata.logprob_token_ids
        if width is None and not wanted:
            return None
        rows, tokens = (each.clamp(min=0).view(-1) for each in (step.accepted.rows, step.accepted.tokens))
        mode = self.model_config.logprobs_mode
        picked = laws.logprobs_logits(rows) if mode.startswith("processed") else logits[rows].to(torch.float32)
        if not mode.endswith("logits"):
            picked = self.sampler.compute_logprobs(picked)
        if wanted:
            columns = range(step.accepted.rows.shape[1])
            ids = {request * len(columns) + i: each for request, each in wanted.items() for i in columns}
            return self.sampler.gather_specific_token_logprobs(picked, ids, tokens)
        return self.sampler.gather_logprobs(picked, width, tokens)

    # -- what the step showed, and the next trees ----------------------------------------------------------------------

    def _observe(self, step: StepTrees, logits: torch.Tensor) -> None:
        """Hand the LLM's best successors on the accepted paths to the proposers that learn from them."""
        best = self.drafter.num_successors
        if not best:
            return
        keep = step.accepted.rows >= 0
        keep &= torch.from_numpy(~self.discard_request_mask.np[: len(keep)] & (step.slots != NO_SLOT))[:, None]
        rows = step.accepted.rows[keep]
        successors, probabilities = best_successors(logits, rows, best)
        self.drafter.observe(
            Observation(
                slots=step.slots[step.rows.request[rows].numpy()],
                tokens=self.input_ids.cpu[step.query_rows[rows]].numpy().astype(np.int32),
                successors=successors.numpy().astype(np.int32),
                probabilities=probabilities.numpy(),
            )
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: a tree is cut per request where it would pass max_model_len."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: list[list[int]], *args: Any) -> Any:
        """Called after bookkeeping, when vLLM's arrays hold the committed tokens."""
        emitted = np.fromiter(map(len, sampled_token_ids), np.int64, len(sampled_token_ids))
        self._count(emitted)
        request_ids = self.input_batch.req_ids
        requests, batch = self._draft_batch(emitted)
        self._begin_ssms(scheduler_output, emitted)
        self.drafter.draft(request_ids, batch, requests)
        return [self.drafter.drafted.tokens(each) for each in request_ids]

    def _count(self, emitted: np.ndarray) -> None:
        step = self.step
        on_path = np.zeros(step.trees.num_rows, bool)
        accepted = step.accepted.rows[:, 1:].numpy()
        on_path[accepted[accepted >= 0]] = True
        stats = self.drafter.stats
        stats.observe(step.trees, on_path, emitted, self.drafter.owners)
        ranks = Showcase.ranks(emitted - 1, step.chains)
        best = int(ranks.argmax())
        if ranks[best] > (stats.showcase.rank if stats.showcase else 0):
            stats.showcase = self._showcase(step, best, int(emitted[best]))

    def tree_stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self.drafter.stats.as_dict()

    def _showcase(self, step: StepTrees, request: int, emitted: int) -> Showcase:
        """A picture of one request's tree, drawn from what this step knows."""
        rows, tokens = step.accepted.rows[request], step.accepted.tokens[request]
        path = (rows[1:emitted] - rows[0]).numpy()
        root = int(self.input_ids.cpu[step.query_rows[rows[0]]])
        return Showcase.of(step.trees, request, path, root, int(tokens[emitted - 1]), self.drafter.owners)

    def _draft_batch(self, emitted: np.ndarray) -> tuple[np.ndarray, DraftBatch]:
        """The requests that draft, and how long and how large their trees may be."""
        slots, drafter = self.step.slots, self.drafter
        lengths = self.input_batch.num_tokens_no_spec[: len(slots)].astype(np.int64)
        # The last token of a request needs no draft behind it, and every node needs a slot below max_model_len.
        room = np.minimum(drafter.slots.max_tokens[slots], self.max_model_len) - lengths - 1
        drafts = (emitted > 0) & (slots != NO_SLOT) & np.equal(drafter.slots.refused[slots], None) & (room > 0)
        requests = np.flatnonzero(drafts)
        depth = np.minimum(room[requests], drafter.options.max_depth)
        nodes = np.minimum(self.max_model_len - lengths[requests] - 1, drafter.options.max_nodes)
        return requests, DraftBatch(
            slots=slots[requests],
            history=self.input_batch.token_ids_cpu,
            rows=requests,
            lengths=lengths[requests],
            max_depth=depth.astype(np.int32),
            max_nodes=nodes.astype(np.int32),
            sampling=drafter.sampling(slots[requests]),
        )

    def _begin_ssms(self, scheduler_output: Any, emitted: np.ndarray) -> None:
        """Tell the SSMs what the LLM read, so that they read it too."""
        if not self.drafter.ssms:
            return
        count = len(emitted)
        scheduled = scheduler_output.num_scheduled_tokens
        first = self.input_batch.num_computed_tokens_cpu[:count].astype(np.int64)
        read = first + np.fromiter((scheduled[each] for each in self.input_batch.req_ids), np.int64, count)
        end = np.where(emitted > 0, self.input_batch.num_tokens_no_spec[:count], read)
        for ssm, group in zip(self.drafter.ssms, self.ssm_groups, strict=True):
            table = self.input_batch.block_table[group].get_device_tensor(count)
            ssm.begin(SsmStep(self.input_batch.token_ids_cpu, self.step.slots, first, end, table))

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As upstream; the SSMs' layers are in the cache now. NotImplementedError: attention that trees do not know."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        for layer in self.compilation_config.static_forward_context.values():
            if isinstance(impl := getattr(layer, "impl", None), TreeCPUAttentionImpl):
                impl.check()
        self.compactions = None
        self.ssm_groups = [ssm.bind(self.attn_groups) for ssm in self.drafter.ssms]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts with their topology, for the scheduler's grammar masks."""
        taken = super().take_draft_token_ids()
        if taken is None:
            return None
        parents = [self.drafter.drafted.parents(each) for each in taken.req_ids]
        return TreeDraftTokenIds(taken.req_ids, taken.draft_token_ids, parents)


def build_mask(
    trees: TokenTrees, requests: np.ndarray, query_rows: torch.Tensor, root_index: torch.Tensor, covers_all: bool
) -> TreeMask:
    """The mask of the given requests [k] of a batch; query_rows [rows], root_index [requests] as in StepTrees."""
    counts = trees.rows_per_request[requests]
    width = int(counts.max())
    local = np.minimum(np.arange(width), counts[:, None] - 1)
    valid = np.arange(width) < counts[:, None]
    local[~valid] = 0
    rows = trees.offsets[requests][:, None] + local
    depth = trees.depth[rows].astype(np.int64)
    roots = root_index[torch.from_numpy(requests)]
    return TreeMask(
        rows=query_rows[torch.from_numpy(rows)].to(torch.int64),
        valid=torch.from_numpy(valid),
        words=torch.from_numpy(trees.ancestors[rows]),
        position=roots[:, None] + torch.from_numpy(depth),
        tree_depth=torch.from_numpy(depth),
        prefix_len=roots,
        tree_len=torch.from_numpy(counts),
        batch=torch.from_numpy(requests),
        covers_all=covers_all and len(requests) == trees.num_requests,
    )


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """The V1 runner of vLLM's CPU wheel with token trees."""

    def warming_up_model(self) -> None:
        """As upstream; the SSMs are compiled too, so that no request waits for it."""
        super().warming_up_model()
        if self.compilation_config.mode != CompilationMode.NONE:
            for ssm in self.drafter.ssms:
                ssm.warm_up()
