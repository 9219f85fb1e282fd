# SPDX-License-Identifier: Apache-2.0
"""What a command line of `vllm serve` will get, found out from configurations alone: no weights, no engine.

The line takes the way that vLLM takes: its own parser, EngineArgs, VllmConfig, and what a tree changes in them.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from specinfer_vllm.config import REPLICATED, SHARDED, TRITON, TreeOptionError, TreeOptions
from specinfer_vllm.engine import launch
from specinfer_vllm.patches import triton_attention
from specinfer_vllm.patches.engine_args import tree_options
from specinfer_vllm.patches.speculative_config import tree_config, uses_runner_v2
from specinfer_vllm.propose.primer import find_primer

SERVER = "vllm.entrypoints.openai.api_server"
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
CPU_BACKEND = "CPU_ATTN"
# What vLLM's Triton backend, whose subclass the tree's is, calls itself.
TRITON_BACKEND = "TRITON_ATTN"
ON_LOADING = "chosen by vLLM when it loads the model"
# Refusals about a GPU's attention begin as launch.choose_attention's do.
NO_ATTENTION = "attention_backend: no tree attention for {}; use another method"


@dataclass(frozen=True)
class Outlook:
    """What a command line will get; None where it is not known.

    command_line    its words; None = what `--speculative-config tree` alone gets
    is_tree         whether it asks for token trees; if not, the rest is plain vLLM's
    runner          V1 or V2, with the reason
    worker, scheduler    dotted names of the classes
    tree_attention, attention    backends of the rows of trees and of all other rows
    graph_mode      vLLM's CUDAGraphMode; tree_graphs, other_graphs: of steps in which every request has a tree, and of
                    the others
    nodes, depth    most nodes of a request's tree, and its longest path
    lookahead_slots    KV slots that are kept free behind a request's last token for SSMs
    proposers       paths of SSMs and names of draft-free proposers
    placement       where SSMs are under tensor parallelism
    primer          file that recycling starts with
    notes           what the tree's checks warn of
    refusals        why it does not start, a sentence each
    """

    command_line: tuple[str, ...] | None
    device: str
    is_tree: bool | None = None
    runner: str | None = None
    runner_reason: str | None = None
    model: str | None = None
    worker: str | None = None
    scheduler: str | None = None
    is_async: bool | None = None
    tree_attention: str | None = None
    attention: str | None = None
    graph_mode: str | None = None
    tree_graphs: str | None = None
    other_graphs: str | None = None
    nodes: int | None = None
    depth: int | None = None
    lookahead_slots: int | None = None
    proposers: tuple[str, ...] = ()
    placement: str | None = None
    primer: str | None = None
    verifier: str | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


class ParserError(Exception):
    """What vLLM's parser would have said before ending the process."""


def outlook(command_line: Sequence[str] | None) -> Outlook:
    """What this command line will get. command_line: words, with or without `vllm serve`; None = only `tree`."""
    if command_line is None:
        return of_tree_alone()
    start = Outlook(tuple(command_line), device_name())
    try:
        given = parse(serve_words(command_line))
    except Exception as error:
        return replace(start, refusals=(words_of(error),))
    is_tree = asks_for_tree(given)
    start = replace(start, is_tree=is_tree, model=given.model, **(of_device() if is_tree else {}))
    with notes() as said:
        try:
            config = configure(given)
        except Exception as error:
            refusals = (words_of(error), *(refused(given) if is_tree else ()))
            return replace(start, notes=tuple(said), refusals=tuple(dict.fromkeys(refusals)))
    found = of_tree(config) if is_tree else of_plain(config)
    return replace(start, model=config.model_config.model, notes=tuple(said), **found)


# -- before there is a model -------------------------------------------------------------------------------------------


def of_tree_alone() -> Outlook:
    """What `--speculative-config tree` gets on this machine, as far as it is known without a model."""
    start = Outlook(None, device_name(), is_tree=True, **of_device())
    problem = launch.device_problem()
    if problem is not None:
        return replace(start, refusals=(problem,))
    return replace(start, **of_options(TreeOptions.from_value("tree")))


def device_name() -> str:
    """What vLLM runs on."""
    from vllm.platforms import current_platform

    return current_platform.device_name or "no device"


def of_device() -> dict[str, Any]:
    """What the device decides for every tree; a GPU's graphs depend on the model and on how it is compiled."""
    from vllm.platforms import current_platform

    from specinfer_vllm.patches import cpu_attention

    is_cpu = current_platform.is_cpu()
    ours, others = triton_attention.NAME, TRITON_BACKEND
    if is_cpu:
        ours, others = cpu_attention.BACKEND.rpartition(".")[2], CPU_BACKEND
    return {
        "runner": runner_name(uses_runner_v2()),
        "runner_reason": runner_reason(),
        "worker": launch.chosen()["worker_cls"],
        "tree_attention": ours,
        "attention": others,
        **dict.fromkeys(("graph_mode", "tree_graphs", "other_graphs"), "NONE" if is_cpu else None),
    }


def of_options(tree: TreeOptions) -> dict[str, Any]:
    """What a tree's options decide. Greedy requests follow the LLM's best token whatever the verifier."""
    return {
        "nodes": tree.max_nodes,
        "depth": tree.max_depth,
        "proposers": (*(each.model for each in tree.ssms), *tree.free_proposers),
        "verifier": "naive (auto)" if tree.verifier == "auto" else tree.verifier,
    }


def runner_name(is_v2: bool) -> str:
    """As vLLM calls it."""
    return "V2" if is_v2 else "V1"


def runner_reason() -> str:
    """Why `uses_runner_v2` says what it says."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    if wanted is not None:
        return f"VLLM_USE_V2_MODEL_RUNNER={int(wanted)}"
    return "vLLM's choice where Triton runs, as it does here" if HAS_TRITON else "Triton does not run on this device"


# -- from words to a configuration -------------------------------------------------------------------------------------


def serve_words(words: Sequence[str]) -> list[str]:
    """The words behind `vllm serve`. Raises ParserError for a command that serves nothing."""
    words = list(words)
    if words and VARIABLE.match(words[0]):
        raise ParserError(f"{words[0]}: put variables of the environment in front of `specinfer doctor`")
    if words and Path(words[0]).name == "vllm":
        if words[1:2] != ["serve"]:
            raise ParserError(f"{' '.join(words[:2])}: only command lines of `vllm serve` are known here")
        return words[2:]
    if words[1:3] == ["-m", SERVER]:
        return words[3:]
    return words[1:] if words[:1] == ["serve"] else words


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What the parser of `vllm serve` reads. Raises ParserError, and what vLLM raises."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def fail(message: str) -> NoReturn:
        raise ParserError(message)

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    command = next(each for each in serve.cmd_init() if each.name == "serve")
    parser.error = command.subparser_init(subparsers).error = fail
    given = parser.parse_args([command.name, *words])
    if given.model_tag is not None:
        given.model = given.model_tag
    command.validate(given)
    return given


def configure(given: argparse.Namespace) -> Any:
    """The VllmConfig that a server builds of it. Raises what vLLM raises, and TreeOptionError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    # Defaults of the scheduler depend on who asks.
    return AsyncEngineArgs.from_cli_args(given).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def asks_for_tree(given: argparse.Namespace) -> bool:
    """Whether a tree is meant, be it a bad one."""
    try:
        return tree_options(given) is not None
    except TreeOptionError:
        return True


# -- from VllmConfig to words ------------------------------------------------------------------------------------------


def of_tree(config: Any) -> dict[str, Any]:
    """What the finished configuration of a tree says."""
    speculative = tree_config(config)
    tree = speculative.tree
    is_v2 = config.use_v2_model_runner
    mode = tree_graph_mode(config)
    primer = None
    if "recycling" in tree.free_proposers and not is_v2:
        primer = find_primer(tree.primer, config.model_config.model, config.model_config.revision)
    return {
        **of_every(config),
        **of_options(tree),
        "tree_graphs": mode.decode_mode().name,
        "other_graphs": mode.mixed_mode().name,
        "graph_mode": mode.name,
        "lookahead_slots": speculative.num_lookahead_tokens,
        "placement": placement(tree, config.parallel_config.tensor_parallel_size),
        "primer": None if primer is None else str(primer),
        **of_library(tree),
        "refusals": attention_refusals(config),
    }


def of_library(tree: TreeOptions) -> dict[str, Any]:
    """What attends to the trees' rows, where it is not the backend's own kernel."""
    if tree.tree_attention == TRITON:
        return {}
    return {"tree_attention": f"{triton_attention.NAME} through {tree.tree_attention}"}


def placement(tree: TreeOptions, ranks: int) -> str | None:
    """Where SSMs are; None where there is one rank, or no SSM."""
    if ranks == 1 or not tree.ssms:
        return None
    if tree.ssm_placement == SHARDED:
        return f"{SHARDED} over {ranks} ranks"
    if tree.ssm_placement == REPLICATED:
        return f"{REPLICATED} on {ranks} ranks"
    return ", ".join(f"ssms[{index}] on rank {index % ranks}" for index in range(len(tree.ssms)))


def of_plain(config: Any) -> dict[str, Any]:
    """What the finished configuration without a tree says."""
    from vllm.platforms import current_platform

    mode, named = config.compilation_config.cudagraph_mode, config.attention_config.backend
    reason = runner_reason()
    if config.use_v2_model_runner != uses_runner_v2():
        features = config._get_v2_model_runner_unsupported_features()
        reason = ", ".join(features) or "what else was asked for"
    return {
        **of_every(config),
        "runner": runner_name(config.use_v2_model_runner),
        "runner_reason": reason,
        "attention": CPU_BACKEND if current_platform.is_cpu() else ON_LOADING if named is None else named.name,
        "graph_mode": mode.name,
        "other_graphs": mode.name,
    }


def of_every(config: Any) -> dict[str, Any]:
    """What is read alike with and without a tree."""
    scheduler = config.scheduler_config
    chosen = scheduler.scheduler_cls or scheduler.get_scheduler_cls()
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}",
        "is_async": bool(scheduler.async_scheduling),
    }


def tree_graph_mode(config: Any) -> Any:
    """What the V2 runner makes of the configured mode: the tree's backend has full graphs of steps of trees only.

    And none at all with a library, which reads the trees on the host.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if tree_config(config).tree.tree_attention != TRITON and mode.has_full_cudagraphs():
        splits = compilation.splitting_ops_contain_attention() or compilation.use_inductor_graph_partition
        is_piecewise = splits and compilation.mode == CompilationMode.VLLM_COMPILE
        return CUDAGraphMode.PIECEWISE if is_piecewise else CUDAGraphMode.NONE
    if mode.mixed_mode() != CUDAGraphMode.FULL:
        return mode
    splits = compilation.splitting_ops_contain_attention()
    return CUDAGraphMode.FULL_AND_PIECEWISE if splits else CUDAGraphMode.FULL_DECODE_ONLY


def attention_refusals(config: Any) -> tuple[str, ...]:
    """What vLLM will say of the tree's GPU backend when it builds the layers, as far as it is known before."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return ()
    from specinfer_vllm.attention.triton import TreeTritonAttentionBackend as Backend

    found, size, capability = [], config.model_config.get_head_size(), current_platform.get_device_capability()
    if not Backend.supports_head_size(size):
        found.append(NO_ATTENTION.format(f"heads of {size}"))
    if not Backend.supports_dtype(config.model_config.dtype):
        found.append(NO_ATTENTION.format(f"dtype {config.model_config.dtype}"))
    if capability is not None and not Backend.supports_compute_capability(capability):
        found.append(NO_ATTENTION.format(f"a device of compute capability {capability.as_version_str()}"))
    return tuple(found)


# -- why not -----------------------------------------------------------------------------------------------------------


def refused(given: argparse.Namespace) -> Iterator[str]:
    """Every setting that a tree cannot be combined with, not only the first one."""
    for each in (*launch.ARGUMENTS, *(() if uses_runner_v2() else launch.ARGUMENTS_V1)):
        try:
            each.check(given)
        except TreeOptionError as error:
            yield str(error)


def words_of(error: Exception) -> str:
    """One line: ours as it is, vLLM's with its kind."""
    if isinstance(error, TreeOptionError | ParserError):
        return str(error)
    if hasattr(error, "errors"):  # pydantic's own text repeats the whole input
        return "vllm: " + "; ".join(each["msg"].strip().splitlines()[0] for each in error.errors())
    lines = str(error).strip().splitlines() or [""]
    return f"vllm: {type(error).__name__}: {lines[0]}"


@contextmanager
def notes() -> Iterator[list[str]]:
    """What the tree's checks warn of meanwhile."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())
        return True

    launch.logger.addFilter(keep)  # vLLM configures logging again, which takes handlers away
    try:
        yield said
    finally:
        launch.logger.removeFilter(keep)
