# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without CUDA: what is captured is recorded operator by operator, and replayed over the same memory.

As on a GPU, a replay knows nothing of Python: numbers of the host are those of the capture, and so are addresses. What
was made during the capture belongs to the graph, whose memory others use between replays: it is spoilt after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

SPOILT = {torch.bool: True, torch.float32: float("nan"), torch.int32: 3, torch.int64: 3}


class RecordedGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.owned: list[torch.Tensor] = []
        self.latest: dict[int, Any] = {}
        self.replays = 0

    def replay(self) -> None:
        """Do again what was recorded."""
        self.replays += 1
        for call in self.calls:
            call()
        self.spoil()

    def spoil(self) -> None:
        """Let others have the memory."""
        for tensor in self.owned:
            tensor.fill_(SPOILT[tensor.dtype])


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph, self.is_paused = graph, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_paused:
            return result
        given = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
        made = [each for each in tensors(result) if each.untyped_storage().data_ptr() not in given]
        name = func._schema.name
        self.graph.owned += [each for each in made if each.dtype in SPOILT]
        if name.startswith(("aten::empty", "aten::new_empty")):
            return result
        if made:
            self.graph.calls.append(self._again(result, lambda: func(*args, **kwargs)))
        elif func._schema.is_mutable:
            self.graph.calls.append(lambda: func(*args, **kwargs))
        return result

    def _again(self, result: Any, call: Callable[[], Any]) -> Callable[[], None]:
        """Repeats the call into its result. What the call gives stays: vLLM's attention metadata points into itself."""
        place = len(self.graph.calls)

        def again() -> None:
            self.graph.latest[place] = call()
            overwrite(result, self.graph.latest[place])

        return again

    def kernel(self, run: Callable) -> Callable:
        """Triton's interpreter, which calls torch itself."""

        def recorded(kernel, *args, **kwargs):
            self.graph.calls.append(lambda: run(kernel, *args, **kwargs))
            self.is_paused = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self.is_paused = False

        return recorded


def tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def overwrite(old: Any, new: Any) -> None:
    """Put what an operator gives now where it stood when it was recorded."""
    for mine, theirs in zip(tensors(old), tensors(new), strict=True):
        if mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr():
            mine.copy_(theirs)


@contextmanager
def recorded(graph: RecordedGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of torch.cuda.graph."""
    recorder = _Recorder(graph)
    with mock.patch.object(InterpretedFunction, "run", recorder.kernel(InterpretedFunction.run)), recorder:
        yield
    graph.spoil()


@contextmanager
def installed() -> Iterator[None]:
    """vLLM's managers capture RecordedGraphs."""
    changes = {"capture_pool": lambda pool, config: nullcontext(pool), "graph_capture": lambda device: nullcontext()}
    with ExitStack() as stack:
        for name, value in (changes | {"current_stream": lambda: None}).items():
            stack.enter_context(mock.patch.object(cudagraph_utils, name, value))
        stack.enter_context(mock.patch.object(type(current_platform), "_global_graph_pool", object()))
        stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", RecordedGraph))
        stack.enter_context(mock.patch.object(torch.cuda, "graph", recorded))
        yield


def capture(runner: Any, sizes: list[int]) -> list[RecordedGraph]:
    """Let a runner's speculator capture graphs of so many requests, as vLLM does behind the LLM's. Returns them."""
    from vllm.config import set_current_vllm_config
    from vllm.config.compilation import CUDAGraphMode

    speculator = runner.speculator
    for layer in runner.compilation_config.static_forward_context.values():
        layer.use_direct_call = True  # as an operator of its own it would be recorded as a whole
    with installed(), set_current_vllm_config(runner.vllm_config), torch.inference_mode():
        runner.compilation_config.cudagraph_capture_sizes = sizes
        runner.compilation_config.max_cudagraph_capture_size = max(sizes)
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
        speculator.capture()
    return [*speculator.read_graphs.graphs.values(), *speculator.draft_graphs.graphs.values()]
