# SPDX-License-Identifier: Apache-2.0
"""What the V2 runner weighs is what was sampled and is verified, no more; and traversal walks by it as on the host."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from test_verify_enumeration import no_replacement  # noqa: E402
from test_verify_rules import random_batch  # noqa: E402
from torch.nn.functional import pad  # noqa: E402

from specinfer_vllm.engine.device_draws import SampledDraws  # noqa: E402
from specinfer_vllm.engine.verifier_v2 import NOWHERE, traverse  # noqa: E402
from specinfer_vllm.verify.draws import Draws  # noqa: E402
from specinfer_vllm.verify.rules import RULES  # noqa: E402
from specinfer_vllm.verify.walk import TreeRows  # noqa: E402

REQUESTS, SLOTS = 40, 64


def sampled(batch, rng) -> tuple[SampledDraws, torch.Tensor]:
    """The batch's draws as a speculator hands them over, among others that are not kept; and the requests' slots."""
    first, columns = batch.trees.offsets, [[] for _ in range(REQUESTS)]
    for draw in batch.draws.order.argsort(stable=True).tolist():
        row, law = int(batch.draws.row[draw]), int(batch.draws.law[draw])
        request = int(batch.rows.request[row])
        above = int(batch.rows.parent[row])
        columns[request].append((row - first[request], above - first[request], law, True))
    most = max(map(len, columns)) + 3
    places = rng.permutation(REQUESTS)
    made = np.zeros((REQUESTS, most, 4), np.int64)
    for request, mine in enumerate(columns):
        spare = [(rng.integers(0, 9), rng.integers(0, 9), rng.integers(0, 9), False) for _ in range(most - len(mine))]
        at = np.sort(rng.permutation(most)[: len(mine)])
        made[places[request], at] = np.array(mine).reshape(-1, 4)
        made[places[request], np.setdiff1d(np.arange(most), at)] = np.array(spare)
    slots = torch.from_numpy(rng.permutation(SLOTS)[:REQUESTS])
    place = torch.full((SLOTS,), -1)
    place[slots] = torch.from_numpy(places)
    node, parent, law, kept = torch.from_numpy(made).unbind(dim=-1)
    return SampledDraws(
        place, node, parent, law, kept > 0, batch.draws.laws, batch.draws.max_order, max(map(len, columns))
    ), slots


def only(draws: Draws, kept: torch.Tensor) -> Draws:
    """Some of the draws, of which a parent's are kept all or none."""
    return replace(draws, row=draws.row[kept], law=draws.law[kept], order=draws.order[kept])


def triples(draws: Draws, spare: int) -> list[tuple[int, ...]]:
    columns = zip(draws.row.tolist(), draws.law.tolist(), draws.order.tolist(), strict=True)
    return sorted(each for each in columns if each[0] != spare)


def with_spare(rows: TreeRows) -> TreeRows:
    """One row more, as TreeVerifier has it."""
    added = {"tokens": -1, "parent": len(rows.tokens), "depth": NOWHERE, "request": 0}
    longer = {name: pad(getattr(rows, name), (0, 1), value=value) for name, value in added.items()}
    return replace(rows, **longer)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_weighed_is_what_was_sampled(seed):
    """A cut tree, a slot that drafted nothing and a token taken away leave out theirs and nobody else's."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, REQUESTS, no_replacement)
    drawn, slots = sampled(batch, rng)
    whole = torch.from_numpy(rng.random(REQUESTS) < 0.7)
    drawn.place[slots[::5]] = -1
    counts = whole & (torch.arange(REQUESTS) % 5 > 0)
    start, tokens = torch.from_numpy(batch.trees.offsets).int(), batch.rows.tokens.int()
    gone = torch.from_numpy(rng.permutation(batch.rows.roots.numpy())[:5]) + 1  # a first child goes, or a root's token
    gone = gone[gone < len(tokens)]
    tokens[gone] = -1
    weighed = drawn.listed(drawn.rows(slots, whole, start, tokens, "iid"))
    row = batch.draws.row
    kept = counts[batch.rows.request[row]]
    expected = only(batch.draws, kept)
    without = [each for each in triples(expected, -1) if tokens[each[0]] >= 0]
    # Behind a draw that is gone the others of its parent move up.
    assert [each[:2] for each in triples(weighed, len(tokens))] == [each[:2] for each in without]
    for parent in batch.rows.parent[torch.tensor([each[0] for each in without])].unique().tolist():
        mine = [each[2] for each in triples(weighed, len(tokens)) if batch.rows.parent[each[0]] == parent]
        assert sorted(mine) == list(range(len(mine)))
    assert len(without) > 20
    assert weighed.max_per_request == max(np.bincount(batch.rows.request[row].numpy()))


@pytest.mark.parametrize("seed", range(4))
def test_traversal_walks_as_on_the_host(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, REQUESTS, no_replacement)
    drawn, slots = sampled(batch, rng)
    whole = torch.from_numpy(rng.random(REQUESTS) < 0.7)
    start, tokens = torch.from_numpy(batch.trees.offsets).int(), batch.rows.tokens.int()
    greedy = torch.from_numpy(rng.random(REQUESTS) < 0.2)
    greedy &= ~whole
    logits = batch.law.log().float()
    roots = batch.rows.roots
    weighed = drawn.listed(drawn.rows(slots, whole, start, tokens, "iid"))
    keys = {"seed": batch.seed[roots], "position": batch.position, "greedy": greedy}
    walked = traverse(RULES["traversal"], with_spare(batch.rows), weighed, logits, **keys)
    law = logits.softmax(dim=-1)
    sure = torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[1]).float()
    law = torch.where(greedy[batch.rows.request][:, None], sure, law)
    sampled_ones = only(batch.draws, whole[batch.rows.request[batch.draws.row]])
    expected = RULES["traversal"].verify(batch.rows, sampled_ones, law, batch.seed, batch.position)
    for name in ("tokens", "rows", "num_tokens"):
        assert torch.equal(getattr(walked, name).long(), getattr(expected, name))
    assert walked.num_tokens.dtype == torch.int32
    assert (expected.num_tokens > 2).sum() > 3
