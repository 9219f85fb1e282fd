# SPDX-License-Identifier: Apache-2.0
"""Compaction in Triton's interpreter against an indexed copy in torch that reads all before it writes one."""

import os
import sys

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import mapped  # noqa: E402

from specinfer_vllm.triton_kernels import kv_compact  # noqa: E402
from specinfer_vllm.triton_kernels.kv_compact import cache_geometry, compact  # noqa: E402
from specinfer_vllm.triton_kernels.reference import kv_compact as torch_reference  # noqa: E402

BLOCK, HEADS, DIM, BLOCKS = 16, 3, 24, 8


def filled(*shape, dtype=torch.float32):
    return (torch.randint(0, 120, shape)).to(dtype)


def nhd(dtype, dim):
    return filled(BLOCKS, 2, BLOCK, HEADS, dim, dtype=dtype).unbind(1)


def hnd(dtype, dim):
    return [cache.transpose(1, 2) for cache in filled(2, BLOCKS, HEADS, BLOCK, dim, dtype=dtype)]


def interleaved(dtype, dim):
    both = filled(BLOCKS, HEADS, BLOCK, 2 * dim, dtype=dtype).transpose(1, 2)
    return both[..., :dim], both[..., dim:]


def gaps(dtype, dim):
    return [filled(BLOCKS + 1, 2 * BLOCK, HEADS, dim + 3, dtype=dtype)[1:, ::2, :, :dim] for _ in range(2)]


def scales(dtype, dim):
    """One number per slot, and one per slot and head whose slots stand side by side."""
    return [filled(BLOCKS, BLOCK, dtype=dtype), filled(BLOCKS, HEADS, BLOCK, dtype=dtype).transpose(1, 2)]


LAYOUTS = {"NHD": nhd, "HND": hnd, "interleaved": interleaved, "gaps": gaps, "scales": scales}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64]


def whole(cache):
    """The bytes of all storage behind a tensor, gaps and neighbours included."""
    return torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())


def reference(cache, source, destination):
    """The storage's bytes after the moves, every source read before any destination is written."""
    copy = torch.as_strided(whole(cache).clone().view(cache.dtype), cache.shape, cache.stride(), cache.storage_offset())
    src, dst = source.reshape(-1), destination.reshape(-1)
    real = (src >= 0) & (dst >= 0)
    src, dst = src[real], dst[real]
    bits = copy.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()])
    bits[dst // BLOCK, dst % BLOCK] = bits[src // BLOCK, src % BLOCK]
    return whole(copy)


def paths(seed, requests=3, width=6):
    """Accepted paths of random trees: rising sources, destinations not behind them, ends padded with -1."""
    rng = np.random.default_rng(seed)
    source = torch.full((requests, width), -1)
    destination = torch.full((requests, width), -1)
    blocks = torch.from_numpy(rng.permutation(BLOCKS))
    for r in range(requests):
        count, start = int(rng.integers(0, width + 1)), int(rng.integers(0, 12))
        chosen = np.sort(rng.choice(16, count, replace=False))
        for index, into in ((start + chosen, source), (start + np.arange(count), destination)):
            index = torch.from_numpy(index)
            into[r, :count] = blocks[2 * r + index // BLOCK] * BLOCK + index % BLOCK
    return source, destination


def check(caches, source, destination):
    expected = [reference(cache, source, destination) for cache in caches]
    if caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr():
        both = expected[0].clone()
        changed = expected[1] != whole(caches[1])
        both[changed] = expected[1][changed]
        expected = [both, both]
    compact(cache_geometry(caches), source, destination)
    for cache, bytes_ in zip(caches, expected, strict=True):
        assert torch.equal(whole(cache), bytes_)


@pytest.mark.parametrize("dim", [24, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paths_move_in_every_layout_and_dtype(layout, dtype, dim):
    check(LAYOUTS[layout](dtype, dim), *paths(dim))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_torch_reference_gives_the_same(layout):
    for dtype in DTYPES:
        torch.manual_seed(0)
        caches = LAYOUTS[layout](dtype, 8)
        torch.manual_seed(0)
        twins = LAYOUTS[layout](dtype, 8)
        source, destination = paths(2)
        compact(cache_geometry(caches), source, destination)
        torch_reference.compact(twins, source, destination)
        for cache, twin in zip(caches, twins, strict=True):
            assert torch.equal(whole(cache), whole(twin))


@pytest.mark.parametrize("seed", range(12))
def test_random_paths(seed):
    check(nhd(torch.float32, DIM), *paths(seed, width=14))


def test_layers_of_different_shapes_and_their_scales_move_in_one_launch():
    caches = [*nhd(torch.bfloat16, 24), *hnd(torch.float32, 8), *scales(torch.float32, 0), *gaps(torch.uint8, 5)]
    source, destination = paths(3)
    expected = [reference(cache, source, destination)[_bytes_of(cache)] for cache in caches]
    compact(cache_geometry(caches), source, destination)
    for cache, bytes_ in zip(caches, expected, strict=True):
        assert torch.equal(whole(cache)[_bytes_of(cache)], bytes_)


def _bytes_of(cache):
    """Indices of the tensor's own bytes within its storage."""
    size = cache.element_size()
    elements = whole(cache).numel() // size
    index = torch.as_strided(torch.arange(elements), cache.shape, cache.stride(), cache.storage_offset()).reshape(-1)
    return (index[:, None] * size + torch.arange(size)).reshape(-1)


def test_a_long_path_shifts_by_one():
    """Every destination is the source of the move before: the hardest overlap that a path can have."""
    caches = nhd(torch.float32, DIM)
    source = torch.arange(1, 40)
    check(caches, source, source - 1)


def test_slots_beyond_one_program_move_too():
    cache = filled(2, BLOCK, 40, 64)
    check([cache, cache.clone()], torch.tensor([3, 20]), torch.tensor([1, 17]))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved without being backed")
def test_offsets_past_31_bits():
    """Blocks 2^30 elements apart; the slots' bytes stand past 2^32."""
    far = torch.as_strided(mapped(4 * 2**30, torch.float16), (4, BLOCK, HEADS, DIM), (2**30, HEADS * DIM, DIM, 1))
    far.copy_(filled(4, BLOCK, HEADS, DIM))
    expected = far.clone()
    expected[3, 1], expected[2, 0] = far[3, 7], far[3, 9]
    compact(cache_geometry([far]), torch.tensor([55, 57]), torch.tensor([49, 32]))
    assert torch.equal(far, expected)


def test_nothing_moves_without_moves():
    caches = nhd(torch.float32, DIM)
    before = whole(caches[0]).clone()
    geometry = cache_geometry(caches)
    none = torch.full((3, 5), -1)
    same = torch.arange(15).view(3, 5)
    for source, destination in ((none, same), (same, none), (same, same), (none[:, :0], none[:, :0]), (none[:0],) * 2):
        compact(geometry, source, destination)
        assert torch.equal(whole(caches[0]), before)


def test_an_empty_call_launches_nothing(monkeypatch):
    geometry = cache_geometry(nhd(torch.float32, DIM))
    monkeypatch.setattr(kv_compact, "_compact", None)
    compact(geometry, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_moves_against_the_contract_are_caught():
    """Negative control: a path that moves backwards reads slots after they were written."""
    cache = filled(2, BLOCK, HEADS, DIM)
    source = torch.arange(1, 9)
    with pytest.raises(AssertionError):
        check([cache, cache.clone()], source, source + 1)


def test_a_slot_in_more_than_runs_is_refused():
    cache = filled(BLOCKS, HEADS, 2, BLOCK, DIM).permute(0, 3, 2, 1, 4)[..., :20]
    with pytest.raises(ValueError, match="give K and V as two tensors"):
        cache_geometry([cache])


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "source"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), "one shape"),
    ],
)
def test_errors_name_what_is_at_fault(source, destination, named):
    with pytest.raises(ValueError, match=named):
        compact(cache_geometry(nhd(torch.float32, DIM)), source, destination)


def test_block_sizes_must_agree():
    with pytest.raises(ValueError, match="block size"):
        cache_geometry([filled(2, 16, 3, 8), filled(2, 32, 3, 8)])
