# SPDX-License-Identifier: Apache-2.0
"""Traversal in Triton's interpreter against the float64 references and the rule in torch, coin by coin."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1, see test_triton_interpreter.py", allow_module_level=True)

from test_triton_tree_verify import arguments  # noqa: E402
from test_verify_enumeration import iid, no_replacement  # noqa: E402
from test_verify_rules import random_batch  # noqa: E402

from specinfer_vllm.triton_kernels import tuning  # noqa: E402
from specinfer_vllm.triton_kernels.reference import tree_traversal as torch_reference  # noqa: E402
from specinfer_vllm.triton_kernels.tree_traversal import residual_size, traverse  # noqa: E402
from specinfer_vllm.triton_kernels.tree_verify import Walk, verify  # noqa: E402
from specinfer_vllm.verify.traversal import traversal  # noqa: E402

DRAWINGS = {"without_replacement": no_replacement, "iid": iid}
drawings = pytest.mark.parametrize("drawing", DRAWINGS)
TREES = int(os.environ.get("SPECINFER_TREES", 30))


def same(walk: Walk, expected, only=slice(None)) -> bool:
    return all(
        torch.equal(getattr(walk, field)[only].long(), getattr(expected, field)[only].long())
        for field in ("tokens", "rows", "num_tokens")
    )


@drawings
def test_the_kernel_walks_like_the_rule_in_torch(drawing):
    batch = random_batch(np.random.default_rng(21), TREES, DRAWINGS[drawing])
    walk = traverse(**arguments(batch, drawing))
    expected = traversal(*batch.arguments(), replacement=drawing == "iid")
    assert same(walk, expected)
    assert np.bincount(expected.num_tokens, minlength=4)[1:4].min() >= 2


@drawings
def test_the_torch_reference_walks_and_tosses_the_same(drawing):
    batch = random_batch(np.random.default_rng(3), 20, DRAWINGS[drawing])
    greedy = torch.arange(20) % 5 == 0
    margin = torch.zeros(20, dtype=torch.float64)
    given = arguments(batch, drawing, greedy=greedy)
    given["logits"][int(given["start"][1])] = torch.nan
    given["logits"][int(given["start"][2]) + 1] = torch.inf
    made, expected = traverse(**given), torch_reference.traverse(**given, margin=margin)
    assert same(made, expected, margin > 1e-6)
    assert (margin > 1e-6).sum() >= 18 and (margin < 1).sum() >= 14
    assert made.tokens[1, 0] == made.tokens.max() == given["logits"].shape[1]


def test_the_wrong_drawing_is_caught():
    """Negative control: draws without replacement taken for independent ones."""
    batch = random_batch(np.random.default_rng(9), 6, no_replacement)
    assert same(traverse(**arguments(batch, "without_replacement")), traversal(*batch.arguments()))
    assert not same(traverse(**arguments(batch, "iid")), traversal(*batch.arguments()))


def test_draws_of_the_v2_runner_walk_as_on_the_host():
    """Those of cut trees count as not sampled, and draws that are not kept are none."""
    pytest.importorskip("vllm")
    from test_device_draws import sampled

    rng = np.random.default_rng(12)
    batch = random_batch(rng, 16, no_replacement)
    drawn, slots = sampled(batch, rng)
    whole = torch.arange(16) % 4 > 0
    given = arguments(batch, None)
    rows = drawn.rows(slots, whole, given["start"], given["tokens"], "without_replacement")
    counts = whole[batch.rows.request[batch.draws.row]]
    kept = {name: getattr(batch.draws, name)[counts] for name in ("row", "law", "order")}
    expected = traversal(batch.rows, replace(batch.draws, **kept), *batch.arguments()[2:])
    assert same(traverse(**given, draws=rows), expected)
    assert not same(traverse(**given), expected)


def test_several_blocks_and_dtypes_decide_like_torch(monkeypatch):
    """A vocabulary of several uneven blocks, logits and laws in two dtypes, -inf in places, rows with a stride."""
    monkeypatch.setattr(tuning, "traversal_plan", lambda *_: tuning.VerifyPlan(block=32, num_warps=1))
    for dtype in (torch.float32, torch.bfloat16):
        batch = random_batch(np.random.default_rng(7), 6, no_replacement, vocab=83)
        logits = batch.law.log().to(dtype)
        laws = batch.draws.laws.to(dtype).float()
        laws /= laws.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        batch = replace(batch, law=logits.double().softmax(-1), draws=replace(batch.draws, laws=laws.double()))
        expected = traversal(*batch.arguments())
        padded = torch.full((len(logits), 100), float("nan"), dtype=dtype)
        padded[:, :83] = logits
        given = arguments(batch, "without_replacement", logits=padded[:, :83], tokens=batch.rows.tokens)
        assert same(traverse(**given), expected)


def test_greedy_walks_take_the_most_probable_child():
    """Also where requests that sample share the launch; of equal ones the lowest."""
    batch = random_batch(np.random.default_rng(9), 8, no_replacement)
    greedy = torch.arange(8) % 2 == 0
    given = arguments(batch, "without_replacement", greedy=greedy)
    given["logits"] = (given["logits"] * 2).round().clamp(min=-4) / 2  # ties
    walk, best = traverse(**given), verify(**arguments(batch, None, logits=given["logits"], seed=None, position=None))
    assert same(walk, best, greedy)
    assert (best.num_tokens[greedy] > 1).any()
    sampled = traverse(**{**given, "greedy": None})
    assert same(walk, sampled, ~greedy)


def test_without_draws_it_is_naive_sampling():
    batch = random_batch(np.random.default_rng(4), 12, no_replacement)
    given = arguments(batch, None)
    assert same(traverse(**given), verify(**given))


def test_draws_below_the_deepest_level_are_passed_over():
    """As the rule in torch decides once they are taken out: no residual has a place there."""
    batch = random_batch(np.random.default_rng(6), 12, no_replacement)
    deepest = batch.rows.max_depth - 1
    walk = traverse(**arguments(batch, "without_replacement", max_depth=deepest))
    shallow = batch.rows.depth[batch.draws.row] <= deepest
    kept = {name: getattr(batch.draws, name)[shallow] for name in ("row", "law", "order")}
    expected = traverse(**arguments(replace(batch, draws=replace(batch.draws, **kept)), max_depth=deepest))
    assert same(walk, expected)
    assert walk.tokens.shape == (12, deepest + 1)


def test_nothing_is_written_outside_of_what_the_contract_says():
    """A workspace of the stated size does, and rows of no request are left alone."""
    batch = random_batch(np.random.default_rng(5), 6, no_replacement)
    size = residual_size(6, batch.rows.max_depth, batch.law.shape[1])
    guarded = torch.full((size + 64,), 7.0)
    given = arguments(batch, "without_replacement")
    out = Walk.empty(6, batch.rows.max_depth + 1, "cpu")
    assert same(traverse(**given, residual=guarded[:size], out=out), traverse(**given))
    assert (guarded[size:] == 7).all()
    given["start"] = given["start"].clone()
    given["start"][-1] = given["start"][-2]
    assert traverse(**given, out=out).num_tokens[-1] == 0
    assert (out.tokens[-1] == -1).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"residual": torch.zeros(3)}, "residual: 3"),
        ({"drawing": "shuffled"}, "drawing: 'shuffled'"),
        ({"seed": None}, "seed"),
        ({"seed": torch.zeros(2)}, "seed"),
    ],
)
def test_errors_name_what_is_at_fault(changes, named):
    batch = random_batch(np.random.default_rng(5), 6, no_replacement)
    with pytest.raises(ValueError, match=named):
        traverse(**arguments(batch, "without_replacement") | changes)
