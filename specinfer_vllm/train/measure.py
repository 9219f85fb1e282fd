# SPDX-License-Identifier: Apache-2.0
"""What a configuration really gives: a corpus' prompts served with it, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specinfer_vllm.train.corpus import Corpus
from specinfer_vllm.train.inputs import InputError


@dataclass(frozen=True)
class Measured:
    """Tokens per LLM pass and request, and tokens per second."""

    tokens_per_step: float
    rate: float


@dataclass(frozen=True)
class Questions:
    """Prompts to serve.

    prompts      token ids of each
    limits       tokens that each answer may have: as many as the corpus' own
    temperature  of all answers
    """

    prompts: list[list[int]]
    limits: list[int]
    temperature: float

    @classmethod
    def of(cls, corpus: Corpus, temperature: float, texts: int) -> Questions:
        """Of up to so many texts that were answered at this temperature. InputError when there are none."""
        chosen = spread(corpus.temperature, temperature, texts)
        if not len(chosen):
            raise InputError(f"--measure: the corpus has no answers at temperature {temperature:g}; name another")
        starts, rows = corpus.offsets[chosen], np.diff(corpus.answer_offsets)[chosen]
        ends = starts + corpus.first[chosen]
        prompts = [corpus.tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        return cls(prompts, rows.tolist(), temperature)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True))


def spread(temperatures: np.ndarray, temperature: float, texts: int) -> np.ndarray:
    """Up to so many of the texts at one temperature [n] int64, evenly spread over them. temperatures [all texts]."""
    found = np.flatnonzero(np.isclose(temperatures, temperature))
    return found[np.linspace(0, len(found) - 1, min(texts, len(found))).round().astype(np.int64)]


def serve(
    llm: str, tree: Mapping[str, Any], questions: Questions, batch: int = 1, dtype: str = "auto", compiled: bool = True
) -> Measured:
    """Answer the questions, `batch` side by side. tree: a speculative_config."""
    from specinfer_vllm.bench import engines

    engines.use_in_process()
    from vllm import LLM, SamplingParams

    settings = engines.settings(llm, compiled, batch) | {"dtype": dtype}
    settings["max_model_len"] = max(settings["max_model_len"], questions.longest)
    running = LLM(**settings, speculative_config=dict(tree))
    asked = [{"prompt_token_ids": prompt} for prompt in questions.prompts]
    params = [
        SamplingParams(temperature=questions.temperature, max_tokens=limit, seed=i, detokenize=False)
        for i, limit in enumerate(questions.limits)
    ]
    running.generate(asked[:batch], params[:batch], use_tqdm=False)  # warm
    before, begin = engines.tree_stats(running), time.perf_counter()
    outputs = running.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    per_step = engines.tokens_per_step(before, engines.tree_stats(running))
    return Measured(per_step, sum(len(each.outputs[0].token_ids) for each in outputs) / seconds)
