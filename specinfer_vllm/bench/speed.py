# SPDX-License-Identifier: Apache-2.0
"""Tree against chain against plain vLLM, in one run: same prompts, same settings, alternating, medians and spread.

`python -m specinfer_vllm.bench.speed --batch 1 8` starts one engine per row of the table (compiled, all cores).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RECYCLING = {"proposers": ["recycling"]}
# The chain is the tree's own proposers without branches, so that only the tree's shape differs. SSMs get the better one
# of the package's own as their model.
ROWS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"method": "tree", "branches": 1, "primer": "none"},
    "tree": {"method": "tree", "primer": "none"},
    "chain, primer": {"method": "tree", "branches": 1, "primer": "auto"},
    "tree, primer": {"method": "tree", "primer": "auto"},
    "chain, SSM": {"method": "tree", "branches": 1, "primer": "none", "ssms": [{"width": 1}], **RECYCLING},
    "tree, SSM": {"method": "tree", "primer": "none", "ssms": [{}], **RECYCLING},
    "tree, SSM, primer": {"method": "tree", "primer": "auto", "ssms": [{}], **RECYCLING},
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one table per batch size; 1 when a text differs from plain vLLM's."""
    options = parse(arguments)
    from specinfer_vllm.bench import engines

    engines.use_all_cores()
    from vllm import LLM, SamplingParams

    from specinfer_vllm.bench import cache, primer, prompts, smollm2

    model = options.model or smollm2.model_path()
    if any("primer" in name for name in options.rows):
        cache.say(f"primer: {primer.build(model)}")
    shared = engines.settings(model, not options.eager, max(options.batch))
    running: dict[str, Any] = {}
    for name in options.rows:
        configuration = ROWS[name]
        if configuration and "ssms" in configuration:
            best = str(smollm2.ssms()[0])
            configuration = configuration | {"ssms": [each | {"model": best} for each in configuration["ssms"]]}
        print(f"starting {name}", flush=True)
        running[name] = LLM(**shared, **({"speculative_config": configuration} if configuration else {}))
    chats = [each.messages for each in prompts.load(["mtbench", "humaneval"], options.prompts)]
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    result = {"hardware": engines.hardware(), "settings": shared | {"model": Path(model).name}, "batches": {}}
    code = 0
    for batch in options.batch:
        rows, different = measured(running, chats, params, batch, options.repeats)
        result["batches"][batch] = rows
        print(table(batch, len(chats), options, rows, different), flush=True)
        code |= bool(different)
    print(result["hardware"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return code


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at a time (default 1 8)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each set (default 8)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt (default 96)")
    parser.add_argument("--repeats", type=int, default=5, help="alternating runs of each engine (default 5)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS)[:3], help="engines to compare")
    parser.add_argument("--model", help="LLM (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    if options.model and any("SSM" in name for name in options.rows):
        parser.error("--model: the package has SSMs for SmolLM2-135M-Instruct only; leave out the rows with an SSM")
    return options


def measured(running: dict, chats: list, params: Any, batch: int, repeats: int) -> tuple[dict, list[str]]:
    """Numbers per engine at one batch size, and the engines whose texts differ from the first one's."""
    from specinfer_vllm.bench import engines

    print(f"batch {batch}", flush=True)
    before = {name: engines.tree_stats(llm) for name, llm in running.items()}
    timings = engines.alternate(running, chats, params, repeats, batch=batch)
    first = next(iter(timings.values()))
    rows = {}
    for name, timing in timings.items():
        rows[name] = {
            "median": timing.median,
            "runs": timing.rates,
            "ratio": engines.ratio(timing, first),
            "tokens_per_step": engines.tokens_per_step(before[name], engines.tree_stats(running[name])),
        }
    return rows, [name for name, timing in timings.items() if timing.token_ids != first.token_ids]


def table(batch: int, chats: int, options: argparse.Namespace, rows: dict, different: list[str]) -> str:
    """Markdown, as the README shows it."""
    lines = [
        f"\nbatch {batch}, {chats} chats of {options.tokens} tokens, greedy, fp32, median of {options.repeats} runs",
        "| engine | tokens/s | slowest-fastest | against plain | tokens per LLM step |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        spread = f"{min(row['runs']):.1f}-{max(row['runs']):.1f}"
        numbers = f"{row['median']:.1f} | {spread} | {row['ratio']:.2f}x | {row['tokens_per_step']:.2f}"
        lines.append(f"| {name} | {numbers} |")
    lines.append(f"texts that differ from plain vLLM's: {different or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
