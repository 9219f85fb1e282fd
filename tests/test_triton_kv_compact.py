# SPDX-License-Identifier: Apache-2.0
"""Compaction in Triton's interpreter against an indexed copy in torch that reads all before it writes one."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import mapped  # noqa: E402

from specinfer_vllm.engine.gpu_kv_compaction import GpuKvCompaction  # noqa: E402
from specinfer_vllm.engine.kv_compaction import CpuKvCompaction  # noqa: E402
from specinfer_vllm.triton_kernels import kv_compact  # noqa: E402
from specinfer_vllm.triton_kernels.kv_compact import cache_geometry, compact  # noqa: E402
from specinfer_vllm.triton_kernels.reference import kv_compact as torch_reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_verify import Walk  # noqa: E402

BLOCK, HEADS, DIM, BLOCKS = 16, 3, 24, 8
POISON = 2**31 - 7


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


def moves(path, prefix_len, block_table, size=BLOCK):
    """(source, destination) slots of the paths' moves [moves] int64, worked out one by one."""
    found = []
    for rows, prefix, blocks in zip(path.tolist(), prefix_len.tolist(), block_table.tolist(), strict=False):
        for level, row in enumerate(rows):
            if row >= 0:
                pair = prefix + row - rows[0], prefix + level
                found.append([blocks[index // size] * size + index % size for index in pair])
    return torch.tensor(found, dtype=torch.int64).view(-1, 2).T


def reference(cache, *paths):
    """The storage's bytes after the moves, every source read before any destination is written."""
    copy = torch.as_strided(whole(cache).clone().view(cache.dtype), cache.shape, cache.stride(), cache.storage_offset())
    src, dst = moves(*paths, cache.shape[1])
    bits = copy.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()])
    size = cache.shape[1]
    bits[dst // size, dst % size] = bits[src // size, src % size]
    return whole(copy)


def paths(seed, requests=3, width=6):
    """(path, prefix_len, block_table) of accepted paths of random trees, two blocks each; unused memory is poison."""
    rng = np.random.default_rng(seed)
    path = torch.full((requests, width), -1)
    prefix_len = torch.from_numpy(rng.integers(0, 12, requests).astype(np.int32))
    table = torch.full((requests + 1, 5), POISON, dtype=torch.int32)
    table[:requests, :2] = torch.from_numpy(rng.permutation(BLOCKS)[: 2 * requests].reshape(-1, 2))
    for r in range(requests):
        nodes = np.sort(rng.choice(np.arange(1, 20), int(rng.integers(0, width)), replace=False))
        path[r, : len(nodes) + 1] = 20 * r + torch.from_numpy(np.array([0, *nodes]))
    return path, prefix_len, table[:, :4]


def one(path, prefix=0, blocks=range(BLOCKS)):
    """One request's path, by its nodes behind the root."""
    rows = torch.tensor([[0, *path]])
    return rows, torch.tensor([prefix], dtype=torch.int32), torch.tensor([list(blocks)], dtype=torch.int32)


def check(caches, *paths):
    expected = [reference(cache, *paths) for cache in caches]
    if caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr():
        both = expected[0].clone()
        changed = expected[1] != whole(caches[1])
        both[changed] = expected[1][changed]
        expected = [both, both]
    compact(cache_geometry(caches), *paths)
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
        given = paths(2)
        compact(cache_geometry(caches), *given)
        torch_reference.compact(twins, *given)
        for cache, twin in zip(caches, twins, strict=True):
            assert torch.equal(whole(cache), whole(twin))


@pytest.mark.parametrize("seed", range(12))
def test_random_paths(seed):
    check(nhd(torch.float32, DIM), *paths(seed, width=14))


def test_layers_of_different_shapes_and_their_scales_move_in_one_launch():
    caches = [*nhd(torch.bfloat16, 24), *hnd(torch.float32, 8), *scales(torch.float32, 0), *gaps(torch.uint8, 5)]
    given = paths(3)
    expected = [reference(cache, *given)[_bytes_of(cache)] for cache in caches]
    compact(cache_geometry(caches), *given)
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
    check(nhd(torch.float32, DIM), *one(range(2, 41)))
    check(nhd(torch.float32, DIM), *one(range(2, 41), prefix=11, blocks=(5, 2, 7, 0)))


def test_slots_beyond_one_program_move_too():
    cache = filled(2, BLOCK, 40, 64)
    check([cache, cache.clone()], *one([3, 20]))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved without being backed")
def test_offsets_past_31_bits():
    """Blocks 2^30 elements apart; the slots' bytes stand past 2^32."""
    far = torch.as_strided(mapped(4 * 2**30, torch.float16), (4, BLOCK, HEADS, DIM), (2**30, HEADS * DIM, DIM, 1))
    far.copy_(filled(4, BLOCK, HEADS, DIM))
    expected = far.clone()
    expected[3, 1], expected[2, 15] = far[3, 7], far[3, 9]
    path, prefix_len = torch.tensor([[0, 7], [8, 19]]), torch.tensor([0, 14], dtype=torch.int32)
    # The block tables' rows stand as far apart.
    tables = torch.as_strided(mapped(3 * 2**30, torch.int32), (2, 2), (2**31, 1))
    tables[0, 0], tables[1] = 3, torch.tensor([2, 3])
    compact(cache_geometry([far]), path, prefix_len, tables)
    assert torch.equal(far, expected)


def test_nothing_moves_without_moves():
    caches = nhd(torch.float32, DIM)
    before = whole(caches[0]).clone()
    geometry = cache_geometry(caches)
    none = torch.full((3, 5), -1)
    same = torch.arange(15).view(3, 5)
    short = torch.where(torch.arange(5) < 2, same, -1)
    prefix_len, table = torch.tensor([3, 0, 70], dtype=torch.int32), torch.full((3, 2), POISON, dtype=torch.int32)
    for path in (none, same, short, none[:, :0]):
        compact(geometry, path, prefix_len, table)
        assert torch.equal(whole(caches[0]), before)
    compact(geometry, none[:0], prefix_len[:0], table)
    assert torch.equal(whole(caches[0]), before)


def test_an_empty_call_launches_nothing(monkeypatch):
    geometry = cache_geometry(nhd(torch.float32, DIM))
    monkeypatch.setattr(kv_compact, "_compact", None)
    path, prefix_len, table = one([])
    compact(geometry, path[:0], prefix_len[:0], table)
    compact(geometry, path[:, :0], prefix_len, table)


def test_moves_against_the_contract_are_caught():
    """Negative control: a path that moves backwards reads slots after they were written."""
    cache = filled(2, BLOCK, HEADS, DIM)
    with pytest.raises(AssertionError):
        check([cache, cache.clone()], *one(range(8)))


@pytest.mark.parametrize("changed", ["path", "prefix", "block"])
def test_another_path_is_caught(changed):
    """Negative control: what the kernel overlooked would show."""
    caches = nhd(torch.float32, DIM)
    path, prefix_len, table = one([2, 5, 9], prefix=10, blocks=(5, 2, 7))
    expected = reference(caches[0], path, prefix_len, table)
    if changed == "path":
        path[0, 2] += 1
    elif changed == "prefix":
        prefix_len[0] += 1
    else:
        table[0, 1] = 3
    compact(cache_geometry(caches[:1]), path, prefix_len, table)
    assert not torch.equal(whole(caches[0]), expected)


def test_groups_of_layers_move_along_tables_of_their_own():
    """As in the engine: one launch for a group, whose blocks may have another size."""
    path, prefix_len, table = paths(5, width=9)
    halves = torch.tensor([[6, 1, 0, 4], [2, 9, 8, 3], [11, 5, 10, 7]], dtype=torch.int32)
    first, second = filled(BLOCKS, BLOCK, HEADS, DIM), filled(12, BLOCK // 2, HEADS, DIM)
    for caches, blocks in (([first, first.clone()], table), ([second, second.clone()], halves)):
        check(caches, path, prefix_len, blocks)


def test_the_engine_moves_the_same_on_a_cpu():
    """Its compaction for CPUs, which stands for the kernel where the V2 runner is tested, against the kernel."""
    content = torch.arange(BLOCK * 2 * DIM).view(BLOCK, 2 * DIM)  # plain: slot after slot, key before value
    layout = SimpleNamespace(key=content[:, :DIM], value=content[:, DIM:])
    made = [filled(BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(2)]
    before, twins = made[0].clone(), [each.clone() for each in made]
    path, prefix_len, table = paths(4, width=9)
    walked = Walk(path, path, (path >= 0).sum(1).int())
    GpuKvCompaction(made).compact(walked, prefix_len, table)
    CpuKvCompaction(twins, layout).compact(walked, prefix_len, table)
    assert all(map(torch.equal, made, twins)) and not torch.equal(made[0], before)


def test_a_slot_in_more_than_runs_is_refused():
    cache = filled(BLOCKS, HEADS, 2, BLOCK, DIM).permute(0, 3, 2, 1, 4)[..., :20]
    with pytest.raises(ValueError, match="give K and V as two tensors"):
        cache_geometry([cache])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"path": torch.zeros(3, 6, dtype=torch.int32)}, "path"),
        ({"path": torch.zeros(3, dtype=torch.int64)}, "path"),
        ({"path": torch.zeros(6, 3, dtype=torch.int64).T}, "path"),
        ({"prefix_len": torch.zeros(3, dtype=torch.int64)}, "prefix_len"),
        ({"prefix_len": torch.zeros(2, dtype=torch.int32)}, "prefix_len"),
        ({"prefix_len": torch.zeros(6, dtype=torch.int32)[::2]}, "prefix_len"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, "block_table"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int64)}, "block_table"),
        ({"block_table": torch.zeros(4, 3, dtype=torch.int32).T}, "block_table"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    given = dict(zip(("path", "prefix_len", "block_table"), paths(0), strict=True)) | changes
    with pytest.raises(ValueError, match=f"^{named}: "):
        compact(cache_geometry(nhd(torch.float32, DIM)), **given)


def test_block_sizes_must_agree():
    with pytest.raises(ValueError, match="block size"):
        cache_geometry([filled(2, 16, 3, 8), filled(2, 32, 3, 8)])
