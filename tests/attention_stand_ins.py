# SPDX-License-Identifier: Apache-2.0
"""FlashInfer and xFormers as their sources describe them, in torch: as strict, as far as this project calls them.

Read in the wheels of PyPI. flashinfer-python 0.7.0.post1 (which vLLM 0.32.0 requires) and 0.7.4: prefill.py
(BatchPrefillWithPagedKVCacheWrapper.plan and run, _compute_page_mask_indptr), quantization/packbits.py
(segment_packbits) and data/include/flashinfer/attention/variants.cuh, where the kernel reads bit
`row * kv_len + key` of a request's mask, bytes little-endian. xformers 0.0.35: ops/fmha/__init__.py
(memory_efficient_attention_forward), common.py (Inputs.validate_inputs) and cutlass.py (_check_bias_alignment).
"""

import importlib.machinery
import sys
import types

import numpy as np
import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """A paged prefill. `plans` counts how often this one was planned."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and not use_cuda_graph
        assert backend in ("auto", "fa2")  # Hopper's FA3 takes no masks
        self.plans = 0

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        self.plans += 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32 and each.dim() == 1
        requests = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == requests + 1 and len(paged_kv_last_page_len) == requests
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and qo_indptr[0] == paged_kv_indptr[0] == 0
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        rows, keys = qo_indptr.diff(), (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert custom_mask.dtype == torch.bool and custom_mask.shape == (int((rows * keys).sum()),)
        parts = custom_mask.split((rows * keys).tolist())
        # segment_packbits(custom_mask, mask_indptr, bitorder="little"): each request begins at a byte of its own.
        self.masks = [np.packbits(part.numpy(), bitorder="little") for part in parts]
        self.rows, self.keys, self.pages = qo_indptr.tolist(), keys.tolist(), paged_kv_indices
        self.page_start, self.page_size = paged_kv_indptr.tolist(), page_size
        self.heads, self.scale, self.soft_cap = (num_qo_heads, num_kv_heads, head_dim_qk), sm_scale, logits_soft_cap
        self.dtypes = q_data_type, kv_data_type

    def run(self, q, paged_kv_cache):
        k_cache, v_cache = paged_kv_cache
        heads, kv_heads, head_dim = self.heads
        assert q.shape == (self.rows[-1], heads, head_dim) and q.stride(2) == 1
        assert k_cache.shape == v_cache.shape and k_cache.shape[1:] == (self.page_size, kv_heads, head_dim)
        assert k_cache.stride(3) == v_cache.stride(3) == 1 and k_cache.stride() == v_cache.stride()
        assert (q.dtype, k_cache.dtype) == self.dtypes
        out = torch.zeros(q.shape, dtype=q.dtype)
        for request, mask in enumerate(self.masks):
            first, end = self.rows[request : request + 2]
            kv_len = self.keys[request]
            pages = self.pages[self.page_start[request] : self.page_start[request + 1]].long()
            k, v = (cache[pages].flatten(0, 1)[:kv_len].float() for cache in (k_cache, v_cache))
            offset = torch.arange(end - first)[:, None] * kv_len + torch.arange(kv_len)
            see = (torch.from_numpy(mask)[offset // 8] >> (offset % 8)) & 1
            out[first:end] = attention(q[first:end], k, v, see.bool(), self.scale, self.soft_cap).to(q.dtype)
        return out


def memory_efficient_attention_forward(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """Of the CUTLASS operator, the one that takes a bias of any numbers."""
    batch, rows, heads, head_dim = query.shape
    assert key.shape == value.shape == (batch, key.shape[1], heads, head_dim), "heads are not broadcast"
    assert query.dtype == key.dtype == value.dtype == attn_bias.dtype
    assert attn_bias.shape == (batch, heads, rows, key.shape[1])
    alignment = 128 // torch.finfo(attn_bias.dtype).bits
    assert all(attn_bias.stride(d) % alignment == 0 for d in range(3)) and attn_bias.stride(3) <= 1
    assert all(each.stride(3) == 1 for each in (query, key, value)) and head_dim % 8 == 0
    scores = torch.einsum("brhd,bkhd->bhrk", query.float(), key.float()) * scale + attn_bias.float()
    return torch.einsum("bhrk,bkhd->brhd", scores.softmax(-1), value.float()).to(query.dtype).contiguous()


def attention(q, k, v, see, scale, soft_cap):
    """One request: q [rows, heads, head_dim]; k, v [keys, kv_heads, head_dim] float32; see [rows, keys] bool."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q.float(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(~see, -torch.inf).softmax(-1), v)


def install(monkeypatch) -> None:
    """Both stand-ins where Python looks for the libraries."""
    for name, values in {
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper},
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention_forward": memory_efficient_attention_forward},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(values, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
