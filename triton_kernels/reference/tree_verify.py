# SPDX-License-Identifier: Apache-2.0
"""The walk that accepts nodes, one request and one node at a time: laws in float64, coins in Python integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from specinfer_vllm.triton_kernels.tree_verify import DraftRows, Walk

MASK = (1 << 64) - 1
SAMPLE, ACCEPT = 1, 2  # purposes of coins

Coin = Callable[..., float]


def verify(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    draws: DraftRows | None = None,
    drawing: str = "iid",
    residual: torch.Tensor | None = None,
    out: Walk | None = None,
    margin: torch.Tensor | None = None,
) -> Walk:
    """Tensors as in the kernel's contract; draws.mass, draws.support and residual are not looked at.

    margin [requests] float64, written when given: how far the closest of the request's coins lies from where its
    decision would change; inf without coins. Whoever computes laws with a smaller error gives the same walk.
    """
    requests, width, vocab = len(start) - 1, max_depth + 1, logits.shape[1]
    out = out or Walk(
        tokens=torch.empty(requests, width, dtype=torch.int64, device=logits.device),
        rows=torch.empty(requests, width, dtype=torch.int64, device=logits.device),
        num_tokens=torch.empty(requests, dtype=torch.int32, device=logits.device),
    )
    for request, (first, end) in enumerate(pairwise(start.tolist())):
        sampled = seed is not None and (greedy is None or not greedy[request])
        child = {
            (first + above, token): first + node
            for node, (above, token) in enumerate(
                zip(parent[first:end].tolist(), tokens[first:end].tolist(), strict=True)
            )
            if 0 <= above < node
        }
        emitted, rows, distances = [], [], [torch.inf]
        row = first if first < end else None
        while row is not None and len(emitted) < width:
            rows.append(row)
            law = logits[row].double().softmax(0)
            below = None
            if not law.isfinite().all():
                token = vocab  # no law: no child carries it
            elif not sampled:
                token = int(logits[row].float().argmax())
            else:
                coin = partial(coin_of, int(seed[request]), int(position[row]))
                if draws is not None:
                    below, law = _try_draws(row, law, coin, tokens, draws, drawing, distances)
                token = int(tokens[below]) if below is not None else pick(law, coin(SAMPLE), distances)
            emitted.append(token)
            row = below if below is not None else child.get((row, token))
        for column, list_ in ((out.tokens, emitted), (out.rows, rows)):
            column[request] = torch.tensor(list_ + [-1] * (width - len(list_)))
        out.num_tokens[request] = len(emitted)
        if margin is not None:
            margin[request] = min(distances)
    return out


def _try_draws(
    row: int,
    law: torch.Tensor,
    coin: Coin,
    tokens: torch.Tensor,
    draws: DraftRows,
    drawing: str,
    distances: list[float],
) -> tuple[int | None, torch.Tensor]:
    """(row of the draw accepted under `row` or None, what the refused ones leave of the law [vocab])."""
    previous, drawn = None, []
    first, end = draws.start[row : row + 2].tolist()
    for number, (carrier, which) in enumerate(
        zip(draws.row[first:end].tolist(), draws.law[first:end].tolist(), strict=True)
    ):
        if which != previous:  # the next SSM begins
            previous, drawn = which, []
        x, q = int(tokens[carrier]), draws.laws[which].double()
        if drawing == "without_replacement":
            q = without(q, drawn)
        tossed, p, d = coin(ACCEPT, number), float(law[x]), float(q[x])
        if d > 0:
            distances.append(abs(tossed - p / d))
        if tossed * d < p:
            return carrier, law
        raw = (law - q).clamp(min=0)
        law = raw / raw.sum() if raw.any() else law  # nothing left is rounding
        drawn.append(x)
    return None, law


def without(law: torch.Tensor, drawn: list[int]) -> torch.Tensor:
    """The law [vocab] once `drawn` are taken out; uniform over the rest where that leaves nothing. Sums to 1."""
    drawn = torch.tensor(drawn, dtype=torch.int64, device=law.device)
    rest = law.index_fill(0, drawn, 0)
    if not rest.any():
        rest = torch.ones_like(law).index_fill(0, drawn, 0)
    return rest / rest.sum()


def pick(law: torch.Tensor, coin: float, distances: list[float]) -> int:
    """Inverse-CDF sample of a law [vocab]: the first token whose cumulative sum exceeds coin * total."""
    cdf = law.cumsum(0)
    wanted = torch.minimum(coin * cdf[-1], torch.nextafter(cdf[-1], torch.zeros_like(cdf[-1])))
    token = int(torch.searchsorted(cdf, wanted, right=True))
    before = float(cdf[token - 1]) if token else -torch.inf  # a coin of 0 has no token below
    distances.append(min(float(wanted) - before, float(cdf[token] - wanted)))
    return token


def _mix(x: int) -> int:
    """splitmix64's output function (Steele, Lea, Flood 2014) on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def coin_of(seed: int, position: int, purpose: int, index: int | None = None) -> float:
    """A uniform number in [0, 1) with 53 random bits, as verify/coins.py makes it; index of the draw for ACCEPT."""
    key = _mix(_mix(_mix(seed & MASK) ^ (position & MASK)) ^ purpose)
    if index is not None:
        key = _mix(key ^ index)
    return (_mix(key) >> 11) * 2.0**-53
