# SPDX-License-Identifier: Apache-2.0
"""The law each draw was really made from, as two numbers per draw beside its row of `laws`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specinfer_vllm.verify.draws import Draws, put
from specinfer_vllm.verify.walk import TreeRows

# Rows of `laws` summed at once: bounds the float64 copy.
_CHUNK = 64


@dataclass(frozen=True)
class Offers:
    """Draw i was made from scale[i] * laws[law[i]] + shift[i] on the tokens not drawn before it, from 0 on the others.

    The tokens drawn before need no mask: when a later draw is verified they were refused, so the residual is 0 there.

    scale, shift    [draws] float64    shift is 0 unless the support was exhausted, and then scale is 0
    chance          [draws] float64    probability with which the drawn token was drawn
    """

    scale: torch.Tensor
    shift: torch.Tensor
    chance: torch.Tensor


def independent(trees: TreeRows, draws: Draws) -> Offers:
    """Every draw from the whole of its law."""
    chance = draws.laws[draws.law, draws.tokens(trees)].to(torch.float64)
    return Offers(scale=torch.ones_like(chance), shift=torch.zeros_like(chance), chance=chance)


def without_replacement(trees: TreeRows, draws: Draws) -> Offers:
    """Every draw from what its SSM's earlier draws under the same parent left of the law, normalised.

    Where they left nothing, uniformly from the tokens they did not take.
    """
    own = draws.laws[draws.law, draws.tokens(trees)].to(torch.float64)
    taken, count = _taken(draws, draws.table(trees), own)
    mass, support = _mass_and_support(draws.laws)
    exhausted = count >= support[draws.law]
    # Rounding must not leave less than the drawn token itself weighs.
    left = torch.maximum(mass[draws.law] - taken, own)
    scale = torch.where(exhausted | (left <= 0), 0.0, 1 / left)
    shift = torch.where(exhausted, 1 / (draws.laws.shape[-1] - count).clamp(min=1), 0.0)
    return Offers(scale=scale, shift=shift, chance=scale * own + shift)


def _taken(draws: Draws, table: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mass [draws] float64 and number [draws] int64 of the earlier draws from the same law under the same parent."""
    taken, count = torch.zeros_like(own), torch.zeros_like(draws.order)
    if not own.numel():
        return taken, count
    for order in range(1, draws.max_order):
        draw, before = table[:, order], table[:, order - 1].clamp(min=0)
        follows = (draw >= 0) & (draws.law[draw.clamp(min=0)] == draws.law[before])
        place = torch.where(follows, draw, own.numel())
        taken = put(taken, place, taken[before] + own[before])
        count = put(count, place, count[before] + 1)
    return taken, count


def _mass_and_support(laws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum [laws] float64 and number of tokens with a probability [laws] int64 of every row."""
    chunks = laws.split(_CHUNK)
    mass = torch.cat([chunk.sum(dim=-1, dtype=torch.float64) for chunk in chunks])
    return mass, torch.cat([torch.count_nonzero(chunk, dim=-1) for chunk in chunks])
