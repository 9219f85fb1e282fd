# SPDX-License-Identifier: Apache-2.0
"""Every place of vLLM that we patch, override or call by a private name, in the order in which a start reaches them.

PLUGIN is checked when vLLM loads the plug-in: those modules are loaded then anyway. LAUNCH is checked once a user asks
for a tree, RUNNER in the worker that serves one: importing them in every process would cost seconds, and a runner's
module may touch the device. `specinfer doctor` checks all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from specinfer_vllm.patches import (
    cpu_attention,
    cpu_worker,
    engine_args,
    logits_processors,
    speculator,
    tensor_parallel,
    triton_attention,
)
from specinfer_vllm.patches.patch import Hook, Patch

SCHEDULER = "vllm.v1.core.sched.scheduler"
GRAMMAR = "vllm.v1.structured_output"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
V2_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
V2_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
V2_SAMPLE = "vllm.v1.worker.gpu.sample"

# What the plug-in replaces in every process; the other hooks are subclassed or called.
PATCHES: tuple[type[Patch], ...] = (*engine_args.PATCHES, *logits_processors.PATCHES)

PLUGIN: tuple[Hook, ...] = (
    *(patch.target for patch in PATCHES),
    cpu_attention.REGISTRY,
    cpu_attention.CACHED,
)

LAUNCH: tuple[Hook, ...] = (
    Hook(
        SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        "nodes that a grammar forbids stay in the tree: their siblings may be right",
    ),
    Hook(
        SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "the grammar walks each tree, not a chain",
    ),
    Hook(
        SCHEDULER,
        "Scheduler.update_draft_token_ids_in_output",
        ("self", "draft_token_ids", "scheduler_output"),
        "the nodes that a grammar walks are known only when a batch was scheduled asynchronously",
    ),
    Hook(
        GRAMMAR,
        "StructuredOutputManager._fill_bitmasks",
        ("self", "batch"),
        "one row's mask from the grammar's present state; engine/mask_layout.py knows both releases' rows",
    ),
    Hook(
        GRAMMAR,
        "StructuredOutputManager._get_constraint_bounds",
        ("self", "request", "spec_tokens"),
        "whether reasoning still holds the grammar back",
    ),
    Hook(
        f"{GRAMMAR}.backend_xgrammar",
        "XgrammarGrammar.rollback",
        ("self", "num_tokens"),
        "the grammar goes back one token where a branch ends",
    ),
    Hook(
        "vllm.v1.core.sched.output",
        "GrammarOutput",
        ("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"),
        "what get_grammar_bitmask returns",
    ),
    Hook(
        "vllm.v1.outputs",
        "DraftTokenIds",
        ("req_ids", "draft_token_ids"),
        "the topology travels to the scheduler in a subclass",
    ),
    Hook(
        CPU_ATTENTION,
        "CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        "rows of a tree see their own path only",
    ),
    Hook(
        CPU_ATTENTION,
        "CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata"),
        "the mask travels with the attention metadata",
    ),
)

RUNNER: tuple[Hook, ...] = (
    cpu_worker.RUNNER,
    *tensor_parallel.HOOKS,
    logits_processors.TreeLoadsEveryProcessor.target,
    Hook(
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "predict_bonus_token"),
        "sampling parameters are applied row by row",
    ),
    Hook(
        "vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ("self",), "the runner and the backend are chosen there"
    ),
    Hook(CPU_RUNNER, "CPUModelRunner._update_states", ("self", "scheduler_output"), "requests come and go"),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
        "a node's position is its depth, not its row",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner._build_attention_metadata",
        ("self", "*"),
        "the step's mask is handed to the layers",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "trees are walked, and accepted K/V moved into place",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner._bookkeeping_sync",
        ("self", "*"),
        "generators of unfinished prompts are wound back by an offset that a CPU's do not have",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids", "*"),
        "the next trees are drafted after bookkeeping",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner._input_fits_in_drafter",
        ("self", "common_attn_metadata"),
        "a tree is cut where it would pass max_model_len, upstream drafts nothing",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner.take_draft_token_ids",
        ("self",),
        "the topology goes to the scheduler with the drafts",
    ),
    Hook(
        CPU_RUNNER,
        "CPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config"),
        "SSMs find their layers, compaction the LLM's",
    ),
)

RUNNER_V2: tuple[Hook, ...] = (
    speculator.SPECULATOR,
    *tensor_parallel.HOOKS,
    *triton_attention.HOOKS,
    Hook(V2_RUNNER, "GPUModelRunner.load_model", ("self", "load_dummy_weights", "*"), "trees are walked, not rejected"),
    Hook(V2_RUNNER, "GPUModelRunner.add_requests", ("self", "scheduler_output"), "a new request finds a blank tree"),
    Hook(
        V2_RUNNER,
        "GPUModelRunner.prepare_attn",
        ("self", "input_batch"),
        "a node's position is its depth, not its row; the step's mask is handed to the layers",
    ),
    Hook(
        V2_RUNNER,
        "GPUModelRunner.prepare_dummy_attn",
        ("self", "input_batch", "*"),
        "graphs are captured over the trees' buffers",
    ),
    Hook(
        V2_RUNNER,
        "GPUModelRunner.postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "*"),
        "accepted K/V is moved into place before anything else reads it",
    ),
    Hook(
        V2_RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        ("self",),
        "the topology goes to the scheduler with the drafts of a batch that has a grammar",
    ),
    Hook(
        "vllm.v1.worker.gpu.spec_decode.ngram.speculator",
        "NgramGPUSpeculator.propose",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "*",
        ),
        "the next trees are drafted where every speculator drafts, and this one is a whole one",
    ),
    Hook(V2_SPECULATOR, "DraftModelSpeculator.load_model", ("self", "target_model"), "SSMs are loaded beside the LLM"),
    Hook(
        V2_GRAPHS,
        "CudaGraphManager.__init__",
        ("self", "vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        "SSMs' passes are captured by vLLM's own manager",
    ),
    Hook(
        V2_GRAPHS, "CudaGraphManager._init_candidates", ("self",), "numbers of requests that drafting is captured for"
    ),
    Hook(
        V2_GRAPHS,
        "CudaGraphManager.capture",
        ("self", "create_forward_fn", "progress_bar_desc"),
        "SSMs' passes are captured behind the LLM's, into the same pool",
    ),
    Hook(
        V2_GRAPHS,
        "CudaGraphManager.dispatch",
        ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
        "which of the SSMs' graphs holds a batch",
    ),
    Hook(V2_GRAPHS, "CudaGraphManager.run_fullgraph", ("self", "desc"), "one of the SSMs' graphs is replayed"),
    Hook(
        f"{V2_SAMPLE}.sampler",
        "Sampler.sample",
        (
            "self",
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "return_logprobs",
        ),
        "vLLM's own sampler chooses a token at every row",
    ),
    Hook(
        f"{V2_SAMPLE}.logprob",
        "compute_topk_scores",
        ("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state"),
        "logprobs of the emitted tokens, from the rows that emitted them",
    ),
    Hook(
        "vllm.v1.worker.gpu.input_batch",
        "get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
        "an unfinished prompt emits nothing",
    ),
)

ALL: tuple[Hook, ...] = tuple(dict.fromkeys((*PLUGIN, *LAUNCH, *RUNNER, *RUNNER_V2)))


def check(hooks: Iterable[Hook]) -> None:
    """Raise HookMissing for the first hook that is not as we know it."""
    for hook in hooks:
        hook.check()
