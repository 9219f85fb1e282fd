# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: an in-process engine with a stopwatch around each phase.

`python -m specinfer_vllm.bench.profile_step [--batch 1] [--ssm PATH] [--compiled]` prints one table.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from typing import Any

PHASES = ("LLM", "SSM", "draft-free proposers", "tree: topology, mask, positions", "accept", "compaction", "learn")


class Stopwatch:
    """Exclusive wall time per phase: a phase inside another stops the outer one's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running: list[str] = []
        self.since = time.perf_counter()

    def turn(self) -> None:
        """Book the time since the last turn on the phase that runs."""
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Book every call of owner.name on `phase`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.running.append(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.turn()
                self.running.pop()

        setattr(owner, name, timed)


def main(arguments: list[str] | None = None) -> None:
    """Generate with everything watched and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per request")
    parser.add_argument("--ssm", action="append", default=[], help="an SSM; repeat for several")
    parser.add_argument("--compiled", action="store_true", help="torch.compile the models")
    options = parser.parse_args(arguments)
    from specinfer_vllm.bench import engines

    engines.use_in_process()
    from vllm import LLM, SamplingParams

    from specinfer_vllm.bench import prompts, smollm2

    shared = engines.settings(smollm2.model_path(), options.compiled, options.batch)
    speculative = {"method": "tree", "ssms": options.ssm, "proposers": ["recycling"]}
    llm = LLM(**shared, speculative_config=speculative)
    chats = [each.messages for each in prompts.load(["humaneval", "mtbench"], options.batch)]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    llm.chat(chats, params, use_tqdm=False)  # warm: prefix cache filled, so that the next run decodes only
    watch = Stopwatch()
    attach(watch, llm)
    before = engines.tree_stats(llm)
    llm.chat(chats, params, use_tqdm=False)
    watch.turn()
    after = engines.tree_stats(llm)
    print(table(watch, after["steps"] - before["steps"]))
    print(f"tokens per LLM step {engines.tokens_per_step(before, after):.2f}; {engines.hardware()}")


def attach(watch: Stopwatch, llm: Any) -> None:
    """Put the phases' clocks on an in-process engine."""
    from specinfer_vllm.bench import engines

    core, runner = llm.llm_engine.engine_core.engine_core, engines.runner_of(llm)
    watch.watch(core, "step_fn", "vLLM: scheduler, bookkeeping, sampler set-up")
    watch.watch(runner, "_model_forward", "LLM")
    watch.watch(runner.model, "compute_logits", "LLM")
    for ssm in runner.drafter.ssms:
        watch.watch(ssm, "propose", "SSM")
    watch.watch(runner.drafter.ensemble, "propose", "draft-free proposers")
    watch.watch(runner, "_plan", "tree: topology, mask, positions")
    watch.watch(runner, "_sample", "accept")
    watch.watch(runner, "_compact", "compaction")
    watch.watch(runner, "_observe", "learn")


def table(watch: Stopwatch, steps: int) -> str:
    """Milliseconds per step and shares, largest first."""
    total = sum(watch.seconds.values())
    rows = sorted(watch.seconds.items(), key=lambda row: -row[1])
    lines = [f"{name:<48}{1e3 * seconds / steps:8.2f} ms {seconds / total:7.1%}" for name, seconds in rows]
    return "\n".join([f"{steps} steps of {1e3 * total / steps:.1f} ms", *lines])


if __name__ == "__main__":
    main()
