# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and split counts of the kernels by architecture: a table, so that nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

MIN_TILE_ROWS = 16  # the smallest M of a tensor-core product
MAX_SPLITS = 64
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Chip:
    """What the table knows of an architecture.

    compute_units  streaming multiprocessors or compute units of the usual part
    shared_memory  bytes that one program may use
    max_rows       largest tile of packed query rows
    key_bytes      K and V bytes that one pipeline stage may hold; the number of keys per tile follows from it
    tall_keys      keys per tile of more than 32 rows and heads of 128: the number that does not spill
    stages         pipeline stages at 2 bytes per element; one less at 4
    measured       False: chosen by reasoning, not confirmed on the chip
    """

    compute_units: int
    shared_memory: int
    max_rows: int
    key_bytes: int
    tall_keys: int
    stages: int
    measured: bool = False


# Reasoned from what the compiler reports (no spills), not measured: a stage of K and V of 32 KiB is 64 keys of 128 bf16
# numbers; gfx942 has 64 KiB of LDS in all and loads through registers.
CHIPS = {
    "sm_80": Chip(compute_units=108, shared_memory=166_912, max_rows=64, key_bytes=32_768, tall_keys=32, stages=2),
    "sm_90": Chip(compute_units=132, shared_memory=232_448, max_rows=64, key_bytes=32_768, tall_keys=32, stages=3),
    "sm_100": Chip(compute_units=148, shared_memory=232_448, max_rows=64, key_bytes=32_768, tall_keys=64, stages=3),
    "gfx942": Chip(compute_units=304, shared_memory=65_536, max_rows=64, key_bytes=16_384, tall_keys=32, stages=1),
    # Few programs and small tiles: the interpreter runs one after another, and tests want many tiles from few keys.
    INTERPRETER: Chip(compute_units=4, shared_memory=1 << 30, max_rows=64, key_bytes=8_192, tall_keys=32, stages=1),
}
# Chips that take another's entry. The small parts have 99 KiB of shared memory: every plan must stay below it.
LIKE = {
    "sm_86": "sm_80",
    "sm_87": "sm_80",
    "sm_89": "sm_80",
    "sm_103": "sm_100",
    "gfx90a": "gfx942",
    "gfx950": "gfx942",
}


@dataclass(frozen=True)
class AttentionPlan:
    """How one call of tree attention is cut into programs.

    block_rows  packed rows (node x head of the group) per tile, a power of two >= 16
    block_keys  keys per tile, a power of two >= 16
    splits      parts that a request's keys are cut into, a power of two; 1 = no second stage
    """

    block_rows: int
    block_keys: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class VerifyPlan:
    """How the walk reads a row of logits: so many tokens at a time."""

    block: int
    num_warps: int


def architecture(device: torch.device) -> str:
    """Name of the device's entry: sm_NN, gfxNNN, or interpreter where there is no GPU."""
    return INTERPRETER if device.type == "cpu" else _gpu_architecture(device.index or 0)


@cache
def _gpu_architecture(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def chip(name: str) -> Chip:
    """The entry of an architecture, or the one of its nearest relative.

    An unknown NVIDIA chip takes the smallest NVIDIA entry, since it fits everywhere; any other one gfx942's.
    """
    name = LIKE.get(name, name)
    return CHIPS.get(name) or CHIPS["sm_80" if name.startswith("sm_") else "gfx942"]


@cache
def attention_plan(
    name: str,
    requests: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    max_rows: int,
    max_keys: int,
    element_size: int,
) -> AttentionPlan:
    """Tiles and splits for a call; depends on shapes only, so that a CUDA graph holds.

    max_rows, max_keys: query rows and keys of the largest request. element_size: bytes per K element.
    """
    part = chip(name)
    width = triton.next_power_of_2(head_dim)
    packed = triton.next_power_of_2(max(max_rows, 1) * group)
    wide = width * max(element_size, 2) >= 512 or element_size == 4  # more rows than that spill
    block_rows = max(MIN_TILE_ROWS, min(packed, part.max_rows // 2 if wide else part.max_rows))
    # FP8 is widened on its way to the product, hence at least 2 bytes.
    fitting = part.key_bytes // (2 * width * max(element_size, 2))
    tall = part.tall_keys if width >= 128 else 32
    block_keys = _clamp(fitting, 16, 32 if element_size == 4 else tall if block_rows > 32 else 64)
    programs = requests * kv_heads * -(-max_rows * group // block_rows)
    return AttentionPlan(
        block_rows=block_rows,
        block_keys=block_keys,
        splits=_splits(part, programs, max_keys, max(2 * block_keys, 8 * block_rows)),
        num_warps=8 if block_rows * width >= 64 * 64 else 4,
        num_stages=max(1, part.stages - (element_size == 4)),
    )


@cache
def verify_plan(name: str, vocab: int) -> VerifyPlan:
    """Block of the vocabulary: one program streams a whole row, so it takes many bytes at once. Reasoned, not measured.

    The interpreter takes small blocks, so that tests with few tokens go through several.
    """
    if name == INTERPRETER:
        return VerifyPlan(block=_clamp(triton.next_power_of_2(vocab) // 4, 4, 4096), num_warps=1)
    block = _clamp(triton.next_power_of_2(vocab), 256, 4096)
    return VerifyPlan(block=block, num_warps=8 if block >= 2048 else 4)


def _splits(part: Chip, programs: int, max_keys: int, least_keys: int) -> int:
    """Enough programs for two per compute unit, each with at least `least_keys` keys.

    With 8 keys per row, partial results (fp32, written and read once) stay below a quarter of the bytes of 16-bit K/V.
    """
    wanted = -(-2 * part.compute_units // max(programs, 1))
    limit = min(wanted, max(1, max_keys // least_keys), MAX_SPLITS)
    return 1 << (limit.bit_length() - 1)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
