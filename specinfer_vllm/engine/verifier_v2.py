# SPDX-License-Identifier: Apache-2.0
"""Acceptance on the V2 runner: vLLM's own sampler chooses a token at every row, and each tree is walked along them.

The sampler's noise is keyed by the request's seed and the position (vllm/v1/worker/gpu/sample/gumbel.py), so a row of
the accepted path gets the very token that plain decoding would get there: greedy and sampled output alike is plain
vLLM's, whatever was drafted (naive sampling, SpecInfer section 4.3). Rules that weigh sampled draws walk by their own
coins instead (triton_kernels/tree_verify.py, tree_traversal.py); plain vLLM's law is theirs too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from specinfer_vllm.engine.sampling import GREEDY_BELOW
from specinfer_vllm.triton_kernels.tree_traversal import traverse
from specinfer_vllm.triton_kernels.tree_verify import Walk, verify
from specinfer_vllm.triton_kernels.tree_walk import walk

if TYPE_CHECKING:
    from specinfer_vllm.engine.device_draws import SampledDraws
    from specinfer_vllm.engine.device_trees import DeviceTrees
    from specinfer_vllm.verify.rules import Rule

PROCESSED = ("processed_logits", "processed_logprobs")
# How a rule's drafting is called by triton_kernels/tree_verify.py: a fixed child is no draw, so that k-1 best ones and
# one sampled are one independent draw.
DRAWINGS = {"iid": "iid", "top_k_plus_one": "iid", "without_replacement": "without_replacement"}


class TreeVerifier:
    """Stands in the place of vLLM's RejectionSampler.

    walked  what the last call accepted, None after a step without trees
    logits  [rows, vocab] that it saw
    drawn   the draws that the trees were made of, when the rule weighs them
    """

    # vLLM's warm-up asks (vllm/v1/worker/gpu/warmup.py): the number of nodes is fixed.
    enable_adaptive_verification = False

    def __init__(self, sampler: Any, trees: DeviceTrees, max_depth: int, rule: Rule | None) -> None:
        """rule: one that weighs sampled draws; None = vLLM's sampler chooses."""
        self.sampler, self.trees, self.max_depth, self.rule = sampler, trees, max_depth, rule
        self.drawn: SampledDraws | None = None
        self.walked: Walk | None = None
        self.logits: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """As RejectionSampler.__call__. A grammar has masked every row behind its own path.

        invalid_drafts  [rows] bool    rows whose mask says nothing yet, since reasoning holds the grammar back
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        slots, local = input_batch.expanded_idx_mapping, input_batch.expanded_local_pos.long()
        dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        tokens, parent, *_ = self.trees.fields[:, slots, local]
        if invalid_drafts is not None:
            tokens.masked_fill_(invalid_drafts, -1)
        accept = self._walk if self.rule is None or self.drawn is None else self._weigh
        walked, processed = accept(logits, input_batch, tokens, parent, dims is not None)
        logprobs = None
        if dims is not None:
            seen = processed if self.sampler.logprobs_mode in PROCESSED else logits
            logprobs = self._logprobs(seen, walked, input_batch, dims)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walked.num_tokens,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        self.walked, self.logits = walked, logits
        return SamplerOutput(walked.tokens, logprobs, num_nans, num_sampled, num_rejected)

    def _walk(
        self, logits: torch.Tensor, batch: Any, tokens: torch.Tensor, parent: torch.Tensor, wants_logprobs: bool
    ) -> tuple[Walk, torch.Tensor]:
        """Let vLLM choose a token at every row, and walk. Returns the processed logits too."""
        rows = self._rows(batch)
        chosen, processed = self.sampler.sample(logits, *rows, return_logprobs=wants_logprobs)
        chosen = chosen.view(-1).long()
        return walk(chosen, tokens, parent, batch.cu_num_logits, max_depth=self.max_depth), processed

    def _weigh(
        self, logits: torch.Tensor, batch: Any, tokens: torch.Tensor, parent: torch.Tensor, wants_logprobs: bool
    ) -> tuple[Walk, torch.Tensor]:
        """Weigh the SSMs' draws against the LLM's law, by the rule."""
        rows = self._rows(batch)
        processed = self.sampler.apply_sampling_params(logits, *rows)
        states, slots = self.sampler.sampling_states, batch.idx_mapping
        drawing = DRAWINGS[self.rule.drafting]
        whole = async_tensor_h2d(batch.num_draft_tokens_per_req == self.trees.nodes, device=logits.device)
        accept = traverse if self.rule.looks_everywhere else verify
        walked = accept(
            processed,
            tokens,
            parent,
            batch.cu_num_logits,
            max_depth=self.max_depth,
            seed=states.seeds.gpu[slots],
            position=batch.positions[batch.logits_indices] + 1,
            greedy=states.temperature.gpu[slots] < GREEDY_BELOW,
            draws=self.drawn.rows(slots, whole, batch.cu_num_logits, tokens, drawing),
            drawing=drawing,
        )
        return walked, processed

    def _rows(self, batch: Any) -> tuple[Any, ...]:
        """Arguments of vLLM's sampler behind the logits."""
        return (
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.positions[batch.logits_indices],
            batch.input_ids[batch.logits_indices],
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )

    def _logprobs(self, logits: torch.Tensor, walked: Walk, batch: Any, dims: tuple[int, int]) -> LogprobsTensors:
        """Logprobs of the emitted tokens. vLLM takes row j of a request for its j-th token; here it is the path's."""
        column = batch.expanded_local_pos.long().clamp(max=self.max_depth)
        sizes = batch.cu_num_logits.diff().long()
        request = torch.repeat_interleave(
            torch.arange(batch.num_reqs, device=logits.device), sizes, output_size=len(logits)
        )
        rows, tokens = walked.rows[request, column].clamp(min=0), walked.tokens[request, column].clamp(min=0)
        num_logprobs, most_ids = dims
        return compute_topk_scores(
            logits[rows],
            num_logprobs,
            tokens,
            batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=most_ids,
            logits_mode=self.sampler.logprobs_mode.endswith("logits"),
        )
