# SPDX-License-Identifier: Apache-2.0
"""What the V2 runner weighs is what was sampled and is verified, in its order, and no more."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_verify_enumeration import no_replacement  # noqa: E402
from test_verify_rules import random_batch  # noqa: E402

from specinfer_vllm.engine.device_draws import SampledDraws  # noqa: E402

SPARE = 3  # more slots than requests, and draws of each request that are not kept


def sampled(batch, rng) -> tuple[SampledDraws, torch.Tensor]:
    """The batch's draws as a speculator hands them over, among others that are not kept; and the requests' slots."""
    requests, first = len(batch.drafted), batch.trees.offsets
    mine = [[] for _ in range(requests)]
    for draw in batch.draws.order.argsort(stable=True).tolist():
        row, law = int(batch.draws.row[draw]), int(batch.draws.law[draw])
        request = int(batch.rows.request[row])
        mine[request].append((row - first[request], int(batch.rows.parent[row]) - first[request], law, 1))
    most = max(map(len, mine)) + SPARE
    made = rng.integers(0, 9, (requests, most, 4))
    made[..., 3] = 0
    places = rng.permutation(requests)
    for each, place in zip(mine, places, strict=True):
        made[place, np.sort(rng.permutation(most)[: len(each)])] = np.array(each).reshape(-1, 4)
    slots = torch.from_numpy(rng.permutation(requests + SPARE)[:requests])
    place = torch.full((requests + SPARE,), -1)
    place[slots] = torch.from_numpy(places)
    node, parent, law, kept = torch.from_numpy(made).unbind(dim=-1)
    return SampledDraws(place, node, parent, law, kept > 0, batch.draws.laws), slots


def weighed(drawn, slots, whole, batch, tokens) -> dict[int, list[tuple[int, int]]]:
    """(row, law) of the draws under each row that has some, in their order."""
    start = torch.from_numpy(batch.trees.offsets).int()
    rows = drawn.rows(slots, whole, start, tokens, "iid")
    assert len(rows.row) == drawn.node.numel()  # however many of them count
    listed = list(zip(rows.row.tolist(), rows.law.tolist(), strict=True))
    begin = rows.start.tolist()
    return {row: listed[a:b] for row, (a, b) in enumerate(zip(begin, begin[1:], strict=False)) if b > a}


def expected(batch, counts) -> dict[int, list[tuple[int, int]]]:
    """The same from the batch's list of draws, of which those count that counts(row) says."""
    found: dict[int, list[tuple[int, int]]] = {}
    for draw in batch.draws.order.argsort(stable=True).tolist():
        row = int(batch.draws.row[draw])
        if counts(row):
            found.setdefault(int(batch.rows.parent[row]), []).append((row, int(batch.draws.law[draw])))
    return found


@pytest.fixture(params=range(20))
def case(request):
    """(batch, its draws, slots, which trees are whole)."""
    rng = np.random.default_rng(request.param)
    batch = random_batch(rng, 30, no_replacement)
    return batch, *sampled(batch, rng), torch.from_numpy(rng.random(30) < 0.7)


def test_what_is_weighed_is_what_was_sampled(case):
    """Of trees that are whole, drafted, and hold the token."""
    batch, drawn, slots, whole = case
    drawn.place[slots[::5]] = -1
    tokens, request = batch.rows.tokens.int(), batch.rows.request.tolist()
    tokens[batch.rows.roots[whole][:9] + 1] %= 2
    tokens[tokens == 0] = -1
    found = weighed(drawn, slots, whole, batch, tokens)
    assert found == expected(batch, lambda row: whole[request[row]] and request[row] % 5 and tokens[row] >= 0)
    assert sum(map(len, found.values())) > 10
    assert found != expected(batch, lambda row: whole[request[row]] and request[row] % 5)  # negative control


def test_a_cut_tree_weighs_nothing_though_rows_are_missing(case):
    """Its draws may lie on rows past the batch's last."""
    batch, drawn, slots, _ = case
    start, tokens = torch.from_numpy(batch.trees.offsets).int().clone(), batch.rows.tokens.int()
    last = torch.arange(len(start) - 1) == len(start) - 2
    start[-1] = start[-2] + 1
    rows = drawn.rows(slots, ~last, start, tokens[: int(start[-1])], "iid")
    assert int(rows.start[-1]) == int((batch.draws.row < start[-2]).sum())
