# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters row by row: a row of a tree counts as a request of its own, whose output ends with its path.

vLLM's own code then applies them (vllm/v1/sample/sampler.py), so that a row gets what plain decoding would give it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from specinfer_vllm.verify.walk import TreeRows


def change_logits(metadata: SamplingMetadata) -> bool:
    """Whether some request has more than temperature, top-k, top-p and min-p, which are part of its law."""
    return (
        not metadata.no_penalties
        or bool(metadata.bad_words_token_ids)
        or metadata.allowed_token_ids_mask is not None
        or any(map(_is_active, metadata.logitsprocs.non_argmax_invariant))
    )


def metadata_of_rows(metadata: SamplingMetadata, trees: TreeRows, rows: torch.Tensor) -> SamplingMetadata:
    """The batch's metadata with `rows` [k] int64 of its trees in the place of its requests."""
    request = trees.request[rows]
    requests = request.tolist()

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[request]

    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators={},
        max_num_logprobs=None,
        logprob_token_ids=None,
        spec_token_ids=None,
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=pick(metadata.frequency_penalties),
        presence_penalties=pick(metadata.presence_penalties),
        repetition_penalties=pick(metadata.repetition_penalties),
        output_token_ids=_outputs(metadata, trees, rows.tolist(), requests),
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids={
            i: metadata.bad_words_token_ids[each]
            for i, each in enumerate(requests)
            if each in metadata.bad_words_token_ids
        },
        logitsprocs=_processors(metadata.logitsprocs, trees, rows),
        thinking_budget_state_holder=None,
    )


def _outputs(
    metadata: SamplingMetadata, trees: TreeRows, rows: Sequence[int], requests: Sequence[int]
) -> list[list[int]]:
    """Output tokens behind which each row's token comes: the request's, then the path; empty where nobody asks."""
    if metadata.no_penalties and not metadata.bad_words_token_ids:
        return [[] for _ in rows]
    tokens, parent = trees.tokens.tolist(), trees.parent.tolist()
    outputs = []
    for row, request in zip(rows, requests, strict=True):
        path = []
        while parent[row] != row:
            path.append(tokens[row])
            row = parent[row]
        outputs.append([*metadata.output_token_ids[request], *reversed(path)])
    return outputs


def _processors(processors: LogitsProcessors, trees: TreeRows, rows: torch.Tensor) -> LogitsProcessors:
    """The active ones of vLLM's own processors, their state spread over the rows."""
    spread = [_SPREAD[type(each)](each, trees, rows) for each in processors.all if _is_active(each)]
    return LogitsProcessors(spread)


def _is_active(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    return isinstance(processor, MinPLogitsProcessor) and bool(processor.min_p_count)


def _min_tokens(processor: MinTokensLogitsProcessor, trees: TreeRows, rows: torch.Tensor) -> Any:
    """Stop tokens are held back at rows whose output, path included, is still too short."""
    masked: list[tuple[int, int]] = []
    restored: list[tuple[int, int]] = []
    request, depth = trees.request[rows].tolist(), trees.depth[rows].tolist()
    for i, (owner, level) in enumerate(zip(request, depth, strict=True)):
        if owner not in processor.min_toks:
            continue
        least, output, stops, has_grammar = processor.min_toks[owner]
        if len(output) + level < least:
            masked += [(i, token) for token in stops]
            restored += [(i, token) for token in stops if has_grammar]
    mine = copy.copy(processor)
    mine.logits_slice, mine.restore_logits_slice = _index(masked), _index(restored)
    return mine


def _logit_bias(processor: LogitBiasLogitsProcessor, trees: TreeRows, rows: torch.Tensor) -> Any:
    places = [
        (i, token, bias)
        for i, owner in enumerate(trees.request[rows].tolist())
        for token, bias in processor.biases.get(owner, {}).items()
    ]
    mine = copy.copy(processor)
    mine.logits_slice = _index([place[:2] for place in places])
    mine.bias_tensor = torch.tensor([bias for _, _, bias in places], dtype=torch.float32)
    return mine


def _min_p(processor: MinPLogitsProcessor, trees: TreeRows, rows: torch.Tensor) -> Any:
    mine = copy.copy(processor)
    mine.min_p = processor.min_p[trees.request[rows]]
    return mine


def _index(places: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.tensor(places, dtype=torch.int64).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


_SPREAD = {
    MinTokensLogitsProcessor: _min_tokens,
    LogitBiasLogitsProcessor: _logit_bias,
    MinPLogitsProcessor: _min_p,
}
