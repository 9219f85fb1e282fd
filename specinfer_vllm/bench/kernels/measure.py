# SPDX-License-Identifier: Apache-2.0
"""What the kernels' benchmarks share: random trees, checks, times in CUDA graphs, tables, the command line.

A benchmark has check(device, tiny), which gives Checks, and times(device, tiny, deadline), which gives Rows; both give
them one by one, so that an interrupted run keeps what it has. Its tiny form is for Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton

Row = dict[str, "str | int | float"]
Call = Callable[[], object]

STARTED = time.monotonic()
LATE = "skipped: out of time"
NO_MEMORY = "skipped: too little memory"
CELL = 36  # characters of a cell in a printed table


@dataclass(frozen=True)
class Check:
    """A kernel's result against its reference's.

    error      largest relative error (relative_error) or number of mismatches; text: what was raised
    tolerance  largest error that passes
    """

    case: str
    error: float | str
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether there is an error that is within the tolerance; NaN is not."""
        return not isinstance(self.error, str) and self.error <= self.tolerance

    def __str__(self) -> str:
        found = self.error if isinstance(self.error, str) else f"error {self.error:.2g}"
        return f"{'PASS' if self.passed else 'FAIL'}  {self.case}: {found}, allowed {self.tolerance:.2g}"

    def row(self) -> Row:
        """For JSON, which knows no infinity."""
        error = self.error if isinstance(self.error, str) or math.isfinite(self.error) else str(self.error)
        return {"case": self.case, "error": error, "tolerance": self.tolerance, "passed": self.passed}


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over repetitions, the shortest and the longest."""

    median: float
    low: float
    high: float


CheckCases = Callable[[torch.device, bool], Iterable[Check]]
TimeCases = Callable[[torch.device, bool, float], Iterable[Row]]


def say(text: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def default_device() -> torch.device:
    """The GPU where kernels are compiled for one, the CPU in Triton's interpreter. SystemExit without either."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(
            "torch finds no GPU here. Run this on a machine with an NVIDIA or AMD GPU and a torch built for it, or try"
            " the kernels on the CPU, slowly and on tiny inputs, with TRITON_INTERPRET=1 set and the option --tiny."
        )
    return torch.device("cuda", torch.cuda.current_device())


def environment() -> Row:
    """The GPU, its driver and runtime, and the versions of python, torch and triton."""
    found: Row = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return {"gpu": "none: Triton's interpreter"} | found
    part = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu: Row = {
        "gpu": part.name,
        "capability": f"{part.major}.{part.minor}",
        "multiprocessors": part.multi_processor_count,
        "memory_gib": round(part.total_memory / 2**30, 1),
        "l2_mib": round(part.L2_cache_size / 2**20, 1),
        "driver": _driver(),
        "runtime": f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
    }
    return gpu | found


def _driver() -> str:
    """NVIDIA's driver version; 'unknown' without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] or "unknown"


def random_forest(nodes: Sequence[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parent [rows], start [requests + 1]), int32 on the CPU: a random tree of so many nodes for each request."""
    chance = random.Random(seed)
    parent = [chance.randrange(node) if node else -1 for count in nodes for node in range(count)]
    start = [sum(nodes[:request]) for request in range(len(nodes) + 1)]
    return torch.tensor(parent, dtype=torch.int32), torch.tensor(start, dtype=torch.int32)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest distance, relative to the largest expected magnitude along the last dimension; infinite with any NaN.

    By rows, since attention over many keys averages to little: one bound for all would not see it.
    """
    distance = (result.double() - expected.double()).abs().amax(-1)
    error = float((distance / expected.double().abs().amax(-1).clamp(min=1e-30)).max())
    return error if math.isfinite(error) else math.inf


def checked(case: str, tolerance: float, error: Callable[..., float], *arguments: object) -> Check:
    """The case's Check. What `error(*arguments)` raises fails the case and not the run."""
    try:
        return Check(case, float(error(*arguments)), tolerance)
    except Exception as raised:
        return Check(case, first_line(raised), tolerance)


def first_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def graph_time(calls: Sequence[Call], seconds: float = 0.1) -> Timing:
    """Time of one call, from replays of one CUDA graph of all calls in turn.

    Give calls on different data, copies_for of them, and none of it stays in the L2 cache from one call to the next.
    The graph holds the list as often as fits into 2 ms, so that starting a replay does not count; replays take about
    `seconds`. In the interpreter the first call is timed, once.
    """
    if triton.knobs.runtime.interpret:
        started = time.perf_counter()
        calls[0]()
        once = time.perf_counter() - started
        return Timing(once, once, once)

    def all_calls() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        all_calls()  # compiles
        once = _elapsed(all_calls)
    torch.cuda.current_stream().wait_stream(side)
    rounds = max(math.ceil(4 / len(calls)), min(20, int(0.002 / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            all_calls()
    once = _elapsed(graph.replay)
    found = [_elapsed(graph.replay) / (rounds * len(calls)) for _ in range(max(5, min(50, int(seconds / once))))]
    return Timing(statistics.median(found), min(found), max(found))


def call_time(call: Call, repeats: int = 9) -> Timing:
    """Time of one call, for calls that read the device and so fit into no CUDA graph; in the interpreter as graph_time.

    The first call, which may compile or plan, does not count.
    """
    if triton.knobs.runtime.interpret:
        return graph_time([call])
    call()
    found = [_elapsed(call) for _ in range(repeats)]
    return Timing(statistics.median(found), min(found), max(found))


def _elapsed(call: Call) -> float:
    """Seconds that the GPU takes for what a call enqueues."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of data of `size` bytes exceed the L2 cache four times."""
    if device.type == "cpu":
        return 1
    return max(1, -(-4 * torch.cuda.get_device_properties(device).L2_cache_size // size))


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated; on the CPU more than any tiny case needs."""
    if device.type == "cpu":
        return 1 << 40
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@cache
def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large torch copy, bytes read and bytes written both counted."""
    size = 8 << 20 if device.type == "cpu" else min(1 << 30, free_bytes(device) // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / graph_time([lambda: target.copy_(source)]).median / 1e9


def attempted(deadline: float, run: Callable[..., Timing], *arguments: object) -> Timing | str:
    """What run(*arguments) gives; text where the deadline (time.monotonic) is past or it raises: the first line."""
    if time.monotonic() > deadline:
        return LATE
    try:
        return run(*arguments)
    except ImportError:
        return "not installed"
    except Exception as error:
        return first_line(error)


def microseconds(found: Timing | str) -> float | str:
    """The median in microseconds, or the text."""
    return found if isinstance(found, str) else found.median * 1e6


def time_cells(found: Timing | str, size: int | None = None, device: torch.device | None = None) -> Row:
    """A row's cells: microseconds per call and, of a call that moves `size` bytes at least, what that comes to."""
    if isinstance(found, str):
        return {"us": found}
    cells: Row = {"us": found.median * 1e6, "low": found.low * 1e6, "high": found.high * 1e6}
    if size is not None:
        rate = size / found.median / 1e9
        cells |= {"GB/s": rate, "of copy": rate / copy_bandwidth(device)}
    return cells


def ratio(one: Timing | str, other: Timing | str) -> float | str:
    """How many times longer the first one takes; empty where either has no time."""
    return "" if isinstance(one, str) or isinstance(other, str) else one.median / other.median


def table(rows: Sequence[Row]) -> str:
    """The rows as an aligned table; columns in the order in which they first occur."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in cells)


def _cell(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = str(value)
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def reported(checks: Iterable[Check]) -> Iterator[Check]:
    """The same checks, each printed as it comes."""
    for check in checks:
        say(str(check))
        yield check


def main(check: CheckCases, times: TimeCases, about: str | None) -> None:
    """Command line of one benchmark. Ends with status 1 if a check fails."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few tiny cases, as for Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=420, help="no new time is taken after so long (default 420)")
    options = parser.parse_args()
    device = default_device()
    for name, value in environment().items():
        say(f"{name} {value}")
    failed = [each for each in reported(check(device, options.tiny)) if not each.passed]
    print(table(list(times(device, options.tiny, STARTED + options.seconds))))
    raise SystemExit(bool(failed))
