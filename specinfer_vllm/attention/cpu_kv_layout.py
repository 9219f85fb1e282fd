# SPDX-License-Identifier: Apache-2.0
"""Where a token's key and value elements lie inside a block of vLLM's CPU KV cache.

The CPU kernels pack blocks differently per instruction set (csrc/cpu/cpu_attn_*.hpp): with `vec` keys are transposed
[head_dim, block] and values are [block, head_dim]; AMX, NEON and others interleave. Instead of repeating those rules, a
probe block is written through the kernel's own store and read back, so every packing that is a plain permutation works.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops


@dataclass(frozen=True)
class CpuKvLayout:
    """Element offsets inside one (block, head) interior of 2 * block_size * head_dim elements.

    key    [block_size, head_dim] int64
    value  [block_size, head_dim] int64
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key.shape[0]

    @property
    def is_transposed_key(self) -> bool:
        """Whether keys are [head_dim, block] and values [block, head_dim], the packing the fast path reads in place."""
        block_size, head_dim = self.key.shape
        elements = torch.arange(block_size * head_dim)
        return torch.equal(self.key, elements.view(head_dim, block_size).T) and torch.equal(
            self.value, elements.view(block_size, head_dim) + block_size * head_dim
        )

    @classmethod
    def probe(cls, block_size: int, head_dim: int, dtype: torch.dtype, isa: str) -> CpuKvLayout:
        """Write numbered elements through vLLM's store and find them again.

        Two digits of base 256 are written one after another: every dtype of a KV cache holds 0..255 exactly.
        Raises ValueError when the packing is no permutation (quantised caches), so it cannot be moved.
        """
        count = block_size * head_dim
        numbers = torch.arange(2 * count)
        digits = [_store(numbers % 256, block_size, head_dim, dtype, isa)]
        digits.append(_store(numbers // 256, block_size, head_dim, dtype, isa))
        found = digits[0].to(torch.int64) + 256 * digits[1].to(torch.int64)
        offsets = torch.full((2 * count,), -1)
        if found.numel() != 2 * count or not torch.equal(found.sort().values, numbers):
            raise ValueError(
                f"kv_cache_dtype: the packing of {dtype} ({isa}) is no permutation of the stored elements, so accepted "
                "nodes cannot be moved; use kv_cache_dtype='auto'"
            )
        offsets[found] = numbers
        return cls(key=offsets[:count].view(block_size, head_dim), value=offsets[count:].view(block_size, head_dim))


@functools.cache
def _probed(block_size: int, head_dim: int, dtype: torch.dtype, isa: str) -> CpuKvLayout:
    return CpuKvLayout.probe(block_size, head_dim, dtype, isa)


def layout_of(layer: Any, kv_cache: torch.Tensor) -> CpuKvLayout:
    """The packing of an attention layer's cache; layers alike are probed once. Raises ValueError as `probe`."""
    block_size, content = kv_cache.shape[2:]
    return _probed(block_size, content // 2, kv_cache.dtype, layer.isa)


def _store(numbers: torch.Tensor, block_size: int, head_dim: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """One block's interior, flat, after the kernel stored `numbers` as its keys and then its values."""
    block = torch.zeros(1, 1, block_size * 2, head_dim, dtype=dtype)
    key_cache, value_cache = block.chunk(2, dim=2)
    key, value = numbers.to(dtype).view(2, block_size, 1, head_dim)
    slots = torch.arange(block_size)
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0
    )
    return block.flatten()
