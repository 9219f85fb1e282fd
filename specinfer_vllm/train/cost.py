# SPDX-License-Identifier: Apache-2.0
"""`specinfer cost`: what an LLM pass takes by drafted nodes, and a level of drafting, on the machine that will serve.

An in-process engine decodes the same prompts with trees of 0, 1, 2, 4, .. nodes; its SSMs draft all of their levels, so
that a level's time is known. Medians, since a machine's moods hit single steps.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.config import SsmOptions
from specinfer_vllm.train.inputs import InputError, read_json
from specinfer_vllm.whole_file import whole_file

DEPTH = 4  # levels drafted while the clock runs
MOST_NODES = SsmOptions.width * (1 + (DEPTH - 1) * SsmOptions.width)  # what one SSM draws on so many levels
MOST_STEPS = 160  # passes that fit into a context, all drafts accepted


@dataclass(frozen=True)
class Cost:
    """Seconds, at one number of requests side by side.

    nodes    of each request's tree, rising from 0
    llm      of an LLM pass with so many nodes
    level    of one level of each SSM's drafting
    """

    batch: int
    nodes: tuple[int, ...]
    llm: tuple[float, ...]
    level: tuple[float, ...]

    def fits(self, ssms: int) -> bool:
        """Whether the numbers can be used, for so many SSMs."""
        rising = self.nodes[:1] == (0,) and bool((np.diff(self.nodes) > 0).all())
        positive = all(np.isfinite(each) and each > 0 for each in (self.batch, *self.llm, *self.level))
        return rising and positive and len(self.nodes) == len(self.llm) > 1 and len(self.level) == ssms

    def curve(self, most: int) -> np.ndarray:
        """Seconds of an LLM pass with 0..most nodes [most + 1]; straight lines between and behind those measured."""
        slope = (self.llm[-1] - self.llm[0]) / (self.nodes[-1] - self.nodes[0])
        nodes = np.arange(most + 1)
        beyond = np.maximum(nodes - self.nodes[-1], 0) * max(slope, 0.0)
        # A pass over more rows takes no less time: what the clock says against it is noise.
        return np.interp(nodes, self.nodes, np.maximum.accumulate(self.llm)) + beyond

    def one_row(self, most: int) -> float:
        """Seconds of a pass over one row, by the curve up to `most` nodes."""
        return self.llm[0] - (self.batch - 1) * self._row(most)

    def row_cost(self, most: int) -> float:
        """Time of one more row, in passes over one row, by the curve up to `most` nodes."""
        return self._row(most) / self.one_row(most)

    def _row(self, most: int) -> float:
        curve = self.curve(most)
        # Of a batch that reads its weights once, no row takes more than its share.
        return min(float(curve[-1] - curve[0]) / (most * self.batch), self.llm[0] / self.batch)


@dataclass(frozen=True)
class Costs:
    """Of one LLM with its SSMs; machine: what it was measured on."""

    llm: str
    ssms: tuple[str, ...]
    machine: str
    batches: tuple[Cost, ...]

    def save(self, file: Path) -> None:
        """As JSON."""
        with whole_file(file) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, file: Path) -> Costs:
        """What save wrote. InputError when it is missing or damaged."""
        try:
            found = read_json(file)
            batches = tuple(
                Cost(
                    int(each["batch"]),
                    tuple(map(int, each["nodes"])),
                    *(tuple(map(float, each[name])) for name in ("llm", "level")),
                )
                for each in found["batches"]
            )
            costs = cls(found["llm"], tuple(found["ssms"]), found["machine"], batches)
            if not batches or not all(each.fits(len(costs.ssms)) for each in batches):
                raise ValueError("its parts do not fit together")
        except Exception as error:  # whatever its damage leads to
            raise InputError(f"{file}: holds no costs ({error}); make it with `specinfer cost`") from None
        return costs


def points(most: int) -> list[int]:
    """Numbers of nodes to measure: 0, 1, 2, 4, .. up to `most`, which is one of them."""
    return sorted({0, most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def engine(llm: str, ssms: Sequence[str], batch: int, most: int, dtype: str, compiled: bool) -> Any:
    """An in-process engine whose SSMs grow trees of at most `most` nodes, all of which are verified."""
    from specinfer_vllm.bench import engines

    engines.use_in_process()
    from vllm import LLM

    tree = {"method": "tree", "ssms": list(ssms), "num_nodes": most, "depth": DEPTH, "row_cost": 0, "draft_cost": 0}
    return LLM(**engines.settings(llm, compiled, batch) | {"dtype": dtype}, speculative_config=tree)


def measure(running: Any, batch: int, most: int, steps: int) -> Cost:
    """Time one number of requests. running: what `engine` returned; steps: of decoding at each number of nodes."""
    from specinfer_vllm.bench import engines

    runner = engines.runner_of(running)
    drafter, options = runner.drafter, runner.drafter.options
    nodes, llm, level = points(most), [], []
    decode(running, batch, steps)  # warm: what is compiled on first use

    def full() -> bool:  # requests end one by one, and a smaller batch is another one
        return runner.input_batch.num_reqs == batch

    for count in nodes:
        drafter.options = replace(options, num_nodes=count)
        with ExitStack() as clocks:
            passes = [clocks.enter_context(timed(*each, full)) for each in llm_pass(runner)]
            drafts = [clocks.enter_context(timed(ssm, "propose", full)) for ssm in drafter.ssms]
            decode(running, batch, steps)
        llm.append(sum(map(statistics.median, passes)))
        level.append([statistics.median(seconds) / DEPTH for seconds in drafts])
    drafter.options = options
    return Cost(batch, tuple(nodes), tuple(llm), tuple(map(statistics.median, zip(*level, strict=True))))


def llm_pass(runner: Any) -> list[tuple[Any, str]]:
    """The calls that make one LLM pass."""
    return [(runner, "_model_forward"), (runner.model, "compute_logits")]


def decode(running: Any, batch: int, steps: int) -> None:
    """At least `steps` passes over `batch` requests."""
    from vllm import SamplingParams

    prompt = running.get_tokenizer().encode("Count on: one, two, three, four, five, six, seven, eight, nine, ten,")
    asked = [{"prompt_token_ids": [*prompt, *prompt[: 1 + i % len(prompt)]]} for i in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=steps * (1 + DEPTH), ignore_eos=True)
    running.generate(asked, params, use_tqdm=False)


@contextmanager
def timed(owner: Any, name: str, counts: Callable[[], bool]) -> Iterator[list[float]]:
    """The seconds of every call of owner.name that counts, as long as the context lasts."""
    original, seconds = getattr(owner, name), []

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        if counts():
            seconds.append(time.perf_counter() - begin)
        return result

    setattr(owner, name, call)
    try:
        yield seconds
    finally:
        delattr(owner, name)
