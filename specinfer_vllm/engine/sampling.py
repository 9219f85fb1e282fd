# SPDX-License-Identifier: Apache-2.0
"""Which sampling parameters are honoured on a tree, and the LLM's law at each of its rows."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from specinfer_vllm.config import TreeOptions
from specinfer_vllm.engine.row_parameters import change_logits, metadata_of_rows
from specinfer_vllm.verify.walk import TreeRows

# vLLM's own bound: a lower temperature is greedy.
GREEDY_BELOW = 1e-5


def refusal(params: SamplingParams, verifier: str) -> str | None:
    """Why a request is served without drafts (a counter's label), or None when a tree honours all of its parameters.

    Served without drafts means: by vLLM's own sampler on the root's row, exactly as without the plug-in.
    """
    if params.temperature >= GREEDY_BELOW and verifier == "greedy":
        return "sampled"
    if getattr(params, "thinking_token_budget", None):
        return "thinking_budget"
    if params.extra_args:
        return "extra_args"  # custom logits processors read them
    return None


def samples_drafts(params: SamplingParams, options: TreeOptions) -> bool:
    """Whether the request's children are sampled from the SSMs' laws."""
    return options.samples_drafts and params.temperature >= GREEDY_BELOW


def has_custom_processors(metadata: SamplingMetadata) -> bool:
    """Whether the user loaded logits processors of their own: they may touch any request."""
    builtin = ("MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor")
    return any(type(each).__name__ not in builtin for each in metadata.logitsprocs.all)


class RowLaws:
    """The LLM's law at the rows of a step's trees, made when it is asked for: a walk visits few of them.

    laws[rows] is what plain vLLM would sample from behind each row's path, [rows, vocab] float32, summing to 1, all of
    it on the best token for greedy requests. Rows in `fixed` have their token already.

    logits  [all rows, vocab], left as they are
    """

    def __init__(self, logits: torch.Tensor, metadata: SamplingMetadata, trees: TreeRows, sampler: Sampler) -> None:
        self.logits, self.metadata, self.trees, self.sampler = logits, metadata, trees, sampler
        self.changed = change_logits(metadata)
        self.fixed = torch.full_like(trees.tokens, -1)
        self.shape, self.device, self.dtype = logits.shape, logits.device, torch.float32
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def fix(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Give rows [k] int64 their tokens [k]: vLLM's own sampler has chosen them."""
        self.fixed[rows] = tokens.to(torch.int64)

    def processed(self, rows: torch.Tensor) -> tuple[torch.Tensor, SamplingMetadata]:
        """(logits [k, vocab] float32 after everything but the law, metadata of the rows), rows [k] int64."""
        metadata = metadata_of_rows(self.metadata, self.trees, rows)
        logits = self.logits[rows].to(torch.float32)  # a copy: processors write in place
        if self.changed:
            logits = self.sampler.apply_logits_processors(logits, metadata, predict_bonus_token=False)
        return logits, metadata

    def best(self) -> torch.Tensor:
        """The best token at every row [all rows] int64, `fixed` ones included."""
        logits = self.logits.to(torch.float32)
        if self.changed:
            logits = self.processed(torch.arange(len(self.logits), device=self.device))[0]
        best = Sampler.greedy_sample(logits).view(-1).to(torch.int64)
        return torch.where(self.fixed >= 0, self.fixed, best)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Laws [k, vocab] of rows [k] int64; a walk that ended asks for the same row again, which costs nothing."""
        if self._last is None or len(self._last[0]) != len(rows):
            law = self._laws(rows)
        else:
            last, law = self._last
            moved = (last != rows).nonzero().view(-1)
            if len(moved):
                law = law.index_copy(0, moved, self._laws(rows[moved]))
        self._last = rows, law
        return law

    def all(self) -> torch.Tensor:
        """Laws of all rows, for rules that look at all of them."""
        return self._laws(torch.arange(len(self.logits), device=self.device))

    def _laws(self, rows: torch.Tensor) -> torch.Tensor:
        logits, metadata = self.processed(rows)
        certain = self.fixed[rows]
        if not metadata.all_random:
            best = Sampler.greedy_sample(logits).view(-1).to(torch.int64)
            certain = torch.where((certain < 0) & (metadata.temperature < GREEDY_BELOW), best, certain)
        law = filtered(logits, metadata).softmax(dim=-1)
        # Nothing allowed, or not a number: plain vLLM's argmax gives the first token then.
        certain = torch.where((certain < 0) & ~law.sum(dim=-1).isfinite(), 0, certain)
        known = certain >= 0
        if known.any():
            law[known] = torch.nn.functional.one_hot(certain[known], law.shape[-1]).to(law.dtype)
        return law

    def logprobs_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [k, vocab] that `processed_*` logprobs are made of at rows [k] int64."""
        logits, metadata = self.processed(rows)
        return logits if metadata.all_greedy else filtered(logits, metadata)


def filtered(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Logits after temperature, min-p, top-k and top-p, in vLLM's order; rows that are greedy are not scaled.

    logits [rows, vocab] float32, overwritten; metadata of the same rows.
    """
    scaled = Sampler.apply_temperature(logits, metadata.temperature, metadata.all_random)
    for processor in metadata.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    return apply_top_k_top_p(scaled, metadata.top_k, metadata.top_p)
