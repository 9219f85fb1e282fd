# SPDX-License-Identifier: Apache-2.0
"""The layers of an SSM that is not sharded find a tensor-parallel group that holds their own rank alone.

vLLM has one such group for all models and refuses a draft model of another size. Layers read it from
vllm/distributed/parallel_state.py when they are built, and some again in every pass: the head gathers its logits over
it. The group of the pipeline's stages stands in its place meanwhile: trees are refused with more than one stage, so it
is this rank alone, and no communicator is made for it. vLLM >=0.32,<0.34.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specinfer_vllm.patches.patch import Hook, HookChanged

STATE = "vllm.distributed.parallel_state"
HOOKS = (
    Hook(STATE, "_TP", reason="an SSM that is not sharded finds its own rank here"),
    Hook(STATE, "get_tp_group", reason="layers ask it for their group, which it reads from that name"),
    Hook(STATE, "get_pp_group", reason="with one stage it is a group of this rank alone"),
)


@contextmanager
def this_rank_alone() -> Iterator[None]:
    """Whatever is built or run meanwhile is not sharded and communicates with nobody.

    Raises HookChanged when vLLM's layers would find another group all the same.
    """
    import vllm.distributed.parallel_state as state

    shared, alone = state._TP, state.get_pp_group()
    state._TP = alone
    try:
        if state.get_tp_group() is not alone or alone.world_size != 1:
            raise HookChanged(f"{HOOKS[1]}: not the group of one rank that was put in its place")
        yield
    finally:
        state._TP = shared


def unsharded(parallel: Any) -> Any:
    """A copy of a ParallelConfig for a model that each rank holds as a whole; `rank` keeps compile caches apart."""
    mine = copy.copy(parallel)  # made anew it would take one of vLLM's free ports, and another rank
    mine.tensor_parallel_size = mine.world_size = 1
    mine.enable_expert_parallel = False
    return mine
