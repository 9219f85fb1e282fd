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


def serve(
    llm: str, tree: Mapping[str, Any], corpus: Corpus, temperature: float, batch: int, texts: int, compiled: bool
) -> Measured:
    """Answer the first prompts of a corpus that were answered at `temperature`, as long as those answers are.

    tree: a speculative_config; batch: requests side by side. InputError when the corpus has no such prompt.
    """
    from specinfer_vllm.bench import engines

    chosen = np.flatnonzero(np.isclose(corpus.heat, temperature))[:texts]
    if not len(chosen):
        raise InputError(f"--measure: the corpus has no answers at temperature {temperature:g}")
    engines.use_in_process()
    from vllm import LLM, SamplingParams

    running = LLM(**engines.settings(llm, compiled, batch), speculative_config=dict(tree))
    rows = corpus.answer_offsets
    asked, params = [], []
    for i in chosen:
        start, first = corpus.offsets[i], corpus.first[i]
        asked.append({"prompt_token_ids": corpus.tokens[start : start + first].tolist()})
        params.append(
            SamplingParams(
                temperature=temperature, max_tokens=int(rows[i + 1] - rows[i]), seed=int(i), detokenize=False
            )
        )
    running.generate(asked[:batch], params[:batch], use_tqdm=False)  # warm
    before, begin = running.collective_rpc("tree_stats")[0], time.perf_counter()
    outputs = running.generate(asked, params, use_tqdm=False)
    seconds, after = time.perf_counter() - begin, running.collective_rpc("tree_stats")[0]
    tokens, steps = (after[name] - before[name] for name in ("tokens", "request_steps"))
    return Measured(tokens / max(steps, 1), sum(len(each.outputs[0].token_ids) for each in outputs) / seconds)
