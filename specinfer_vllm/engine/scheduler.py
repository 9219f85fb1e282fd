# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, told what a tree is: it counts nodes as draft tokens, enough for slots and roll-back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from specinfer_vllm.engine.grammar import fill_tree
from specinfer_vllm.engine.mask_layout import PackedMasks032, mask_layout
from specinfer_vllm.patches.speculative_config import tree_config


class TreeSchedulerMixin:
    """Overrides of vLLM's schedulers.

    parents  request id -> parents of its nodes, as drafted; a prefix of the nodes may be scheduled
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parents: dict[str, list[int]] = {}
        # SSMs write the K/V of the next root and of their own tree behind the LLM's last slot.
        self.num_lookahead_tokens = tree_config(self.vllm_config).num_lookahead_tokens

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Keep every node: one that the grammar forbids is masked in its parent's row, and its siblings stay."""
        self._keep_parents(draft_token_ids)
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            undraftable = request.is_prefill_chunk or self._reasons_before_grammar(request)
            request.spec_token_ids = [] if undraftable else tokens
        drafted = self.parents.keys()
        for request in self.running:
            # Skipped this step: its drafts are older than the worker's trees and must not come back (vllm#49620).
            if request.request_id not in drafted:
                request.spec_token_ids = []

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output: Any) -> None:
        """The nodes of a batch with a grammar, known only now under asynchronous scheduling; all are kept."""
        self._keep_parents(draft_token_ids)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            placeholders = scheduled.get(request_id)
            if placeholders and request_id in self.requests:
                scheduled[request_id] = tokens[: len(placeholders)]
        scheduler_output.num_invalid_spec_tokens = {}

    def _keep_parents(self, drafts: DraftTokenIds) -> None:
        """A worker that keeps its topology to itself, having no grammar in the batch, sends none."""
        parents = drafts.parents or [()] * len(drafts.req_ids)
        self.parents = dict(zip(drafts.req_ids, parents, strict=True))

    def _reasons_before_grammar(self, request: Any) -> bool:
        """Whether a grammar is still held back by reasoning, whose end vLLM looks for along a chain only."""
        if not request.use_structured_output:
            return False
        return self.structured_output_manager._get_constraint_bounds(request, ()).constraint_start > 0

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Masks of the scheduled trees; row order per request: root, then nodes."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if not scheduler_output.has_structured_output_requests or not drafts:
            return super().get_grammar_bitmask(scheduler_output)
        requests = [
            request
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not requests:
            return None
        nodes = [drafts.get(request.request_id, ()) for request in requests]
        layout = mask_layout(1 + self.num_spec_tokens)
        *starts, rows = layout.starts([1 + len(each) for each in nodes])
        for request, tokens, start in zip(requests, nodes, starts, strict=True):
            self._fill(request, tokens, start, layout)
        ids = [request.request_id for request in requests]
        masks = self._masks(self.structured_output_manager)[:rows].numpy()
        return GrammarOutput(ids, masks, [self._acceptable(each, drafts) for each in requests])

    def _acceptable(self, request: Any, drafts: Any) -> int:
        """Nodes whose rows are masked as their paths ask for: none while reasoning holds the grammar back."""
        return 0 if self._reasons_before_grammar(request) else len(drafts.get(request.request_id, ()))

    def _fill(self, request: Any, tokens: Sequence[int], start: int, layout: PackedMasks032) -> None:
        """Fill the masks of one request from row `start` on."""
        manager = self.structured_output_manager
        masks = self._masks(manager)
        grammar = request.structured_output_request.grammar
        applies = not self._reasons_before_grammar(request)
        parents = self.parents.get(request.request_id) or range(len(tokens))
        fill_tree(
            grammar,
            request.request_id,
            tokens,
            list(parents)[: len(tokens)],
            fill=lambda row: manager._fill_bitmasks((layout.entry(manager, request, grammar, start + row, applies),)),
            copy=lambda row, other: masks[start + row].copy_(masks[start + other]),
        )

    def _masks(self, manager: Any) -> Any:
        """The manager's mask buffer, made as it makes it itself on first use."""
        if manager._grammar_bitmask is None:
            rows = self.scheduler_config.max_num_seqs * (1 + self.num_spec_tokens)
            manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
        return manager._grammar_bitmask


class TreeScheduler(TreeSchedulerMixin, Scheduler):
    """Synchronous scheduling of token trees."""


class TreeAsyncScheduler(TreeSchedulerMixin, AsyncScheduler):
    """Asynchronous scheduling: nodes are placeholders here, and the device alone knows what they are."""
