# SPDX-License-Identifier: Apache-2.0
"""Counts what the V2 runner's steps would launch on a GPU and where the host would wait for it, in the interpreter.

Every tensor of a CPU is the host's, so tensors are told apart by how they came to be: made by NumPy, by a factory
without a device, or of such tensors only, they would be the host's beside a GPU too; all others would be the GPU's.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from graphs import RecordedGraph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler

from specinfer_vllm.attention.cpu import TreeCPUAttentionMetadataBuilder
from specinfer_vllm.engine import verifier_v2
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction
from specinfer_vllm.engine.runner_v2 import TreeCPUModelRunnerV2, TreeRunnerV2Mixin
from specinfer_vllm.engine.speculator import TreeSpeculator
from specinfer_vllm.engine.verifier_v2 import TreeVerifier
from specinfer_vllm.propose.device_ssm import DeviceSsm

# What a launch is put down to: the innermost of these calls. None = vLLM's own work.
PHASES = [
    (TreeRunnerV2Mixin, "add_requests", "requests"),
    (TreeRunnerV2Mixin, "prepare_attn", "prepare"),
    (TreeVerifier, "__call__", "verify"),
    (TreeRunnerV2Mixin, "postprocess_sampled", "postprocess"),
    (TreeSpeculator, "propose", "propose"),
    (DeviceSsm, "read", "ssm"),
    (DeviceSsm, "draft", "ssm"),
    (DeviceSsm, "levels", "ssm levels"),
    (DeviceSsm, "run_pass", "ssm passes"),
    (TreeRunnerV2Mixin, "take_draft_token_ids", "take"),
    (GPUModelRunner, "add_requests", None),
    (GPUModelRunner, "prepare_attn", None),
    (Sampler, "sample", None),
    (verifier_v2, "get_num_sampled_and_rejected", None),
    (GPUModelRunner, "postprocess_sampled", None),
    (GPUModelRunner, "take_draft_token_ids", None),
]
# Models, and what stands for other code on a GPU: not looked at.
ELSEWHERE = [
    (LlamaForCausalLM, "forward"),
    (LlamaForCausalLM, "compute_logits"),
    (TreeCPUAttentionMetadataBuilder, "build"),
    (CpuKvCompaction, "move"),
]

READS = {"item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"}
WAITS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}


@dataclass
class Step:
    """What one step did.

    launches  per phase and name of a kernel or operator
    calls     of each phase
    waits     where the host waits for the device, or a tensor of the host stands among the device's
    """

    requests: int
    drafts: int
    launches: dict[str, Counter[str]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Launches per phase."""
        return {phase: names.total() for phase, names in self.launches.items()}


class Meter:
    """Records steps of a runner of this process while it is `installed`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.phase: str | None = None
        self.is_paused = self.is_host = False
        self.modes = _Calls(self), _Operators(self)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[Meter]:
        """Record a Step for each of the runner's until the end."""
        with self._unseen_by_modes(), ExitStack() as stack:
            for owner, name, phase in PHASES:
                wrapped = self._in_phase(getattr(owner, name), phase)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            for owner, name in ELSEWHERE:
                stack.enter_context(mock.patch.object(owner, name, self._unseen(getattr(owner, name))))
            for name in ("execute_model", "sample_tokens", "take_draft_token_ids"):
                wrapped = self._watched(getattr(TreeCPUModelRunnerV2, name), name == "execute_model")
                stack.enter_context(mock.patch.object(TreeCPUModelRunnerV2, name, wrapped))
            yield self

    @contextmanager
    def watching(self, phase: str) -> Iterator[Step]:
        """Record what happens until the end as a step of one phase."""
        self.steps.append(Step(0, 0))
        with self._unseen_by_modes(), self.modes[0], self.modes[1]:
            self.phase = phase
            try:
                yield self.steps[-1]
            finally:
                self.phase = None

    @contextmanager
    def _unseen_by_modes(self) -> Iterator[None]:
        run = self._kernel(InterpretedFunction.run)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(InterpretedFunction, "run", run))
            stack.enter_context(mock.patch.object(RecordedGraph, "replay", self._graph(RecordedGraph.replay)))
            stack.enter_context(mock.patch.object(torch, "from_numpy", marked(torch.from_numpy)))
            for module in list(sys.modules.values()):  # on a CPU vLLM has two of them, which copy nothing
                if (send := vars(module).get("async_tensor_h2d")) is not None:
                    stack.enter_context(mock.patch.object(module, "async_tensor_h2d", self._sent(send)))
            yield

    def _sent(self, send: Callable) -> Callable:
        def sent(*args, **kwargs):
            self.launched("copy from the host")
            with self.paused():
                result = send(*args, **kwargs)
                return result if kwargs.get("out") is not None else result.clone()

        return sent

    def _watched(self, method: Callable, begins: bool) -> Callable:
        def watched(runner, *args, **kwargs):
            if begins:
                scheduled = args[0]
                drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
                self.steps.append(Step(len(scheduled.num_scheduled_tokens), drafts))
            with self.modes[0], self.modes[1]:
                return method(runner, *args, **kwargs)

        return watched

    def _in_phase(self, function: Callable, phase: str | None) -> Callable:
        def entered(*args, **kwargs):
            before, self.phase = self.phase, phase
            if self.steps and phase is not None:
                self.steps[-1].calls[phase] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return entered

    def _unseen(self, function: Callable) -> Callable:
        def unseen(*args, **kwargs):
            with self.paused():
                return function(*args, **kwargs)

        return unseen

    def _kernel(self, run: Callable) -> Callable:
        def counted(kernel, *args, **kwargs):
            self.launched(kernel.fn.__name__)
            with self.paused():
                return run(kernel, *args, **kwargs)

        return counted

    def _graph(self, replay: Callable) -> Callable:
        def counted(graph):
            self.launched("graph")
            with self.paused():
                replay(graph)

        return counted

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not looked at."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    # -- records -------------------------------------------------------------------------------------------------------

    def launched(self, name: str) -> None:
        """A kernel starts."""
        if self.phase is not None and self.steps:
            self.steps[-1].launches.setdefault(self.phase, Counter())[name] += 1

    def waited(self, what: str) -> None:
        """The host waits."""
        if self.phase is not None and self.steps:
            stack = [each for each in traceback.extract_stack() if each.filename != __file__]
            ours = [each for each in stack if "/specinfer_vllm/" in each.filename or "/tests/" in each.filename]
            at = (ours or stack)[-1]
            self.steps[-1].waits.append(f"{self.phase}: {what} at {at.filename}:{at.lineno}: {at.line}")

    # -- what the modes see --------------------------------------------------------------------------------------------

    def call(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of torch from Python."""
        name = function.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        device = kwargs.get("device")
        if name == "to":
            device = next((each for each in args[1:] if isinstance(each, torch.device | str)), device)
        if device is None:
            is_host = all(map(on_host, tensors)) if name != "copy_" else on_host(args[0])
        else:
            is_host = device == "cpu" if isinstance(device, str) else False
        if what := waits_for(name, args, kwargs, tensors, is_host):
            self.waited(what)
        before, self.is_host = self.is_host, is_host
        try:
            result = function(*args, **kwargs)
        finally:
            self.is_host = before
        if is_host:
            return mark(result)
        if name == "to" and on_host(args[0]):
            self.launched("copy from the host")
            return result.detach() if result is args[0] else result  # on a CPU there was nothing to copy
        return result

    def operator(self, operator: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """An operator behind such a call."""
        name = operator._schema.name.removeprefix("aten::")
        if self.is_host:
            return
        indices = args[1] if name.startswith(("index.", "index_put", "_index_put")) or name == "index" else ()
        for each in indices:
            if each is not None and each.dtype == torch.int32:
                self.launched("to int64")  # by the operator itself
        by_mask = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
        unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITS or by_mask or unknown:
            self.waited(f"{name} by mask" if by_mask else name)
        elif not (operator.is_view or name in FREE or name in ("detach", "alias", "lift_fresh")):
            results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            if not results or any(each.numel() for each in results):
                self.launched(name)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether it would be the host's beside a GPU."""
    return getattr(tensor, "on_host", False)


def mark(result: Any) -> Any:
    """Say that the tensors of a result would be the host's."""
    for each in tree_leaves(result):
        if isinstance(each, torch.Tensor):
            each.on_host = True
    return result


def marked(function: Callable) -> Callable:
    """A function of torch that modes do not see."""
    return lambda *args, **kwargs: mark(function(*args, **kwargs))


def waits_for(name: str, args: tuple, kwargs: dict[str, Any], tensors: list[torch.Tensor], is_host: bool) -> str | None:
    """What a call from Python waits for, None when nothing."""
    from_device = [each for each in tensors if not on_host(each)]
    from_host = [each for each in tensors if on_host(each) and each.dim()]
    if name in READS:
        return f"Tensor.{name}" if from_device else None
    if name in ("to", "copy_"):
        crosses = (from_device if is_host else from_host) and len(tensors) > 0
        blocks = is_host or not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        return f"a copy {'to' if is_host else 'from'} the host" if crosses and blocks else None
    if name in ("tensor", "as_tensor"):
        return None if is_host or from_device else "a copy from the host"
    if from_device and from_host and name != "__get__":
        return f"{name} of tensors on host and device"
    return None


class _Calls(TorchFunctionMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.meter.is_paused:
            return func(*args, **(kwargs or {}))
        return self.meter.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.meter.is_paused or func.namespace != "aten":
            return func(*args, **kwargs)
        with self:  # in inference mode operators that are made of others arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        self.meter.operator(func, args, kwargs, result)
        return result
