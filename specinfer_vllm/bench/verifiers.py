# SPDX-License-Identifier: Apache-2.0
"""Tokens per LLM step of every acceptance rule, at equal trees, on real prompts, through the served engine.

`python -m specinfer_vllm.bench.verifiers` serves SmolLM2 with an SSM cut from it (22 of its 30 layers: dear, but often
right) and lets all rules verify trees of the same shape in one engine, batch by batch in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = [*range(12), *range(20, 30)]
CONFIDENCE = 0.95


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    options = parse(arguments)
    from specinfer_vllm.bench import engines

    engines.use_in_process()  # the rule is exchanged inside the engine
    from vllm import LLM

    from specinfer_vllm.bench import prompts, smollm2

    model = smollm2.model_path()
    # A rule that needs draws, so that sampled requests are known as such; `measured` exchanges it.
    drawing = {"verifier": "without_replacement", "expansion": options.expansion}
    tree = {"method": "tree", "ssms": [str(smollm2.cut(model, LAYERS))], **drawing}
    llm = LLM(**engines.settings(model, False, options.batch), speculative_config=tree)
    chats = [each.messages for each in prompts.load(["mtbench", "humaneval"], options.prompts)]
    result: dict[str, Any] = {"hardware": engines.hardware(), "expansion": options.expansion, "temperatures": {}}
    for temperature in options.temperature:
        counts = measured(llm, chats, temperature, options.batch, options.tokens)
        print(table(counts, temperature, options.expansion), flush=True)
        result["temperatures"][temperature] = {name: per_batch.tolist() for name, per_batch in counts.items()}
    print(engines.hardware())
    if options.json:
        options.json.write_text(json.dumps(result))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 1.0], help="default 0.6 1.0")
    parser.add_argument("--expansion", type=int, nargs="+", default=[3, 2, 1], help="every tree's shape, default 3 2 1")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each set (default 40)")
    parser.add_argument("--tokens", type=int, default=48, help="output tokens per prompt (default 48)")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args(arguments)


def rules() -> dict[str, Any]:
    """The rules to compare by name; naive twice, with the two ways of drafting that others make it draft in."""
    from specinfer_vllm.verify.rules import RULES

    drawn = {"naive, i.i.d. children": replace(RULES["naive"], drafting="iid")}
    return {"naive, likeliest children": RULES["naive"], **drawn, **{n: r for n, r in RULES.items() if n != "naive"}}


def measured(llm: Any, chats: Sequence[list], temperature: float, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """(tokens, steps) of each rule and batch of requests, int64 [batches, 2] by rule; first passes are not counted."""
    from tqdm import tqdm
    from vllm import SamplingParams

    from specinfer_vllm.bench import engines

    drafter = engines.runner_of(llm).drafter
    if not drafter.options.samples_drafts:
        raise ValueError("the engine must be started with a rule that needs draws, or none would be made")
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in rules()}
    for start in tqdm(range(0, len(chats), batch), desc=f"temperature {temperature}", unit="batch"):
        for name, rule in rules().items():
            drafter.rule = rule
            before = drafter.stats.tokens, drafter.stats.request_steps
            some = list(chats[start : start + batch])
            llm.chat(some, params, use_tqdm=False)
            after = drafter.stats.tokens, drafter.stats.request_steps
            counts[name].append((after[0] - before[0] - len(some), after[1] - before[1] - len(some)))
    return {name: np.array(values) for name, values in counts.items()}


def interval(counts: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """(tokens per step, lower, upper end of its bootstrap interval) from counts [batches, 2] of tokens and steps."""
    rng = np.random.default_rng(0)
    picked = counts[rng.integers(0, len(counts), (resamples, len(counts)))].sum(axis=1)
    low, high = np.quantile(picked[:, 0] / picked[:, 1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    tokens, steps = counts.sum(axis=0)
    return float(tokens / steps), float(low), float(high)


def table(counts: dict[str, np.ndarray], temperature: float, expansion: Sequence[int]) -> str:
    """Markdown, as the README shows it."""
    shape = ",".join(map(str, expansion))
    lines = [
        f"\ntemperature {temperature}, trees <{shape}>; tokens per LLM step ({CONFIDENCE:.0%} interval)",
        "| rule | tokens per step | steps |",
        "|---|---|---|",
    ]
    for name, values in counts.items():
        mean, low, high = interval(values)
        lines.append(f"| {name} | {mean:.3f} ({low:.3f}-{high:.3f}) | {values[:, 1].sum()} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
