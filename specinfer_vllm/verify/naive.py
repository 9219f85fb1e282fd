# SPDX-License-Identifier: Apache-2.0
"""Naive sampling (SpecInfer, section 4.3): sample the LLM at every node, descend if a child happens to carry the token.

Exact for any tree, however its nodes were chosen, as long as they do not depend on this rule's coins. The coin of a
node is keyed by its position alone: siblings share it, and since at most one of them is visited the law stays exact,
while a request's output does not depend on its trees at all.
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify.coins import SAMPLE, coins
from specinfer_vllm.verify.walk import Accepted, TreeRows, walk

# Numbers sampled from at once, elsewhere and on a CPU: bounds the float64 copy, and keeps it in a CPU's cache.
_CHUNK = (2**25, 2**19)


def sample(law: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF samples of each row.

    law   [rows, vocab] float    non-negative; need not be normalised
    coin  [rows] or [rows, samples] float64 in [0, 1)
    Returns int64 of coin's shape. A token of probability 0 is never returned, whatever the coin; a row without any
    probability gives `vocab`.
    """
    step = max(1, _CHUNK[law.device.type == "cpu"] // law.shape[-1])
    parts = zip(law.split(step), coin.split(step), strict=True)
    return torch.cat([_sample(*part) for part in parts])


def _sample(law: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    cdf = law.to(torch.float64).cumsum(dim=-1)
    total = cdf[:, -1:]
    # The product can round up to the total; the largest float below it still falls into the last token's step.
    below = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum((coin if coin.dim() == 2 else coin[:, None]) * total, below)
    return torch.searchsorted(cdf, wanted, right=True).reshape(coin.shape)


def naive(trees: TreeRows, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> Accepted:
    """Sample every row's law and walk.

    law       [rows, vocab] float    the LLM's law at each row after all of the request's processing
    seed      [rows] int64           the request's seed
    position  [rows] int64           position of the token that the row's law emits
    """
    return walk(trees, sample(law, coins(seed, position, SAMPLE)))
