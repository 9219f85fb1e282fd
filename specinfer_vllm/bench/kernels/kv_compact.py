# SPDX-License-Identifier: Apache-2.0
"""Compaction of accepted paths: checked against triton_kernels/reference/kv_compact.py, then timed.

    python -m specinfer_vllm.bench.kernels.kv_compact [--tiny]

Timed: the moves, the same moves as one indexed copy per cache in torch with its indices ready, and paths that lie where
they belong, which are read and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.kv_compact import cache_geometry, compact
from specinfer_vllm.triton_kernels.reference import kv_compact as reference

BLOCK_SIZE = 16
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class Size:
    """What is timed: `moves` slots of each request's path, in K and V of every layer."""

    requests: int
    moves: int
    layers: int
    heads: int
    dim: int


FULL = Size(requests=64, moves=3, layers=32, heads=8, dim=128)
TINY = Size(requests=2, moves=3, layers=1, heads=2, dim=16)


def _bytes(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random bits as numbers of some dtype, NaN among them."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator).view(dtype)


def caches(
    layout: str, blocks: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    """K and V [blocks, BLOCK_SIZE, heads, dim] of one layer as views of one tensor in a layout, and their scales.

    The scales are float32, [blocks, BLOCK_SIZE] and [blocks, BLOCK_SIZE, heads] with the slots side by side.
    """
    if layout == "NHD":
        pair = _bytes((2, blocks, BLOCK_SIZE, heads, dim), dtype, device, seed).unbind(0)
    elif layout == "HND":
        pair = _bytes((blocks, 2, heads, BLOCK_SIZE, dim), dtype, device, seed).transpose(2, 3).unbind(1)
    else:
        both = _bytes((blocks, heads, BLOCK_SIZE, 2 * dim), dtype, device, seed).transpose(1, 2)
        pair = both[..., :dim], both[..., dim:]
    scales = _bytes((blocks, heads + 1, BLOCK_SIZE), torch.float32, device, seed + 1).transpose(1, 2)
    return [*pair, scales[..., 0], scales[..., 1:]]


def paths(moves: Sequence[int], width: int, blocks: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(path, prefix_len) of requests that so many slots of move: the root, then as many nodes, -1 behind.

    blocks [requests, 2]: the block tables, on whose device they come; a path starts in one block and may end in the
    other. Its first node is never the tree's first, so that none is in place.
    """
    generator = torch.Generator().manual_seed(seed)
    path = torch.full((len(moves), width), -1)
    prefix_len = torch.randint(0, BLOCK_SIZE - 1, (len(moves),), generator=generator, dtype=torch.int32)
    for request, count in enumerate(moves):
        nodes = (torch.randperm(BLOCK_SIZE - 1, generator=generator)[:count] + 2).sort().values
        path[request, 0] = root = request * 2 * BLOCK_SIZE
        path[request, 1 : count + 1] = root + nodes
    return path.to(blocks.device), prefix_len.to(blocks.device)


def slots(path: torch.Tensor, prefix_len: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, destination) of paths that are equally long [requests * moves] int64."""
    level = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
    index = prefix_len[:, None] + torch.stack([path[:, 1:] - path[:, :1], level])
    block = blocks.expand(2, -1, -1).gather(2, index // BLOCK_SIZE).long()
    source, destination = (block * BLOCK_SIZE + index % BLOCK_SIZE).flatten(1)
    return source, destination


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind a view."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _mismatches(layout: str, dtype: torch.dtype, dim: int, tiny: bool, device: torch.device) -> int:
    requests, heads = (3, 2) if tiny else (33, 8)
    made, expected = (caches(layout, 2 * requests, heads, dim, dtype, device) for _ in range(2))
    blocks = torch.randperm(2 * requests, generator=torch.Generator().manual_seed(1)).view(-1, 2).int().to(device)
    given = *paths([r * 5 % 8 for r in range(requests)], 8, blocks), blocks
    compact(cache_geometry(made), *given)
    reference.compact(expected, *given)
    return sum(int((_storage(a) != _storage(b)).sum()) for a, b in zip(made, expected, strict=True))


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Bytes of all storage that differ from the reference's, of which none may."""
    for layout in ("NHD", "HND", "interleaved"):
        for dtype in DTYPES[:2] if tiny else DTYPES:
            for dim in (16,) if tiny else (128, 7):
                name = f"{layout}, {str(dtype).removeprefix('torch.')}, {dim} per head"
                yield measure.checked(name, 0, _mismatches, layout, dtype, dim, tiny, device)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch; the bytes that count are those of the moved slots, read and written."""
    size = TINY if tiny else FULL
    slot = size.heads * size.dim * 2  # bf16
    moved = 2 * size.requests * size.moves * 2 * size.layers * slot
    copies = measure.copies_for(moved // 2, device)
    blocks = 2 * size.requests * copies
    if 2 * size.layers * blocks * BLOCK_SIZE * slot > 0.9 * measure.free_bytes(device):
        yield {"case": "all", "us": measure.NO_MEMORY}
        return
    shape = (blocks, BLOCK_SIZE, size.heads, size.dim)
    layers = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2 * size.layers)]
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).view(copies, -1, 2).int().to(device)
    moves = [size.moves] * size.requests
    given = [(*paths(moves, size.moves + 1, each, seed), each) for seed, each in enumerate(tables)]
    geometry = cache_geometry(layers)
    flat = [layer.flatten(0, 1) for layer in layers]
    path, *where = given[0]
    in_place = path[:, :1] + torch.arange(size.moves + 1, device=device)
    cases = {
        "compact": ([partial(compact, geometry, *each) for each in given], moved),
        "torch, indexed": ([partial(_indexed, flat, *slots(*each)) for each in given], moved),
        "compact, nothing to move": ([partial(compact, geometry, in_place, *where)], None),
    }
    for case, (calls, counted) in cases.items():
        found = measure.attempted(deadline, measure.graph_time, calls)
        yield {"case": case} | measure.time_cells(found, counted, device)


def _indexed(caches: list[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """The moves in torch; caches [slots, heads, dim]."""
    for cache in caches:
        cache[destination] = cache[source]


if __name__ == "__main__":
    measure.main(check, times, __doc__)
