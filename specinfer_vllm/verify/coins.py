# SPDX-License-Identifier: Apache-2.0
"""Random numbers keyed by what they decide, not taken from a shared stream.

A coin depends on (request seed, position, purpose, index) alone, so a request gets the same output alone, in any batch,
on every rank and after preemption, and one that drafts nothing consumes nothing (exactness.md, rule 7).
"""

from __future__ import annotations

import torch

# Purposes keep the coins of one position independent of each other.
SAMPLE = 1  # draws the LLM's token at a node
ACCEPT = 2  # accepts or refuses a draw
DRAFT = 3  # draws an SSM's token

# splitmix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser, as signed 64-bit numbers.
_GAMMA = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own shift of int64 repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function; int64 in, int64 out, wrapping."""
    x = x + _GAMMA
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def coins(seed: torch.Tensor, position: torch.Tensor, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, of the broadcast shape of seed, position and index (int64 each).

    53 random bits, so 0 can occur and 1 cannot: compare strictly (`coin < p`), else a token of probability 0 passes.
    """
    key = _mix(_mix(_mix(seed) ^ position) ^ purpose)
    if not isinstance(index, int) or index:
        key = _mix(key ^ index)
    return _shift_right(_mix(key), 11).to(torch.float64) * 2.0**-53
