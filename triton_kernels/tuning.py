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
class MlaPlan(AttentionPlan):
    """How one call of latent attention is cut into programs.

    part  numbers of a row that one product of scores takes, read again for it; 0 = the halves that are V too
    """

    part: int = 0


@dataclass(frozen=True)
class MlaTile:
    """What one height of tile of packed rows takes on a chip; see MlaPlan for part.

    resident  programs that a compute unit holds, by their registers and shared memory
    """

    keys: int
    num_warps: int
    num_stages: int
    resident: int = 1
    part: int = 0


@dataclass(frozen=True)
class VerifyPlan:
    """How the walk reads a row of logits: so many tokens at a time."""

    block: int
    num_warps: int


MLA_WIDTH = 512, 64  # latent_dim and rope_dim up to which the tiles below are known to fit
# By chip, numbers (16 bits, FP8 in the cache, fp32) and rows of the tile. Reasoned from what the compiler reports for
# 512 + 64, not measured.
# Rows: the accumulator is [rows, latent_dim] float32. 64 rows with a buffer spill on sm_80 and sm_90 (112 and 208 bytes
# per thread at least); on sm_100 they want more tensor memory than there is, and the compiler leaves a trap for a
# kernel. On gfx942 neighbouring programs run on dies that share no L2 cache, so that high tiles save more; 64 rows
# spill there with Triton 3.6.
# Stages: the block table makes the latents an indirect load, hence 5 stages are two buffers and 3 are one.
# FP8 is widened in registers and not buffered. fp32 is three TF32 products, taken in parts lest the operands spill.
MLA_TILES = {
    "sm_80": {
        "16-bit": {16: MlaTile(32, 4, 3, resident=2), 32: MlaTile(32, 8, 5)},
        "FP8": {16: MlaTile(32, 8, 3)},
        "fp32": {16: MlaTile(16, 8, 1, part=64)},
    },
    "sm_86": {  # 99 KiB of shared memory
        "16-bit": {16: MlaTile(32, 4, 3), 32: MlaTile(32, 8, 3)},
        "FP8": {16: MlaTile(32, 8, 3)},
        "fp32": {16: MlaTile(16, 8, 1, part=64)},
    },
    "sm_90": {
        "16-bit": {16: MlaTile(32, 4, 5, resident=2), 32: MlaTile(64, 8, 5)},
        "FP8": {16: MlaTile(32, 8, 3)},
        "fp32": {16: MlaTile(16, 8, 1, part=64)},
    },
    "gfx942": {
        "16-bit": {16: MlaTile(32, 4, 2), 32: MlaTile(16, 8, 2)},
        "FP8": {16: MlaTile(16, 4, 2), 32: MlaTile(16, 4, 2)},
        "fp32": {16: MlaTile(16, 4, 1, part=64), 32: MlaTile(16, 8, 1, part=64)},
    },
}
MLA_TILES |= {"sm_89": MLA_TILES["sm_86"], "sm_100": MLA_TILES["sm_90"]}
MLA_TILES[INTERPRETER] = dict.fromkeys(("16-bit", "FP8", "fp32"), {16: MlaTile(16, 4, 1), 32: MlaTile(16, 4, 1)})


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
        # Two programs per compute unit. With 8 keys per row, partial results (fp32, written and read once) stay below a
        # quarter of the bytes of 16-bit K/V.
        splits=_splits(-(-2 * part.compute_units // max(programs, 1)), max_keys, max(2 * block_keys, 8 * block_rows)),
        num_warps=8 if block_rows * width >= 64 * 64 else 4,
        num_stages=max(1, part.stages - (element_size == 4)),
    )


@cache
def mla_plan(
    name: str,
    requests: int,
    heads: int,
    latent_dim: int,
    rope_dim: int,
    max_rows: int,
    max_keys: int,
    query_size: int,
    cache_size: int,
) -> MlaPlan:
    """Tiles and splits for a call; depends on shapes only. query_size, cache_size: bytes per number.

    ValueError for rows wider than the table's tiles hold without spills.
    """
    if name != INTERPRETER and (latent_dim > MLA_WIDTH[0] or rope_dim > MLA_WIDTH[1]):
        raise ValueError(
            f"latent_dim, rope_dim: {latent_dim} + {rope_dim} on {name}: the tiles are chosen for up to"
            f" {MLA_WIDTH[0]} + {MLA_WIDTH[1]}, wider ones spill; give a plan of your own"
        )
    tiles = _mla_tiles(name)["fp32" if query_size == 4 else "FP8" if cache_size == 1 else "16-bit"]
    packed = max(max_rows, 1) * heads
    block_rows = next((rows for rows in tiles if rows >= packed), max(tiles))
    tile = tiles[block_rows]
    # Where a row's node and head are no shifts of its number, 64 keys spill.
    block_keys = tile.keys if heads & (heads - 1) == 0 else min(tile.keys, 32)
    programs = requests * -(-packed // block_rows)
    # As many programs as are resident together. Their partial results then stay in the L2 cache; with 4 keys per row of
    # a tile they are about the bytes of the latents that a tile reads.
    wanted = max(1, tile.resident * chip(name).compute_units // max(programs, 1))
    return MlaPlan(
        block_rows=block_rows,
        block_keys=block_keys,
        splits=_splits(wanted, max_keys, max(2 * block_keys, 4 * block_rows)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        part=min(tile.part, latent_dim, rope_dim),
    )


def _mla_tiles(name: str) -> dict[str, dict[int, MlaTile]]:
    """The entry of an architecture or of its nearest relative; unknown ones as in `chip`."""
    smallest = "sm_86" if name.startswith("sm_") else "gfx942"
    return MLA_TILES.get(name) or MLA_TILES[LIKE.get(name, smallest)]


@cache
def verify_plan(name: str, vocab: int) -> VerifyPlan:
    """Block of the vocabulary: one program streams a whole row, so it takes many bytes at once. Reasoned, not measured.

    16 tokens per thread: with other sizes some chip spills with Triton 3.6 or 3.9.
    The interpreter takes small blocks, so that tests with few tokens go through several.
    """
    if name == INTERPRETER:
        return VerifyPlan(block=_clamp(triton.next_power_of_2(vocab) // 4, 4, 4096), num_warps=1)
    return VerifyPlan(block=_clamp(triton.next_power_of_2(vocab), 256, 2048), num_warps=4)


@cache
def traversal_plan(name: str, vocab: int) -> VerifyPlan:
    """As verify_plan, for a program that holds a path in registers beside: 4 tokens per thread.

    With other sizes some chip spills with Triton 3.6 or 3.9.
    """
    if name == INTERPRETER:
        return VerifyPlan(block=_clamp(triton.next_power_of_2(vocab) // 2, 4, 4096), num_warps=1)
    return VerifyPlan(block=_clamp(triton.next_power_of_2(vocab), 256, 1024), num_warps=8)


def _splits(wanted: int, max_keys: int, least_keys: int) -> int:
    """The largest power of two of at most `wanted` splits with at least `least_keys` keys each."""
    limit = min(wanted, max(1, max_keys // least_keys), MAX_SPLITS)
    return 1 << (limit.bit_length() - 1)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
