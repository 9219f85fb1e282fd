# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend with a kernel of our own for tree rows; all other rows take vLLM's.

The option tree_attention lets another library attend to the tree's rows, see libraries.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from specinfer_vllm.attention.libraries import LIBRARIES, AttentionKind, Library
from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.attention.tree_call import TreeCall
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.triton_kernels.tree_attention import FP8, plan_for, tree_attention, workspace_size
from specinfer_vllm.triton_kernels.tuning import AttentionPlan

MAX_HEAD_SIZE = 256  # the largest whose registers are checked, see tests/test_triton_compile.py
# Fields of CommonAttentionMetadata by what their first dimension counts.
PER_REQUEST = (
    "seq_lens",
    "block_table_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
)
PER_ROW = ("slot_mapping", "positions")
CACHED = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


@dataclass
class TreePass:
    """A step's trees with what the layers of one metadata group share: made once per step.

    batch        the trees; its buffers may be longer than the batch
    query_start  [tree requests + 1] int32        as in the batch
    prefix_len   [tree requests] int32            as in the batch
    block_table  [tree requests, blocks] int32    physical blocks that hold each tree request's keys
    max_keys     upper bound of one request's keys
    covers_all   no query row lies outside the trees
    workspaces   the builder's, by number of elements
    kept         the builder's, for a library that attends in our kernel's place; shared: the same, for this step
    """

    batch: TreeBatch
    query_start: torch.Tensor
    prefix_len: torch.Tensor
    block_table: torch.Tensor
    max_keys: int
    covers_all: bool
    workspaces: dict[int, torch.Tensor]
    kept: dict[Hashable, object]
    shared: dict[Hashable, object] = field(default_factory=dict)
    launches: dict[torch.dtype, tuple[AttentionPlan, torch.Tensor | None]] = field(default_factory=dict)

    def launch(self, query: torch.Tensor, key: torch.Tensor) -> tuple[AttentionPlan, torch.Tensor | None]:
        """Plan and workspace, from shapes alone: chosen by the group's first layer, reused by the others.

        query  [rows, heads, head_dim]
        key    [blocks, block_size, kv_heads, head_dim]
        """
        if query.dtype not in self.launches:
            plan = plan_for(query, key, self.block_table, self.batch.max_rows, self.max_keys)
            size = workspace_size(*query.shape, plan.splits)
            self.launches[query.dtype] = plan, self._workspace(size, query.device) if size else None
        return self.launches[query.dtype]

    def _workspace(self, size: int, device: torch.device) -> torch.Tensor:
        """A buffer of at least so many float32 elements; kept for good, since CUDA graphs hold its address.

        Powers of two: the plans keep the largest at tens of MiB, and all of them together at twice that.
        """
        size = next_power_of_2(size)
        if size not in self.workspaces:
            self.workspaces[size] = torch.empty(size, dtype=torch.float32, device=device)
        return self.workspaces[size]


class TreeTritonAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """vLLM's builder; hangs a TreePass on what it builds, whose other fields then describe the remaining requests.

    tree  set by the runner before each build; None = no trees. A CUDA graph holds the addresses and the host numbers of
          the batch it was captured with: replays need a batch of the same buffers, requests, rows and max_rows. Which
          nodes see which, and each request's length, may differ.
    """

    # A full graph replays tree rows only; one of mixed batches would bake in where the trees end.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    tree: TreeBatch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM sizes it by the LLM's heads; an SSM's may be larger, and its kernel would write past the end.
        *others, room = self.softmax_segm_output.shape
        if (wanted := next_power_of_2(self.kv_cache_spec.head_size)) > room:
            self.softmax_segm_output = self.softmax_segm_output.new_empty(*others, wanted)
        self.workspaces: dict[int, torch.Tensor] = {}
        self.kept: dict[Hashable, object] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """As upstream; never with a library, which reads the trees on the host: vLLM then captures between layers."""
        if library_of(vllm_config) is not None:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        """As upstream, for the requests without a tree when there are any; no host sync."""
        common, tree = common_attn_metadata, self.tree
        if tree is None or not tree.num_requests:
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.tree = None
            return metadata
        covers_all = tree.num_requests == common.num_reqs
        metadata = super().build(common_prefix_len, common if covers_all else without_trees(common, tree), fast_build)
        metadata.tree = TreePass(
            batch=tree,
            query_start=tree.query_start[: tree.num_requests + 1],
            prefix_len=tree.prefix_len[: tree.num_requests],
            block_table=common.block_table_tensor[: tree.num_requests],
            # Plans are remembered per bound: a power of two keeps them few while requests grow.
            max_keys=next_power_of_2(common.max_seq_len),
            covers_all=covers_all,
            workspaces=self.workspaces,
            kept=self.kept,
        )
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TritonAttentionMetadata:
        """As upstream, which shortens the sequences: empties the tree batch's prefixes. The tree covers all or nothing.

        Raises ValueError for a batch with trees that has other requests too.
        """
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if metadata.tree is not None:
            if not metadata.tree.covers_all:
                raise ValueError(
                    f"tree: {self.tree.num_requests} of {common_attn_metadata.num_reqs} requests have one; a CUDA graph"
                    " is captured for batches in which all have, or none"
                )
            metadata.tree.prefix_len.zero_()
        return metadata


def library_of(vllm_config: VllmConfig | None) -> Library | None:
    """What attends to the tree's rows in our kernel's place, by the option tree_attention; None = our kernel."""
    config = None if vllm_config is None else tree_config(vllm_config)
    return None if config is None else LIBRARIES.get(config.tree.tree_attention)


def without_trees(common: CommonAttentionMetadata, tree: TreeBatch) -> CommonAttentionMetadata:
    """The metadata of the requests behind the trees', as if they were the batch."""
    requests, rows = tree.num_requests, tree.num_rows
    starts = common.query_start_loc_cpu[requests:]
    changes: dict[str, Any] = dict.fromkeys(name for name in CACHED if hasattr(common, name))
    for names, count in ((PER_REQUEST, requests), (PER_ROW, rows)):
        for name in names:
            values = getattr(common, name, None)
            if values is not None:
                changes[name] = values[count:]
    if isinstance(common.causal, torch.Tensor):
        changes["causal"] = common.causal[requests:]
    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - rows,
        query_start_loc_cpu=starts - rows,
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - rows,
        # Not the batch's, which is a tree's: vLLM cuts single rows into more programs than longer ones.
        max_query_len=int(np.diff(starts.numpy()).max()),
        **changes,
    )


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """Tree rows: one masked pass of our kernel over prefix and tree, or of a library. Other rows: as upstream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # our kernel reads FP8 keys, not FP8 queries
        self.window = self.sliding_window[0] + 1  # 0 = none, as is a soft cap of 0
        self.soft_cap = float(self.logits_soft_cap)
        # NaN until the weights are there, since sinks are weights.
        self.tree_sinks = None if self.sinks is None else torch.full_like(self.sinks, float("nan"), dtype=torch.float32)
        config = get_current_vllm_config_or_none()
        self.library = library_of(config)
        self.model_config = None if config is None else config.model_config

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As upstream; keeps the sinks in the kernel's dtype, in place, for CUDA graphs hold the address."""
        super().process_weights_after_loading(act_dtype)
        if self.tree_sinks is not None:
            self.tree_sinks.copy_(self.sinks.detach())

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernel writes the query's dtype only."""
        return False

    def check(self) -> None:
        """Raise NotImplementedError for a kind of attention the tree kernel does not know; called before serving."""
        model = self.model_config
        quantised = is_quantized_kv_cache(self.kv_cache_dtype)
        unknown = {
            "alibi_slopes": self.alibi_slopes is not None,
            f"attn_type {self.attn_type!r}": self.attn_type != AttentionType.DECODER,
            "chunks with lookback": self.chunk_lookback > -1,
            "K/V scales per token and head": self._is_per_token_head_quant,
            f"K/V in {self.fp8_dtype}": quantised and self.fp8_dtype not in FP8,
            f"heads of {self.head_size}": self.head_size > MAX_HEAD_SIZE,
            "tokens of an image that see each other": model is not None and model.is_mm_prefix_lm,
            "a reference sliding window": model is not None and model.rswa_window is not None,
        }
        for name, is_used in unknown.items():
            if is_used:
                raise NotImplementedError(
                    f"speculative_config.method: 'tree' cannot verify this LLM yet, whose attention uses {name}; "
                    "use another method"
                )
        if self.library is not None and (names := self.library.unknown(self.kind())):
            raise NotImplementedError(
                f"speculative_config.tree_attention: {self.library.name!r} does not know {', '.join(names)}, which this"
                " LLM or an SSM uses; use tree_attention='triton'"
            )

    def kind(self) -> AttentionKind:
        """What a library is asked about."""
        return AttentionKind(
            head_size=self.head_size,
            dtype=None if self.model_config is None else self.model_config.dtype,
            has_sinks=self.sinks is not None,
            has_soft_cap=self.soft_cap > 0,
            is_quantised=is_quantized_kv_cache(self.kv_cache_dtype),
            is_amd=current_platform.is_rocm(),
            capability=current_platform.get_device_capability(),
        )

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        """As upstream for all rows but the tree's."""
        tree: TreePass | None = getattr(attn_metadata, "tree", None)
        scales = output_scale, output_block_scale
        if tree is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        self.tree_forward(layer, query, kv_cache, tree, output)
        if not tree.covers_all:
            rest = slice(tree.batch.num_rows, None)
            super().forward(layer, query[rest], key[rest], value[rest], kv_cache, attn_metadata, output[rest], *scales)
        return output

    def tree_forward(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreePass, output: torch.Tensor
    ) -> None:
        """Write the tree rows of `output`.

        query, output  [rows, heads, head_dim]; the trees' rows are the first
        kv_cache       [blocks, kv_heads, block_size, 2 * head_dim], any strides
        """
        batch = tree.batch
        query, output = query[: batch.num_rows], output[: batch.num_rows]
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        k_scale = v_scale = None
        if is_quantized_kv_cache(self.kv_cache_dtype):
            key, value = key.view(self.fp8_dtype), value.view(self.fp8_dtype)
            k_scale, v_scale = layer._k_scale, layer._v_scale
        arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "block_table": tree.block_table,
            "query_start": tree.query_start,
            "prefix_len": tree.prefix_len,
            "max_rows": batch.max_rows,
            "max_keys": tree.max_keys,
            "scale": self.scale,
            "ancestors": batch.ancestors,
            "depth": batch.depth,
            "tree_start": batch.tree_start,
            "query_depth": batch.row_depth,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "sinks": self.tree_sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "output": output,
        }
        if self.library is not None:
            self.library.attend(TreeCall(**arguments, shared=tree.shared, kept=tree.kept))
            return
        plan, workspace = tree.launch(query, key)
        tree_attention(**arguments, workspace=workspace, plan=plan)


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Chosen by its name, see patches/triton_attention.py; says no to what the tree kernel does not know."""

    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        """The name that `attention_config.backend` takes."""
        return "TREE_TRITON"

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        """The layers' implementation."""
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return TreeTritonAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to the largest that is known to fit the kernel's tiles."""
        return super().supports_head_size(head_size) and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Trees are decoded."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_non_causal(cls) -> bool:
        """A node sees its ancestors only."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """The kernel knows no ranges that see each other."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """The kernel knows one window for all keys."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """The kernel knows no ALiBi."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """How a request's keys are split depends on the batch."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The other rows' longest request is read from the host's lengths."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """The kernel's tiles are chosen for Ampere and later, and for AMD's CDNA 2 and later (gfx90a is 9.0)."""
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """The reason why a combination does not work, None where it does."""
        named = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype, dtype)
        if named != dtype:
            return f"tree attention wants K/V in the model's dtype or FP8, not {kv_cache_dtype} with {dtype}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)
