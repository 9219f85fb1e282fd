# SPDX-License-Identifier: Apache-2.0
"""The walk along chosen tokens in Triton's interpreter against its reference and the torch rules' own walk."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from triton_cases import chain, comb, random_tree, star  # noqa: E402

from specinfer_vllm.tree.topology import from_arrays  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_walk as reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_verify import CHILDREN, Walk  # noqa: E402
from specinfer_vllm.triton_kernels.tree_walk import walk  # noqa: E402
from specinfer_vllm.verify.walk import TreeRows  # noqa: E402
from specinfer_vllm.verify.walk import walk as torch_walk  # noqa: E402

RNG = np.random.default_rng(17)
FORESTS = {
    "one root": [chain(1)],
    "no rows at all": [[], []],
    "chain": [chain(9)],
    "chain of 200": [chain(200)],
    "star": [star(30)],
    "star of 150": [star(150)],
    "forest": [random_tree(RNG, 17), [], chain(1), star(6), comb(20), random_tree(RNG, 40), []],
    "63, 64, 65": [random_tree(RNG, rows) for rows in (63, 64, 65)],
    "129 and 300": [random_tree(RNG, 129), comb(300)],
}


def forest(trees, seed=0, followed=0.97, dtype=torch.int32):
    """Arguments of walk: siblings carry different tokens, most inner rows' choice is one of their children."""
    rng = np.random.default_rng(seed)
    start = np.cumsum([0, *map(len, trees)])
    parent = np.array([above for tree in trees for above in tree], np.int32)
    tokens, chosen = np.zeros(len(parent), np.int64), rng.integers(0, 500, len(parent))
    depth = np.zeros(len(parent), np.int64)
    for first, end in zip(start, start[1:], strict=False):
        taken = {}
        for row in range(first, end):
            above = first + parent[row]
            tokens[row] = rng.choice(np.setdiff1d(np.arange(500), taken.setdefault(above, [])))
            taken[above].append(tokens[row])
            if parent[row] >= 0:
                depth[row] = depth[above] + 1
                if rng.random() < followed:
                    chosen[above] = tokens[row]
    return {
        "chosen": torch.from_numpy(chosen),
        "tokens": torch.from_numpy(tokens).to(dtype),
        "parent": torch.from_numpy(parent),
        "start": torch.from_numpy(start.astype(np.int32)),
        "max_depth": int(depth.max(initial=0)),
    }


def sevens(requests, width):
    """Buffers to write to."""
    return Walk(
        torch.full((requests, width), 7), torch.full((requests, width), 7), torch.full((requests,), 7).to(torch.int32)
    )


def check_equal(made, expected):
    for name in ("tokens", "rows", "num_tokens"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FORESTS)
def test_the_kernel_walks_like_the_reference(name, seed):
    given = forest(FORESTS[name], seed, dtype=(torch.int32, torch.int64)[seed])
    requests, width = len(FORESTS[name]), given["max_depth"] + 1
    made = walk(**given, out=sevens(requests, width))
    check_equal(made, reference.walk(**given, out=sevens(requests, width)))
    check_equal(made, walk(**given))
    for request, tree in enumerate(FORESTS[name]):
        count = int(made.num_tokens[request])
        assert (count == 0) == (not tree)
        assert (made.tokens[request, count:] == -1).all() and (made.rows[request, count:] == -1).all()


def test_the_walks_of_these_tests_go_deep():
    lengths = [int(walk(**forest(trees)).num_tokens.max()) for trees in FORESTS.values()]
    assert max(lengths) >= 8 and sum(length >= 3 for length in lengths) >= 4


@pytest.mark.parametrize("seed", range(3))
def test_the_torch_rules_walk_the_same(seed):
    trees = [tree for name in ("forest", "129 and 300", "chain") for tree in FORESTS[name] if tree]
    given = forest(trees, seed)
    rows = TreeRows.of(from_arrays(given["start"].numpy(), given["tokens"].numpy(), given["parent"].numpy()))
    made, expected = walk(**given), torch_walk(rows, given["chosen"])
    assert rows.max_depth == given["max_depth"]
    assert torch.equal(made.tokens, expected.tokens) and torch.equal(made.rows, expected.rows)
    assert torch.equal(made.num_tokens.long(), expected.num_tokens)


def test_a_child_in_any_block_of_rows_is_found():
    for child in (1, CHILDREN - 1, CHILDREN, 2 * CHILDREN + 3):
        given = forest([star(150)], followed=0)
        given["chosen"][0] = given["tokens"][child]
        assert walk(**given).rows.tolist() == [[0, child]]


def test_nothing_matches_a_placeholder():
    """Rows without a node carry -1 and hang on the root: a choice of -1, which is no token, ends the walk too."""
    parent = torch.tensor([-1, 0, 0, 0], dtype=torch.int32)
    tokens = torch.tensor([5, 3, -1, -1], dtype=torch.int32)
    start = torch.tensor([0, 4], dtype=torch.int32)
    for chosen, count in ((3, 2), (4, 1), (-1, 1)):
        given = torch.full((4,), -1)
        given[0] = chosen
        made = walk(given, tokens, parent, start, max_depth=3)
        assert made.num_tokens.tolist() == [count]
        assert made.tokens[0, 0] == chosen
        check_equal(made, reference.walk(given, tokens, parent, start, max_depth=3))


def test_a_link_that_does_not_rise_ends_the_walk():
    lists = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    parent, start = torch.tensor([-1, 1, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    assert walk(*lists, parent, start, max_depth=5).num_tokens.tolist() == [1]
    own = torch.tensor([0, 0, 1], dtype=torch.int32)
    check_equal(walk(*lists, own, start, max_depth=5), reference.walk(*lists, own, start, max_depth=5))


def test_the_walk_ends_at_max_depth():
    given = forest([chain(9)], followed=1) | {"max_depth": 4}
    assert walk(**given).rows.tolist() == [[0, 1, 2, 3, 4]]


def test_rows_outside_the_requests_are_neither_read_nor_written():
    given = forest(FORESTS["forest"])
    expected = walk(**given)
    # The rows behind would go on where the last tree ends, if they were its own.
    last = given["tokens"][-1:].long()
    poisoned = {
        "chosen": torch.cat((given["chosen"], last, last)),
        "tokens": torch.cat((given["tokens"], given["chosen"][-2:].to(torch.int32))),
        "parent": torch.cat((given["parent"], torch.zeros(2, dtype=torch.int32))),
    }
    requests, width = expected.tokens.shape
    whole = [torch.full((requests + 1, width), 7), torch.full((requests + 1, width), 7)]
    counts = torch.full((requests + 1,), 7, dtype=torch.int32)
    out = Walk(*(each[:requests] for each in whole), counts)
    assert walk(**(given | poisoned), out=out) is out
    assert torch.equal(out.tokens, expected.tokens) and torch.equal(out.rows, expected.rows)
    assert torch.equal(counts[:requests], expected.num_tokens)
    assert all((each[requests:] == 7).all() for each in (*whole, counts))


def test_no_request_at_all():
    nothing = torch.zeros(0, dtype=torch.int64)
    start = torch.zeros(1, dtype=torch.int32)
    assert walk(nothing, nothing, nothing.int(), start, max_depth=3).tokens.shape == (0, 4)


def test_another_choice_is_caught():
    """Negative control: one changed token on an accepted path shows."""
    given = forest([chain(9)], followed=1)
    other = given | {"chosen": given["chosen"].clone()}
    other["chosen"][4] += 1
    with pytest.raises(AssertionError):
        check_equal(walk(**other), reference.walk(**given))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chosen": torch.zeros(9, dtype=torch.int32)}, "chosen"),
        ({"chosen": torch.zeros(8, dtype=torch.int64)}, "chosen"),
        ({"tokens": torch.zeros(9)}, "tokens"),
        ({"parent": torch.zeros(9, dtype=torch.int64)}, "parent"),
        ({"parent": torch.zeros(18, dtype=torch.int32)[::2]}, "parent"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, "start"),
        ({"max_depth": -1}, "max_depth"),
        ({"out": Walk.empty(1, 8, "cpu")}, "tokens"),
        ({"out": Walk(torch.zeros(1, 9).long(), torch.zeros(1, 9).int(), torch.zeros(1).int())}, "rows"),
        ({"out": Walk(torch.zeros(1, 9).long(), torch.zeros(1, 9).long(), torch.zeros(1))}, "num_tokens"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        walk(**(forest([chain(9)]) | changes))
