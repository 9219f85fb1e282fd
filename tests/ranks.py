# SPDX-License-Identifier: Apache-2.0
"""Engines of this process with two tensor-parallel ranks on the CPU, and what each rank decides step by step.

The ranks are forked, where vLLM would spawn them: a fork takes a second where a spawn imports everything anew, and
what a test patches reaches them. OpenMP must have started no thread before: with OMP_NUM_THREADS=1 it starts none.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import engines
import numpy as np
import pytest
from vllm.v1.executor import multiproc_executor

from specinfer_vllm.engine.worker import TreeCPUWorker

RANKS = 2

# One request after a step: its committed tokens, its tree's tokens and parents, and the seed that keys its noise.
State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
Step = dict[str, State]

# Of the process, which is one rank: what it decided, and (rank, texts) while `disturb` waits for its step.
steps: list[Step] = []
disturbance: list[tuple[int, dict[str, list[int]]]] = []


class Backwards(set):
    """A set that is walked from its last item to its first."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), reverse=True))


class Rank:
    """Methods for TreeCPUWorker: the first two in the place of its own, the others for collective_rpc."""

    execute, sample = TreeCPUWorker.execute_model, TreeCPUWorker.sample_tokens

    def execute_model(self, scheduler_output: Any) -> Any:
        """As the worker's. Every process walks a set of strings in an order of its own; here rank 1 does."""
        if self.rank == 1:
            for name in ("finished_req_ids", "preempted_req_ids"):
                setattr(scheduler_output, name, Backwards(getattr(scheduler_output, name) or ()))
        return Rank.execute(self, scheduler_output)

    def sample_tokens(self, *args: Any) -> Any:
        """As the worker's: it samples, accepts and drafts."""
        output = Rank.sample(self, *args)
        runner = self.model_runner
        if disturbance and self.rank == disturbance[0][0]:
            alter(runner, disturbance[0][1])
        steps.append(state_v2(runner) if self.use_v2_model_runner else state_v1(runner))
        return output

    def take_decisions(self) -> list[Step]:
        """What was decided since this was last asked."""
        taken = steps.copy()
        steps.clear()
        return taken

    def ssms_held(self) -> tuple[list[int], set[str]]:
        """Indices of the SSMs whose weights this rank has, and whose layers have K/V here, by their names."""
        runner = self.model_runner
        ssms = runner.speculator.ssms.every if self.use_v2_model_runner else runner.drafter.ssms
        layers = {name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names}
        named = {name.split(".")[0] for name in layers if name.startswith("ssm")}
        return [ssm.index for ssm in ssms if hasattr(ssm, "model")], named

    def deafen(self) -> None:
        """From now on rank 1 hears nothing but zeros of rank 0."""
        if self.rank != 1:
            return
        exchange = self.model_runner.speculator.ssms.exchange
        gather = exchange.gather

        def heard(words: Any) -> Any:
            every = gather(words)
            every[: len(words)] = 0
            return every

        exchange.gather = heard

    def disturb(self, rank: int, texts: dict[str, list[int]]) -> None:
        """Once this rank holds a tree of which nothing will be accepted, change a token in it.

        texts  tokens of the answer, by the beginning of the request's name
        """
        disturbance.append((rank, texts))


def state_v1(runner: Any) -> Step:
    """All running requests on the V1 runner."""
    drafter = runner.drafter
    return {
        request: (
            tuple(runner.requests[request].output_token_ids),
            tuple(drafter.drafted.tokens(request)),
            tuple(drafter.drafted.parents(request)),
            int(drafter.slots.seed[drafter.slots.slot[request]]),
        )
        for request in runner.input_batch.req_ids
    }


def state_v2(runner: Any) -> Step:
    """All running requests on the V2 runner."""
    states, trees, seeds = runner.req_states, runner.speculator.trees, runner.sampler.sampling_states.seeds
    found = {}
    for request, slot in states.req_id_to_index.items():
        start, end = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
        found[request] = (
            tuple(states.all_token_ids.gpu[slot, start:end].tolist()),
            tuple(trees.tokens[slot].tolist()),
            tuple(trees.parent[slot].tolist()),
            int(seeds.np[slot]),
        )
    return found


def alter(runner: Any, texts: dict[str, list[int]]) -> None:
    """Change the last node of a tree whose root has no child that the text goes on with, if there is one."""
    is_v2 = hasattr(runner, "speculator")
    for request, (committed, tokens, parents, _) in (state_v2 if is_v2 else state_v1)(runner).items():
        text = next((text for known, text in texts.items() if request.startswith(known)), None)
        if text is None or not committed or len(committed) >= len(text) - 1:
            continue
        children = {token for token, parent in zip(tokens, parents, strict=True) if parent == 0 and token >= 0}
        if not children or text[len(committed)] in children:
            continue
        other = next(token for token in range(3, 100) if token not in {*children, *text})
        if is_v2:
            last = int(np.flatnonzero(np.array(tokens) >= 0)[-1])
            slot = runner.req_states.req_id_to_index[request]
            runner.speculator.trees.tokens[slot, last] = other
            runner.req_states.draft_tokens[slot, last - 1] = other
        else:
            nodes = runner.drafter.drafted._nodes(request)
            runner.drafter.drafted.trees.tokens[nodes.stop - 1] = other
        disturbance.clear()
        return


@contextmanager
def engine(model: Any, **options: Any) -> Iterator[Any]:
    """An engine with two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork"))
        for name in ("execute_model", "sample_tokens", "take_decisions", "ssms_held", "deafen", "disturb"):
            patch.setattr(TreeCPUWorker, name, getattr(Rank, name), raising=False)
        with engines.engine(model, tensor_parallel_size=RANKS, **options) as llm:
            yield llm


def decisions(llm: Any) -> Sequence[list[Step]]:
    """What each rank decided, step by step, since this was last asked."""
    return llm.collective_rpc("take_decisions")


def parted(ranks: Sequence[list[Step]]) -> list[int]:
    """Steps in which the ranks decided differently."""
    assert len({len(each) for each in ranks}) == 1
    return [at for at, step in enumerate(zip(*ranks, strict=True)) if any(each != step[0] for each in step)]
