# SPDX-License-Identifier: Apache-2.0
"""A step's counters in Triton's interpreter against their reference, and as the V2 runner's stats show them."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import random_tree  # noqa: E402

from specinfer_vllm.engine.device_stats import DeviceStats  # noqa: E402
from specinfer_vllm.triton_kernels import tree_counts  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_counts as reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_counts import BLOCK, MAX_OWNERS, SUMS, CountedTrees, count  # noqa: E402

POISON = 2**31 - 7
# Rows of each request, and proposers.
STEPS = {
    "one root": ([1], 1),
    "roots only": ([1, 1, 1], 2),
    "a tree behind a root": ([1, 9], 2),
    "a root behind a tree": ([9, 1], 2),
    "requests without rows": ([0, 5, 0, 1, 0], 3),
    "trees of one size": ([9] * 5, 2),
    "no proposers": ([7, 1, 12], 0),
    "all bits": ([9, 30], MAX_OWNERS),
    "edges of a block": ([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2], 5),
    "a large tree": ([1025, 3], 3),
    "many requests": ([4, 1, 2] * 50, 2),
}


def step(sizes, seed, placeholders=0.2):
    """(emitted, trees) of a step: random trees with rows that hold no node, random paths; unused memory is poison."""
    rng = np.random.default_rng(seed)
    start = np.cumsum([0, *sizes]).astype(np.int32)
    # As behind a batch whose graph is larger; only a row of the requests may be counted.
    tokens, owner = (np.full(start[-1] + 5, POISON, np.int32) for _ in range(2))
    paths = []
    for first, rows in zip(start, sizes, strict=False):
        parent = random_tree(rng, rows)
        real = rng.random(rows) >= placeholders
        real[:1] = False
        tokens[first : first + rows] = np.where(real, rng.integers(0, 50, rows), -1)
        owner[first : first + rows] = np.where(real, rng.integers(0, 2**31, rows), 0)
        path, node = [], int(rng.integers(0, rows)) if rows else -1
        while node >= 0:
            path, node = [first + node, *path], parent[node]
        paths.append(path)
    width = max(map(len, paths), default=0) + 1
    path = np.full((len(sizes) + 2, width), POISON, np.int64)
    for request, rows in enumerate(paths):
        path[request] = [*rows, *[-1] * (width - len(rows))]
    emitted = np.full(len(sizes) + 3, POISON, np.int32)
    emitted[: len(sizes)] = [len(rows) * int(rng.random() < 0.8) for rows in paths]
    given = CountedTrees(*map(torch.from_numpy, (path[: len(sizes)], start, tokens, owner)))
    return torch.from_numpy(emitted)[: len(sizes)], given


def sums(owners, value=0):
    return torch.full((len(SUMS),), value), torch.full((2, owners), value)


def both(steps, owners, value=0):
    """What the kernel and the reference make of some steps."""
    made, expected = sums(owners, value), sums(owners, value)
    for each in steps:
        count(*made, *each)
        reference.count(*expected, *each)
    return made, expected


def check_equal(made, expected):
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)), f"{made} is not {expected}"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_the_kernel_counts_like_the_reference(name, seed):
    sizes, owners = STEPS[name]
    check_equal(*both([step(sizes, seed)], owners))


def test_the_steps_of_these_tests_have_something_to_count():
    made, _ = both([step(sizes, 0) for sizes, _ in STEPS.values()], MAX_OWNERS)
    assert made[0].min() >= 5 and made[1].min() >= 20
    assert made[0][SUMS.index("moved")] < made[0][SUMS.index("accepted")] < made[0][SUMS.index("nodes")]


def test_a_step_worked_out_by_hand():
    """Request 0 has a tree and accepts its second and fourth node; 1 has no tree; 2 has one, and its prompt goes on."""
    tokens = torch.tensor([-1, 5, 6, 7, 8, -1, -1, 9, -1], dtype=torch.int32)
    owner = torch.tensor([0, 1, 2, 3, 2, 0, 0, 1, 0], dtype=torch.int32)
    path = torch.tensor([[0, 2, 4, -1], [5, -1, -1, -1], [6, 7, -1, -1]])
    trees = CountedTrees(path, torch.tensor([0, 5, 6, 9], dtype=torch.int32), tokens, owner)
    (found, owned), expected = both([(torch.tensor([3, 1, 0], dtype=torch.int32), trees)], 2)
    named = dict(zip(SUMS, found.tolist(), strict=True))
    counts = {"steps": 1, "request_steps": 2, "tokens": 4, "drafted_steps": 2, "nodes": 5, "accepted": 3, "moved": 2}
    assert named == counts
    assert owned.tolist() == [[3, 3], [1, 2]]
    check_equal((found, owned), expected)


def test_steps_add_up_with_and_without_trees():
    """Beyond 31 bits too."""
    steps = [step([5, 1, 9], seed) for seed in range(4)]
    mixed = [each if number % 2 else (each[0], None) for number, each in enumerate(steps)]
    made, expected = both([*steps, *mixed], 3, 2**40)
    check_equal(made, expected)
    assert made[0][0] == 2**40 + 8


def test_a_step_without_trees_leaves_their_counters():
    emitted = torch.tensor([1, 0, 1, 2], dtype=torch.int32)
    (found, owned), expected = both([(emitted, None)], 2, 7)
    assert found.tolist() == [8, 10, 11, 7, 7, 7, 7] and (owned == 7).all()
    check_equal((found, owned), expected)


def test_a_step_that_samples_nothing_is_none():
    for requests in (1, 3, BLOCK + 6):
        (found, _), _ = both([(torch.zeros(requests, dtype=torch.int32), None)], 1)
        assert not found.any()


def test_emitted_tokens_are_counted_in_any_block_of_requests():
    emitted = torch.zeros(3 * BLOCK, dtype=torch.int32)
    for request in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
        emitted[request] = 2
    (found, _), expected = both([(emitted, None)], 1)
    assert found[:3].tolist() == [1, 4, 8]
    check_equal((found, _), expected)


def test_a_longest_path_is_counted_to_its_end():
    chain = np.arange(2 * BLOCK + 3)
    lists = torch.from_numpy(np.where(chain, 4, -1).astype(np.int32)), torch.from_numpy((chain > 0).astype(np.int32))
    trees = CountedTrees(torch.from_numpy(chain)[None], torch.tensor([0, len(chain)], dtype=torch.int32), *lists)
    made, expected = both([(torch.tensor([len(chain)], dtype=torch.int32), trees)], 1)
    assert made[0][3:].tolist() == [1, len(chain) - 1, len(chain) - 1, 0]
    check_equal(made, expected)


def test_neighbours_of_the_sums_stay():
    whole = torch.full((len(SUMS) + 2,), 5), torch.full((4, 3), 5)
    made, expected = (whole[0][1:-1], whole[1][1:3]), sums(3, 5)
    given = step([9, 4], 0)
    count(*made, *given)
    reference.count(*expected, *given)
    check_equal(made, expected)
    assert (whole[0][[0, -1]] == 5).all() and (whole[1][[0, 3]] == 5).all()


def test_a_launch_a_step(monkeypatch):
    launches = []
    kernel = tree_counts._count

    class Recorder:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(tree_counts, "_count", Recorder())
    for requests, trees in ((3, True), (3, False), (0, False)):
        emitted, given = step([4] * requests, 0)
        count(*sums(2), emitted, given if trees else None)
    assert launches == [(3,), (1,)]


def test_the_stats_of_a_worker_are_these():
    stats = DeviceStats(["ssm0", "recycling"], "cpu")
    steps = [step([9, 1, 6], 3), step([4], 4), (torch.tensor([1, 1], dtype=torch.int32), None)]
    for each in steps:
        stats.observe(*each)
    (found, owned), _ = both(steps, 2)
    read = stats.read()
    assert [getattr(read, name) for name in SUMS] == found.tolist()
    names = ("ssm0", "recycling")
    assert [read.proposed_by[name] for name in names] == owned[0].tolist()
    assert [read.accepted_by[name] for name in names] == owned[1].tolist()


@pytest.mark.parametrize("changed", ["token", "owner", "path", "emitted"])
def test_a_changed_number_is_caught(changed):
    """Negative control: what the kernel overlooked would show."""
    (emitted, trees), (made, expected) = step([9, 5], 1, placeholders=0), (sums(2), sums(2))
    reference.count(*expected, emitted, trees)
    if changed == "token":
        trees.tokens[3] = -1
    elif changed == "owner":
        trees.owner[3] ^= 2
    elif changed == "path":
        trees.path[1, 1:] = -1
    else:
        emitted[0] += 1
    count(*made, emitted, trees)
    with pytest.raises(AssertionError):
        check_equal(made, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sums": torch.zeros(6, dtype=torch.int64)}, "sums"),
        ({"sums": torch.zeros(7, dtype=torch.int32)}, "sums"),
        ({"sums": torch.zeros(14, dtype=torch.int64)[::2]}, "sums"),
        ({"owned": torch.zeros(2, dtype=torch.int64)}, "owned"),
        ({"owned": torch.zeros(2, 3)}, "owned"),
        ({"owned": torch.zeros(3, 2, dtype=torch.int64).T}, "owned"),
        ({"owned": torch.zeros(2, 32, dtype=torch.int64)}, "owned"),
        ({"emitted": torch.zeros(2, dtype=torch.int64)}, "emitted"),
        ({"emitted": torch.zeros(4, dtype=torch.int32)[::2]}, "emitted"),
        ({"path": torch.zeros(3, 4, dtype=torch.int64)}, "path"),
        ({"path": torch.zeros(2, 4, dtype=torch.int32)}, "path"),
        ({"path": torch.zeros(4, 2, dtype=torch.int64).T}, "path"),
        ({"start": torch.zeros(2, dtype=torch.int32)}, "start"),
        ({"start": torch.zeros(3, dtype=torch.int64)}, "start"),
        ({"tokens": torch.zeros(9, dtype=torch.int64)}, "tokens"),
        ({"owner": torch.zeros(3, dtype=torch.int32)}, "owner"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    emitted, trees = step([9, 5], 0)
    lists = {name: changes.get(name, getattr(trees, name)) for name in ("path", "start", "tokens", "owner")}
    totals = dict(zip(("sums", "owned"), sums(2), strict=True)) | {"emitted": emitted}
    totals |= {name: value for name, value in changes.items() if name in totals}
    with pytest.raises(ValueError, match=f"^{named}: "):
        count(**totals, trees=CountedTrees(**lists))
