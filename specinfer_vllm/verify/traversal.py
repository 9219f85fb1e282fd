# SPDX-License-Identifier: Apache-2.0
"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): whole paths, from the leaves to the root.

h[v] is the chance that v's path is accepted given what was refused before, P_v the law of the token behind v:

    h[root] = 1; entering draw x of n, made from D:  h[v] = min(1, h[n] * P_n[x] / D[x])
    leaving v, when all its draws are refused:
        U < h[v]: accept the path to v, y ~ P_v
        else:     raw = relu(h[n] * P_n - D); s = sum(raw); h[n] = s / (s + 1 - h[n]); P_n = raw / s

The order in which the draws are left does not depend on what happens, so it is computed once and all requests take
one draw at a time side by side. A second draw of a node is refused at sight: P_n[x] is 0 after the first refusal.

One-hot children (not in Draws) take no part. If y is carried by one of them, the walk goes on from there by the naive
rule: nothing below was looked at yet, so it is still fresh, and the naive rule is exact for any tree.

Coins. A step looks at draws that lie behind the last token it emits, so neither their coins nor their drafting may be
keyed by their own position: the next step would toss the same coins, which refusals have biased. The coin of the i-th
draw left is coins(seed, position of the root, ACCEPT, i). Memory: [requests, max_depth + 1, vocab] residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specinfer_vllm.verify import offers as drafting
from specinfer_vllm.verify.coins import ACCEPT, SAMPLE, coins
from specinfer_vllm.verify.draws import Draws, put
from specinfer_vllm.verify.naive import sample
from specinfer_vllm.verify.offers import Offers
from specinfer_vllm.verify.rejection import child, excess, working_copy
from specinfer_vllm.verify.walk import Accepted, TreeRows

# Stands for any larger factor: times a chance of 0 it is still 0.
_HUGE = 1e300


def traversal(
    trees: TreeRows,
    draws: Draws,
    law: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    replacement: bool = False,
) -> Accepted:
    """Accept the first path, from the leaves up, whose coin allows it. Arguments as in rejection.descend().

    replacement    the draws of one parent and SSM were made independently, not without replacement
    """
    offers = (drafting.independent if replacement else drafting.without_replacement)(trees, draws)
    order = _order_of_leaving(trees, draws)
    at, residual = _climb(trees, draws, offers, order, law, seed, position)
    token = sample(residual, coins(seed[at], position[at], SAMPLE))
    tokens, rows = _path(trees, at)
    return _go_on(trees, draws, law, seed, position, at, token, tokens, rows)


@dataclass(frozen=True)
class _Order:
    """The order in which the draws are left; draws below one-hot nodes are not in it.

    events    [requests, most draws] int64    draws in the order of leaving, -1 behind the last
    number    [draws] int64     place of each draw in its request's events, -1 if it is in none
    first     [draws] bool      the first draw of its node
    """

    events: torch.Tensor
    number: torch.Tensor
    first: torch.Tensor


def _order_of_leaving(trees: TreeRows, draws: Draws) -> _Order:
    """Post-order numbers of the draws, by two sweeps over the levels."""
    device, count = draws.row.device, draws.row.numel()
    table, parent, depth = draws.table(trees), draws.parent(trees), trees.depth[draws.row]
    every = torch.arange(count, device=device)
    # The first draw of a node is the one with the lowest order.
    lowest = torch.full((trees.tokens.numel(),), draws.max_order, dtype=torch.int64, device=device)
    lowest = lowest.scatter_reduce(0, draws.row, draws.order, "amin")
    first = draws.order == lowest[draws.row]
    below = torch.zeros(trees.tokens.numel(), dtype=torch.int64, device=device)  # draws in the subtree of a row
    for level in range(trees.max_depth, 0, -1):
        below = below.index_add(0, parent, (1 + first * below[draws.row]) * (depth == level))
    size = torch.cat((1 + first * below[draws.row], every.new_zeros(1)))
    before = size[table].cumsum(dim=1) - size[table]  # the spare last entry is where -1 leads
    enters = torch.where(trees.depth == 0, 0, -1)  # draws left before the first one below a row; -1 out of reach
    number = torch.full_like(every, -1)
    for level in range(1, trees.max_depth + 1):
        start = enters[parent] + before[parent, draws.order]
        reached = (depth == level) & (enters[parent] >= 0)
        number = torch.where(reached, start + size[:-1] - 1, number)
        lead = torch.where(reached & first, draws.row, enters.numel())
        enters = put(enters, lead, start)
    most = draws.max_per_request
    if most is None:
        most = int(below[trees.roots].max()) if count else 0
    events = torch.full((trees.roots.numel(), most + 1), -1, dtype=torch.int64, device=device)
    events[trees.request[draws.row], torch.where(number >= 0, number, most)] = every
    return _Order(events[:, :most], number, first)


def _chains(
    trees: TreeRows, draws: Draws, offers: Offers, law: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(top, cap, factor), [rows] each: entered along first draws only, h[row] = min(cap, factor * h[top]).

    Behind a top every law is still untouched, so that h = min(1, h * p[x] / D[x]) all the way folds into two numbers.
    """
    rows = torch.arange(trees.tokens.numel(), device=law.device)
    top, cap, factor = rows, torch.ones_like(rows, dtype=torch.float64), torch.ones_like(rows, dtype=torch.float64)
    leads = (draws.order == 0) & first
    parent, tokens = draws.parent(trees), draws.tokens(trees)
    wanted = law[parent, tokens.clamp(min=0)].to(torch.float64)
    ratio = _ratio(wanted, offers.chance)
    for level in range(1, trees.max_depth + 1):
        place = torch.where(leads & (trees.depth[draws.row] == level), draws.row, rows.numel())
        top = put(top, place, top[parent])
        cap = put(cap, place, (cap[parent] * ratio).clamp(max=1.0))
        factor = put(factor, place, (factor[parent] * ratio).clamp(max=_HUGE))
    return top, cap, factor


def _ratio(wanted: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
    return torch.where(wanted > 0, wanted / offered, 0.0).clamp(max=_HUGE)


def _climb(
    trees: TreeRows,
    draws: Draws,
    offers: Offers,
    order: _Order,
    law: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted node of each request [requests] int64 and the law of the token behind it [requests, vocab]."""
    table, parent, tokens = draws.table(trees), draws.parent(trees), draws.tokens(trees).clamp(min=0)
    top, cap, factor = _chains(trees, draws, offers, law, order.first)
    root = trees.roots[trees.request[draws.row]]
    tossed = coins(seed[root], position[root], ACCEPT, index=order.number)
    rows, requests = trees.tokens.numel(), torch.arange(trees.roots.numel(), device=law.device)
    # One spare entry each, written by requests that have nothing to write.
    entered = torch.ones(rows + 1, dtype=torch.float64, device=law.device)  # h of the tops when they are entered
    height = torch.ones(rows + 1, dtype=torch.float64, device=law.device)  # h of nodes with a refused draw
    has_draws = table[:, 0] >= 0
    dtype = torch.promote_types(law.dtype, torch.float32)
    residuals = torch.empty((trees.roots.numel(), trees.max_depth + 1, law.shape[-1]), dtype=dtype, device=law.device)
    at, accepted = trees.roots, torch.zeros_like(trees.roots, dtype=torch.bool)

    def untouched(row: torch.Tensor) -> torch.Tensor:
        return torch.minimum(cap[row], factor[row] * entered[top[row]])

    for draw in order.events.unbind(dim=1):
        active, draw = (draw >= 0) & ~accepted, draw.clamp(min=0)
        node, above, eldest = draws.row[draw], parent[draw], draws.order[draw] == 0
        chance = torch.where(has_draws[node], height[node], untouched(node))
        chance = torch.where(order.first[draw], chance, 0.0)
        passes = active & (tossed[draw] < chance)
        at, accepted = torch.where(passes, node, at), accepted | passes

        refused = active & ~passes
        depth = trees.depth[above]
        before = torch.where(eldest, untouched(above), height[above])
        held = torch.where(eldest[:, None], working_copy(law, above), residuals[requests, depth])
        raw, mass = excess(held, draws.laws[draws.law[draw]], offers, draw, before)
        mass = mass.to(torch.float64)
        # Nothing left where h = 1 is rounding (see rejection.refuse): the residual stays as it is.
        after = torch.where(mass > 0, mass / (mass + (1 - before)), (before >= 1).to(torch.float64))
        raw = torch.where((mass > 0)[:, None], raw, held)
        height[torch.where(refused, above, rows)] = after
        # The deepest level has no draws below it: its place is free for what is not to be kept.
        residuals[requests, torch.where(refused, depth, trees.max_depth)] = raw

        following = table[above, draws.order[draw] + 1]
        enters, following = refused & (following >= 0), following.clamp(min=0)
        wanted = raw.gather(1, tokens[following][:, None]).squeeze(1).to(torch.float64)
        h = (after * _ratio(wanted, offers.chance[following])).clamp(max=1.0)
        entered[torch.where(enters & order.first[following], draws.row[following], rows)] = h

    touched = has_draws[at]
    return at, torch.where(touched[:, None], residuals[requests, trees.depth[at]], working_copy(law, at))


def _path(trees: TreeRows, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, rows) [requests, max_depth + 2] on the way to `at` as in Accepted, still without at's own token.

    The last column is a spare one.
    """
    shape = (at.numel(), trees.max_depth + 2)
    tokens = torch.full(shape, -1, dtype=torch.int64, device=at.device)
    rows = torch.full(shape, -1, dtype=torch.int64, device=at.device)
    requests, node = torch.arange(at.numel(), device=at.device), at
    for _ in range(trees.max_depth + 1):
        depth = trees.depth[node]
        rows[requests, depth] = node
        # The root's own token was emitted earlier: it goes to the spare column.
        tokens[requests, depth - 1] = trees.tokens[node]
        node = trees.parent[node]
    return tokens, rows


def _go_on(
    trees: TreeRows,
    draws: Draws,
    law: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    at: torch.Tensor,
    token: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
) -> Accepted:
    """Write the token sampled at `at`; while a child that was not looked at carries it, go there by the naive rule."""
    requests, spare = torch.arange(at.numel(), device=at.device), trees.max_depth + 1
    fresh = torch.ones_like(trees.tokens, dtype=torch.bool)
    fresh[draws.row] = False
    alive = torch.ones_like(at, dtype=torch.bool)
    for level in range(trees.max_depth + 1):
        column = torch.where(alive, trees.depth[at], spare)
        tokens[requests, column] = token
        rows[requests, column] = at
        if level == trees.max_depth:
            break
        node = child(trees, at, token, among=None if level else fresh)
        alive = alive & (node >= 0)
        at = torch.where(alive, node, at)
        token = sample(working_copy(law, at), coins(seed[at], position[at], SAMPLE))
    tokens, rows = tokens[:, :spare], rows[:, :spare]
    return Accepted(tokens, rows, (rows >= 0).sum(dim=1))
