# SPDX-License-Identifier: Apache-2.0
"""The descent shared by the rules that try a node's draws one after another, level by level over all requests.

At the node where a request stands, with R = the LLM's law there:

    for each sampled draw x, in the order of drawing, made from D:
        accept x with probability min(1, R[x] / D[x]) and go to its node; else R = norm(relu(R - D))
    y ~ R; if any child carries y, go there; else the step ends

The last line makes one-hot children (not in Draws) exact however they were chosen: y has the law that it would have
without them. Every visited node emits one token, so a coin keyed by its position is tossed once in a request's life.

Reads the law at visited rows only: per level one [requests, vocab] of the LLM's law and one of q for each draw.
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify.coins import ACCEPT, SAMPLE, coins
from specinfer_vllm.verify.draws import Draws, put
from specinfer_vllm.verify.naive import sample
from specinfer_vllm.verify.offers import Offers
from specinfer_vllm.verify.walk import Accepted, TreeRows


def descend(
    trees: TreeRows, draws: Draws, offers: Offers, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> Accepted:
    """Walk all requests down from their roots.

    law       [rows, vocab] float    the LLM's law at each row, normalised
    seed      [rows] int64           the request's seed
    position  [rows] int64           position of the token that the row's law emits
    Accepting draw number i under row u uses coins(seed, position of u, ACCEPT, i), the token sampled at u
    coins(seed, position of u, SAMPLE). Accepted.rows is where each token's law, residual or not, was taken.
    """
    table = draws.table(trees)
    parent = draws.parent(trees)
    tossed = coins(seed[parent], position[parent], ACCEPT, index=draws.order)
    at, alive = trees.roots, torch.ones_like(trees.roots, dtype=torch.bool)
    tokens, rows = [], []
    for level in range(trees.max_depth + 1):
        if level and at.is_cpu and not alive.any():
            break  # most walks end early; elsewhere asking would make the host wait
        residual = working_copy(law, at)
        node = torch.full_like(at, -1)
        # Nothing stands below the deepest level.
        for order in range(draws.max_order if level < trees.max_depth else 0):
            draw = table[at, order]
            tried, draw = (draw >= 0) & (node < 0), draw.clamp(min=0)
            row = draws.row[draw]
            wanted = residual.gather(1, trees.tokens[row].clamp(min=0)[:, None]).squeeze(1)
            accepted = tried & (tossed[draw] * offers.chance[draw] < wanted)
            node = torch.where(accepted, row, node)
            residual = refuse(residual, draws.laws[draws.law[draw]], offers, draw, tried & ~accepted)
        sampled = sample(residual, coins(seed[at], position[at], SAMPLE))
        token = torch.where(node >= 0, trees.tokens[node.clamp(min=0)], sampled)
        node = torch.where(node >= 0, node, child(trees, at, token))
        tokens.append(torch.where(alive, token, -1))
        rows.append(torch.where(alive, at, -1))
        alive = alive & (node >= 0)
        at = torch.where(alive, node, at)
    accepted_rows = torch.stack(rows, dim=1)
    return Accepted(torch.stack(tokens, dim=1), accepted_rows, (accepted_rows >= 0).sum(dim=1))


def working_copy(law: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """law[rows], in float32 at least."""
    return law[rows].to(torch.promote_types(law.dtype, torch.float32))


def refuse(
    residual: torch.Tensor, q: torch.Tensor, offers: Offers, draw: torch.Tensor, refused: torch.Tensor
) -> torch.Tensor:
    """norm(relu(R - D)) of the rows [rows, vocab] where `refused` [rows] bool holds, the others as they are.

    q [rows, vocab] = the law of each row's draw, overwritten. R stays as it is where nothing is left of it, which only
    rounding brings about: a refused x has R[x] < D[x], so that R exceeds D elsewhere.
    """
    raw, mass = excess(residual, q, offers, draw)
    return torch.where((refused & (mass > 0))[:, None], raw, residual)


def excess(
    law: torch.Tensor, q: torch.Tensor, offers: Offers, draw: torch.Tensor, height: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(relu(height * law - D)) [rows, vocab], the mass [rows] before norm; zeros where the mass is 0).

    height [rows] float64, 1 by default; q is overwritten, which spares the largest allocation of a step.
    """
    scale, shift = offers.scale[draw].to(law.dtype), offers.shift[draw].to(law.dtype)
    raw = q.to(law.dtype)
    torch.addcmul(-shift[:, None], raw, -scale[:, None], out=raw)
    raw = raw.addcmul_(law, height[:, None].to(law.dtype)) if height is not None else raw.add_(law)
    mass = raw.clamp_(min=0).sum(dim=-1)
    return raw.div_(torch.where(mass > 0, mass, 1.0)[:, None]), mass


def child(trees: TreeRows, at: torch.Tensor, token: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
    """Row of the child of at[r] that carries token[r] (both [requests]) for each request r, -1 without one.

    among  [rows] bool    children that count, all by default
    """
    matches = (trees.depth > 0) & (trees.parent == at[trees.request]) & (trees.tokens == token[trees.request])
    if among is not None:
        matches = matches & among
    place = torch.where(matches, trees.request, at.numel())
    return put(torch.full_like(at, -1), place, torch.arange(matches.numel(), device=at.device))
