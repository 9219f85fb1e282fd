# SPDX-License-Identifier: Apache-2.0
"""Token trees on vLLM's V2 runner: hooks only, in the order in which a step calls them.

`add_requests` → `prepare_attn` → (LLM pass) → `sample` (TreeVerifier) → `postprocess_sampled` →
TreeSpeculator.propose → `take_draft_token_ids`. Topology, drafts, walk, compaction and accepted counts stay on the
device: the host knows how many nodes there are, never which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from specinfer_vllm.attention.cpu_kv_layout import layout_of
from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.engine.draft_tokens import TreeDraftTokenIds
from specinfer_vllm.engine.gpu_kv_compaction import GpuKvCompaction
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction, llm_layers
from specinfer_vllm.engine.speculator import TreeSpeculator
from specinfer_vllm.engine.successors import top
from specinfer_vllm.engine.verifier_v2 import TreeVerifier
from specinfer_vllm.propose.recycling import WIDTH
from specinfer_vllm.triton_kernels.tree_counts import CountedTrees
from specinfer_vllm.triton_kernels.tree_verify import Walk

# vLLM's own logits processors on the V2 runner (vllm/v1/worker/gpu/sample/sampler.py).
OWN_PROCESSORS = {"LogitBiasState", "PenaltiesState", "BadWordsState"}


@dataclass(frozen=True)
class StepRows:
    """Where the rows of a pass stand.

    tables      block table of each KV cache group [requests, blocks] int32
    prefix_len  [requests] int32    committed tokens in front of the first row that has logits
    rows        start [requests + 1], and of each row that has logits its token and owner, as CountedTrees takes them
    """

    tables: tuple[torch.Tensor, ...]
    prefix_len: torch.Tensor
    rows: tuple[torch.Tensor, ...]


class TreeRunnerV2Mixin:
    """Overrides of the V2 GPUModelRunner's hooks."""

    speculator: TreeSpeculator
    step: StepRows | None = None
    compactions: list[tuple[int, Any]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.level = torch.arange(self.speculator.options.max_depth + 1, device=self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, with the trees' acceptance in the place of vLLM's."""
        super().load_model(*args, **kwargs)
        trees, rows = self.speculator.trees, self.max_num_tokens
        self.rejection_sampler = TreeVerifier(
            self.sampler, trees, self.speculator.options.max_depth, self.speculator.rule
        )
        self.speculator.sampling_states = self.sampler.sampling_states
        kinds = {type(each).__name__ for each in self.sampler.logits_processors}
        self.speculator.requests.has_custom = not kinds <= OWN_PROCESSORS
        self.row_depth = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.row_bits = torch.zeros(rows, trees.ancestors.shape[2], dtype=torch.int64, device=self.device)
        self.prefix_len = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add_requests(self, scheduler_output: Any) -> None:
        """As upstream; a request that is new on its slot finds nothing of the one before it."""
        super().add_requests(scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        if not new:
            return
        slots = [self.req_states.req_id_to_index[each.req_id] for each in new]
        for slot, each in zip(slots, new, strict=True):
            self.speculator.requests.start(slot, each.sampling_params, each.prompt_len)
        self.speculator.requests.publish()
        self.speculator.start(async_tensor_h2d(np.array(slots), device=self.device, dtype=torch.int64))

    # -- the LLM pass --------------------------------------------------------------------------------------------------

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """As upstream, which derives slots from linear positions; only then do positions become depths."""
        tables, slot_mappings = super().prepare_attn(input_batch)
        self.rejection_sampler.walked, self.rejection_sampler.drawn = None, self.speculator.drawn
        requests, rows = tree_rows(input_batch)
        trees, count, start = self.speculator.trees, input_batch.num_reqs, input_batch.cu_num_logits
        slots, local = input_batch.expanded_idx_mapping, input_batch.expanded_local_pos.long()
        torch.sub(input_batch.seq_lens[:count], start.diff(), out=self.prefix_len[:count])
        tokens, _, depth, owner = trees.fields[:, slots, local]
        self.step = StepRows(tables, self.prefix_len[:count], (start, tokens, owner))
        self.speculator.stats.count_undrafted(self.speculator.requests.refused, input_batch.idx_mapping_np)
        batch = None
        if requests:
            slots, local, depth = slots[:rows], local[:rows], depth[:rows]
            self.row_depth[:rows] = depth
            self.row_bits[:rows] = trees.ancestors[slots, local]
            input_batch.positions[:rows].add_(depth - local)
            batch = self._tree_batch(requests, rows, input_batch.query_start_loc)
        self._show(batch)
        return tables, slot_mappings

    def prepare_dummy_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; a graph of a batch that may hold trees is captured over the trees' buffers."""
        requests, rows = input_batch.num_reqs, input_batch.num_tokens
        is_uniform = self.num_speculative_steps > 0 and rows == requests * self.decode_query_len
        self._show(self._tree_batch(requests, rows, input_batch.query_start_loc) if is_uniform else None)
        return super().prepare_dummy_attn(input_batch, *args, **kwargs)

    def _tree_batch(self, requests: int, rows: int, query_start: torch.Tensor) -> TreeBatch:
        return TreeBatch(
            requests, rows, self.decode_query_len, query_start, self.prefix_len, self.row_bits, self.row_depth
        )

    def _show(self, batch: TreeBatch | None) -> None:
        """Tell the layers' metadata builders which rows are a tree's."""
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.tree = batch

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """As upstream. NotImplementedError: attention that trees do not know."""
        super().initialize_kv_cache(*args, **kwargs)
        for layer in self.compilation_config.static_forward_context.values():
            if (check := getattr(getattr(layer, "impl", None), "check", None)) is not None:
                check()
        self.compactions = None

    # -- acceptance ----------------------------------------------------------------------------------------------------

    def postprocess_sampled(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As upstream, once the K/V of the accepted path stand where plain decoding would have put them."""
        verifier, stats = self.rejection_sampler, self.speculator.stats
        walked, verifier.walked = verifier.walked, None
        stats.observe(num_sampled, None if walked is None else CountedTrees(walked.rows, *self.step.rows))
        if walked is not None:
            self._compact(walked)
            self._observe(walked, verifier.logits, idx_mapping)
            verifier.logits = None
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, *args, **kwargs)

    def _compact(self, walked: Walk) -> None:
        for group, compaction in self._compactions():
            compaction.compact(walked, self.step.prefix_len, self.step.tables[group])

    def _compactions(self) -> list[tuple[int, Any]]:
        """One compaction per KV cache group and shape of the LLM's layers; SSMs re-read the path instead."""
        if self.compactions is None:
            context = self.compilation_config.static_forward_context
            groups = llm_layers(self.kv_cache_config, context, self.speculator.draft_attn_layer_names)
            self.compactions = [(group, self._compaction(layers)) for group, layers in groups]
        return self.compactions

    def _compaction(self, layers: list[Any]) -> Any:
        """What moves K/V in these layers, of one shape."""
        raise NotImplementedError

    def _observe(self, walked: Walk, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Hand the LLM's best successors on the accepted paths to the proposers that learn from them."""
        recycling = self.speculator.recycling
        if recycling is None:
            return
        is_seen = self.level < walked.num_tokens[:, None]
        laws = logits[walked.rows.clamp(min=0).view(-1)].softmax(dim=-1, dtype=torch.float32)
        recycling.observe(slots, self.step.prefix_len[:, None] + self.level, is_seen, top(laws, WIDTH))

    def tree_stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self.speculator.stats.read().as_dict()

    # -- to the scheduler ----------------------------------------------------------------------------------------------

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts, with their topology where a grammar has to walk it."""
        taken = super().take_draft_token_ids()
        if taken is None:
            return None
        if self.draft_tokens_handler.draft_tokens_np is None:
            return TreeDraftTokenIds(taken.req_ids, taken.draft_token_ids, [])
        slots = [self.req_states.req_id_to_index[each] for each in taken.req_ids]
        parents = self.speculator.trees.parent[slots, 1:].tolist()
        return TreeDraftTokenIds(taken.req_ids, taken.draft_token_ids, parents)


def tree_rows(input_batch: Any) -> tuple[int, int]:
    """(requests, rows) of the trees in a batch, which stand first in it.

    Raises RuntimeError when such a request reads anything else: its rows would not be the tree's.
    """
    drafts = input_batch.num_draft_tokens_per_req
    if drafts is None:
        return 0, 0
    requests = int(np.count_nonzero(drafts))
    rows = drafts[:requests] + 1
    if not (drafts[:requests] > 0).all() or (input_batch.num_scheduled_tokens[:requests] != rows).any():
        raise RuntimeError("token trees: vLLM scheduled prompt tokens and drafts of one request in one step")
    return requests, int(rows.sum())


class TreeGPUModelRunnerV2(TreeRunnerV2Mixin, GPUModelRunner):
    """The V2 runner with token trees."""

    def _compaction(self, layers: list[Any]) -> GpuKvCompaction:
        return GpuKvCompaction([layer.kv_cache for layer in layers])


class TreeCPUModelRunnerV2(TreeRunnerV2Mixin, CPUModelRunner):
    """The V2 runner on a CPU, its kernels in Triton's interpreter: for tests."""

    def _compaction(self, layers: list[Any]) -> CpuKvCompaction:
        return CpuKvCompaction([layer.kv_cache for layer in layers], layout_of(layers[0], layers[0].kv_cache))
