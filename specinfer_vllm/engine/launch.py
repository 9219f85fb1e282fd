# SPDX-License-Identifier: Apache-2.0
"""Before anything is loaded: what a tree needs of vLLM's configuration, and what it cannot be combined with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specinfer_vllm.attention.libraries import LIBRARIES, AttentionKind
from specinfer_vllm.config import ONE_PER_RANK, TRITON, WHERE, TreeOptionError, TreeOptions
from specinfer_vllm.engine.vocabulary import check_ssm
from specinfer_vllm.patches import hooks, triton_attention
from specinfer_vllm.patches.patch import HookMissing
from specinfer_vllm.patches.speculative_config import tree_config, uses_runner_v2
from specinfer_vllm.propose.primer import find_primer, read_primer

logger = logging.getLogger("vllm.specinfer")

CPU_WORKER = "specinfer_vllm.engine.worker.TreeCPUWorker"
GPU_WORKER = "specinfer_vllm.engine.gpu_worker.TreeGPUWorker"
SCHEDULER = "specinfer_vllm.engine.scheduler.TreeScheduler"
ASYNC_SCHEDULER = "specinfer_vllm.engine.scheduler.TreeAsyncScheduler"
# What a tree sets on EngineArgs, and what stands there when the user said nothing.
CHOSEN: dict[str, Any] = {"worker_cls": "auto", "scheduler_cls": None, "async_scheduling": None}
FLOATS = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Refusal:
    """A setting of vLLM that trees cannot be combined with.

    name      attribute that holds it; one that this vLLM does not have is not set
    refused   whether this value is in the way
    why       reason and fix
    """

    name: str
    refused: Callable[[Any], bool]
    why: str

    def check(self, owner: Any) -> None:
        """Raise TreeOptionError when the owner's setting is in the way."""
        value = getattr(owner, self.name, None)
        if self.refused(value):
            shown = f"={value!r}" if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
            raise TreeOptionError(f"{self.name}{shown}: not supported with method 'tree': {self.why}")


def is_set(value: Any) -> bool:
    """Whether the user set an option that is off, zero or absent otherwise."""
    return bool(value)


def is_parallel(value: Any) -> bool:
    """Whether a size is more than one."""
    return (value or 1) > 1


ONE_STAGE = "the accepted path is known on the last stage only; use pipeline_parallel_size=1"
SHARDED = "its KV cache is sharded by position, and accepted nodes change theirs; use 1"
CONNECTOR = "connectors save a token's KV before accepted nodes are moved into place; leave it out"
QUANTISED = "accepted nodes are moved as they lie in the cache, and quantised KV cannot be; use kv_cache_dtype='auto'"
OTHER_RUNNER = "only vLLM's V2 runner has it, and on a CPU trees run on the V1 runner; leave it out"
SAMPLER = "it is made for vLLM's own rejection sampler; leave it out"

# Read from EngineArgs, before vLLM refuses the same thing in words that do not name the tree.
ARGUMENTS = (
    Refusal("pipeline_parallel_size", is_parallel, ONE_STAGE),
    Refusal("decode_context_parallel_size", is_parallel, SHARDED),
    Refusal("prefill_context_parallel_size", is_parallel, SHARDED),
    Refusal("kv_transfer_config", is_set, CONNECTOR),
    Refusal("kv_offloading_size", is_set, CONNECTOR),
    Refusal("kv_cache_dtype", lambda value: value not in (None, *FLOATS), QUANTISED),
    Refusal("kv_sharing_fast_prefill", is_set, "it is not tested with trees yet; leave it off"),
    Refusal("enable_lora", is_set, "LoRA batches are not tested with trees yet; serve without adapters"),
    Refusal("watermark_config", is_set, SAMPLER),
    Refusal("return_sampling_mask", is_set, SAMPLER),
    Refusal("enable_batch_sharded_sampling", is_set, "a tree's rows are not sharded yet; leave it out"),
    Refusal("enable_dbo", is_set, "dual batch overlap would split a tree's rows; leave it out"),
    Refusal("ubatch_size", is_parallel, "microbatches would split a tree's rows; leave it out"),
    Refusal("enable_return_routed_experts", is_set, "experts are recorded by slot, and accepted nodes change theirs"),
)

# Where the V1 runner serves the tree.
ARGUMENTS_V1 = (
    Refusal("async_scheduling", is_set, "the V1 runner drafts after bookkeeping; leave it out or say False"),
)

# Read from the finished ModelConfig.
MODELS = (
    Refusal("is_hybrid", is_set, "a recurrent state cannot verify branches in one pass; use a pure attention model"),
    Refusal(
        "is_attention_free", is_set, "a recurrent state cannot verify branches in one pass; use an attention model"
    ),
    Refusal(
        "runner_type", lambda value: value not in ("generate", "draft"), "it decodes nothing; use a generating model"
    ),
    Refusal("is_encoder_decoder", is_set, "encoder-decoder models have no tree attention; use a decoder"),
    Refusal("is_diffusion", is_set, "it does not decode from left to right; use an autoregressive model"),
    Refusal("uses_alibi", is_set, "ALiBi measures distances between rows, not depths; use a model without"),
    Refusal("uses_mrope", is_set, "M-RoPE positions are not mapped to trees yet; use a text model"),
    Refusal("use_mla", is_set, "tree attention does not read latent KV (MLA) yet; use a model without"),
)


def prepare(args: Any, options: TreeOptions) -> None:
    """Name the tree's worker and scheduler on EngineArgs.

    Raises TreeOptionError for a device, a vLLM or a setting that trees cannot be combined with.
    """
    refuse_device()
    refuse_library(options)
    refuse_unknown_vllm()
    refuse(ARGUMENTS, args)
    if uses_runner_v2():
        refuse_options(options)
    else:
        refuse(ARGUMENTS_V1, args)
        refuse_placement(options, args.tensor_parallel_size)
    for name, ours in chosen().items():
        given = getattr(args, name)
        if given not in (CHOSEN[name], ours):
            shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
            raise TreeOptionError(
                f"{name}: {shown} cannot be combined with method 'tree', which brings {ours!r}; leave it out"
            )
        setattr(args, name, ours)


def chosen() -> dict[str, Any]:
    """What a tree sets on EngineArgs, by the device and the runner."""
    from vllm.platforms import current_platform

    mine = {"worker_cls": CPU_WORKER if current_platform.is_cpu() else GPU_WORKER, "scheduler_cls": SCHEDULER}
    return mine if uses_runner_v2() else mine | {"async_scheduling": False}


def refuse(refusals: Iterable[Refusal], owner: Any) -> None:
    """Raise TreeOptionError for the first setting of the owner that is in the way."""
    for each in refusals:
        each.check(owner)


def refuse_placement(options: TreeOptions, ranks: int) -> None:
    """Raise TreeOptionError for a placement of SSMs that the V1 runner does not have."""
    if options.ssm_placement == ONE_PER_RANK and ranks > 1:
        raise TreeOptionError(
            f"{WHERE}.ssm_placement: {ONE_PER_RANK!r} does not run on vLLM's V1 runner; use 'replicated' or 'sharded'"
        )


def refuse_device() -> None:
    """Raise TreeOptionError on a device whose runner has no adapter."""
    problem = device_problem()
    if problem is not None:
        raise TreeOptionError(f"{WHERE}.method: {problem}")


def device_problem() -> str | None:
    """Why trees do not run on this vLLM's device and runner, None where they do."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    v2 = uses_runner_v2()
    if v2 and not HAS_TRITON:
        return "VLLM_USE_V2_MODEL_RUNNER=1 asks for a runner that needs Triton, which does not run here; unset it"
    if current_platform.is_cpu():
        return None
    name = current_platform.device_name or "no device"
    if not current_platform.is_cuda_alike():
        return f"'tree' runs on CPUs and on NVIDIA and AMD GPUs, not on {name}; use another method"
    if not v2:
        return "VLLM_USE_V2_MODEL_RUNNER=0: on a GPU 'tree' runs on vLLM's V2 runner only; unset it"
    return None


def refuse_library(options: TreeOptions) -> None:
    """Raise TreeOptionError for a tree_attention that this device does not read, or that is not installed."""
    from vllm.platforms import current_platform

    name = options.tree_attention
    if name == TRITON:
        return
    if current_platform.is_cpu():
        raise TreeOptionError(
            f"{WHERE}.tree_attention: {name!r} stands in for a kernel of GPUs; on a CPU trees have their own attention:"
            " leave it out"
        )
    library = LIBRARIES[name]
    if not library.is_installed:
        raise TreeOptionError(
            f"{WHERE}.tree_attention: {name!r} needs the package {library.package}, which is not installed here;"
            f" install it, or use tree_attention={TRITON!r}"
        )


def refuse_unknown_vllm() -> None:
    """Raise TreeOptionError when a hook that every tree needs is not as we know it."""
    try:
        hooks.check(hooks.LAUNCH)
    except HookMissing as missing:
        raise TreeOptionError(
            f"{WHERE}.method: 'tree' does not fit this vLLM: {missing}. Leave 'tree' out, or install a release that "
            "`specinfer doctor` passes"
        ) from missing


FIXED = "its trees have num_nodes nodes in every step; leave it out, and set num_nodes"
# Options that it would not read: the values that say nothing, and the fix.
V2_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "row_cost": ((None, 0), FIXED),
    "draft_cost": ((None, 0), FIXED),
    "batch_nodes": ((None,), FIXED),
    "share_recycling": ((False,), "leave it out: each request has its own rows there"),
    "seed": ((0,), "leave it out: requests without a seed take theirs from vLLM's own --seed"),
}


def refuse_options(options: TreeOptions) -> None:
    """Raise TreeOptionError for options that the V2 runner does not serve yet."""
    for name, (served, fix) in V2_OPTIONS.items():
        if getattr(options, name) not in served:
            raise TreeOptionError(
                f"{WHERE}.{name}: {getattr(options, name)!r} is not served by vLLM's V2 runner; {fix}"
            )


def check_model(model: Any) -> None:
    """Raise TreeOptionError for an LLM that cannot verify a tree in one pass. model: ModelConfig."""
    try:
        refuse(MODELS, model)
    except TreeOptionError as error:
        raise TreeOptionError(f"model: {model.model!r}: {error}") from None


def check(config: Any) -> None:
    """Refuse what is known on the finished VllmConfig only, and explain settings that waste trees.

    Raises TreeOptionError.
    """
    tree = tree_config(config).tree
    check_runner(config)
    if config.scheduler_config.async_scheduling:
        config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER  # known on the finished config only
    choose_attention(config)
    check_library(tree, config)
    if config.kv_transfer_config is not None:
        raise TreeOptionError(f"kv_transfer_config: not supported with method 'tree': {CONNECTOR}")
    dtype = config.cache_config.cache_dtype  # 'auto' may have become what the checkpoint says
    if dtype not in FLOATS:
        raise TreeOptionError(f"kv_cache_dtype={dtype!r}: not supported with method 'tree': {QUANTISED}")
    check_data_parallel(tree, config.parallel_config)
    check_lengths(tree, config.model_config.max_model_len)
    check_primer_file(tree, config.model_config)
    for index in range(len(tree.ssms)):
        check_ssm(tree.ssms[index], index, config)
    explain_budget(config, tree)


def check_runner(config: Any) -> None:
    """Raise TreeOptionError when vLLM takes another runner than the one the tree was prepared for."""
    if config.use_v2_model_runner == uses_runner_v2():
        return
    unsupported = ", ".join(config._get_v2_model_runner_unsupported_features()) or "what else was asked for"
    mine = "V2" if uses_runner_v2() else "V1"
    raise TreeOptionError(
        f"{WHERE}.method: 'tree' was prepared for vLLM's {mine} runner, and vLLM takes the other one because of "
        f"{unsupported}; leave that out, or set VLLM_USE_V2_MODEL_RUNNER"
    )


def choose_attention(config: Any) -> None:
    """Name the tree's attention backend on a GPU; a CPU has one only. Raises TreeOptionError for another's name."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    ours = triton_attention.register()
    given = config.attention_config.backend
    if given not in (None, ours):
        raise TreeOptionError(
            f"attention_backend: {given.name!r} has no tree attention; leave it out, 'tree' brings {ours.name!r}"
        )
    config.attention_config.backend = ours


def check_library(tree: TreeOptions, config: Any) -> None:
    """Raise TreeOptionError for a tree_attention that does not know this LLM's attention, or these CUDA graphs.

    What is known of a layer only, sinks and a soft cap, is refused when the layers are there.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if tree.tree_attention == TRITON:
        return
    model = config.model_config
    kind = AttentionKind(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        is_amd=current_platform.is_rocm(),
        capability=current_platform.get_device_capability(),
    )
    if names := LIBRARIES[tree.tree_attention].unknown(kind):
        raise TreeOptionError(
            f"{WHERE}.tree_attention: {tree.tree_attention!r} does not know {', '.join(names)}; use"
            f" tree_attention={TRITON!r}"
        )
    mode = config.compilation_config.cudagraph_mode
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        raise TreeOptionError(
            f"cudagraph_mode={mode.name}: {WHERE}.tree_attention={tree.tree_attention!r} reads the trees on the host,"
            f" which full CUDA graphs cannot; use cudagraph_mode=PIECEWISE or tree_attention={TRITON!r}"
        )


def check_data_parallel(tree: TreeOptions, parallel: Any) -> None:
    """Raise TreeOptionError where vLLM's data-parallel ranks would wait for each other in an SSM's pass."""
    if tree.ssms and parallel.data_parallel_size > 1 and parallel.is_moe_model:
        raise TreeOptionError(
            f"data_parallel_size={parallel.data_parallel_size}: {WHERE}.ssms beside a mixture of experts: its ranks"
            " meet in every pass, and draft in different ones; leave ssms out, or use data_parallel_size=1"
        )


def check_lengths(tree: TreeOptions, max_model_len: int) -> None:
    """Raise TreeOptionError for a tree that never fits: a prompt token, its root and every node need a slot each."""
    room = max_model_len - 2
    if tree.max_depth > room:
        given = [(each.depth, name) for each, name in zip(tree.static_trees, tree.shape_options, strict=True) if each]
        option = "depth" if tree.depth is not None or not given else max(given)[1]
        raise TreeOptionError(
            f"{WHERE}.{option}: a tree of {tree.max_depth} levels never fits max_model_len={max_model_len}; "
            f"use at most {room} levels or raise max_model_len"
        )
    if tree.num_nodes is not None and tree.num_nodes > room:
        raise TreeOptionError(
            f"{WHERE}.num_nodes: {tree.num_nodes} nodes never fit max_model_len={max_model_len}; "
            f"use at most {room} or raise max_model_len"
        )


def check_primer_file(tree: TreeOptions, model: Any) -> None:
    """Raise TreeOptionError for a primer that the worker could not read. model: ModelConfig."""
    if "recycling" not in tree.free_proposers:
        return
    path = find_primer(tree.primer, model.model, model.revision)
    if path is None:
        return
    try:
        read_primer(path, model.get_vocab_size())
    except (OSError, ValueError) as error:
        raise TreeOptionError(f"{WHERE}.primer: {error}; or use primer='none'") from error


def explain_budget(config: Any, tree: TreeOptions) -> None:
    """Say so when a full batch's trees do not fit the scheduler's token budget: the last requests would lose theirs."""
    scheduler = config.scheduler_config
    nodes = scheduler.max_num_seqs * tree.max_nodes
    needed = scheduler.max_num_seqs + (nodes if tree.batch_nodes is None else min(tree.batch_nodes, nodes))
    if scheduler.max_num_batched_tokens < needed:
        logger.warning(
            "max_num_batched_tokens=%d is less than a full batch with its trees needs (%d = max_num_seqs + nodes): "
            "trees are cut, and some requests wait. Raise max_num_batched_tokens or lower num_nodes or batch_nodes",
            scheduler.max_num_batched_tokens,
            needed,
        )
