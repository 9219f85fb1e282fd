# SPDX-License-Identifier: Apache-2.0
"""Which sampling parameters the rules honour on a tree, and the LLM's law at each row for those that they do."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from specinfer_vllm.verify.naive import sample

# vLLM's own bound: a lower temperature is greedy.
GREEDY_BELOW = 1e-5


def refusal(params: SamplingParams, verifier: str, logprobs_mode: str) -> str | None:
    """Why a request is served without drafts (a counter's label), or None when a tree honours all of its parameters.

    Served without drafts means: by vLLM's own sampler on the root's row, exactly as without the plug-in.
    """
    if params.temperature >= GREEDY_BELOW and verifier == "greedy":
        return "sampled"
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.bad_words:
        return "bad_words"
    if params.min_tokens:
        return "min_tokens"
    if params.min_p >= GREEDY_BELOW or params.logit_bias or params.allowed_token_ids:
        return "token_mask"
    if params.logprobs is not None and logprobs_mode.startswith("processed"):
        return "processed_logprobs"
    if any(getattr(params, name, None) for name in ("logprob_token_ids", "thinking_token_budget")):
        return "vllm_extension"
    if params.extra_args:
        return "extra_args"  # custom logits processors read them
    return None


def has_custom_processors(metadata: SamplingMetadata) -> bool:
    """Whether the user loaded logits processors of their own: they may touch any request."""
    builtin = ("MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor")
    return any(type(each).__name__ not in builtin for each in metadata.logitsprocs.all)


def law(logits: torch.Tensor, metadata: SamplingMetadata, request: torch.Tensor) -> torch.Tensor:
    """The law each row's token is sampled from: temperature, top-k and top-p of the row's request.

    logits [rows, vocab], left as they are; request [rows] int64, batch index of the row. Returns [rows, vocab] float32.
    """
    temperature = metadata.temperature[request]
    temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    scaled = logits.to(torch.float32) / temperature[:, None]

    def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[request]

    return apply_top_k_top_p(scaled, of_rows(metadata.top_k), of_rows(metadata.top_p)).softmax(dim=-1)


def choose(logits: torch.Tensor, metadata: SamplingMetadata, request: torch.Tensor, coin: Any) -> torch.Tensor:
    """The LLM's token at every row [rows] int64: argmax for greedy requests, a sample by `coin()` for the others.

    coin()  [rows] float64 in [0, 1), only called when some request samples
    """
    if metadata.all_greedy:
        return Sampler.greedy_sample(logits.to(torch.float32)).view(-1).to(torch.int64)
    sampled = sample(law(logits, metadata, request), coin())
    if metadata.all_random:
        return sampled
    greedy = Sampler.greedy_sample(logits.to(torch.float32)).view(-1).to(torch.int64)
    return torch.where(metadata.temperature[request] < GREEDY_BELOW, greedy, sampled)
