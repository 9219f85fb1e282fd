# SPDX-License-Identifier: Apache-2.0
"""Drawing children the way a rule needs them; keyed by coins, nothing read back by the host.

In    law       [n, vocab] float    q at each node after the SSM's temperature, top-k and top-p: store this very tensor
      k         children per node
      seed      [n] int64           the request's seed
      position  [n] int64           position of the step's first token: the root's, not the node's. A rule may look at
                                    draws behind the last token that a step emits (traversal does); keyed by their own
                                    positions the next step would draw the refused ones again
      index     [n] int64 >= 0, < 2^31    tells apart the nodes and the SSMs of one request's step
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify.coins import DRAFT, coins
from specinfer_vllm.verify.naive import sample


def iid(law: torch.Tensor, k: int, seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """k independent draws of each row, [n, k] int64 in the order of drawing; a token may come several times."""
    return sample(law, _noise(k, seed, position, index))


def without_replacement(
    law: torch.Tensor, k: int, seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """k different tokens of each row, [n, k] int64 in the order of drawing; -1 once the support is exhausted.

    An exponential race: token x arrives at Exp(1) / q(x), the first k arrivals are k draws without replacement in their
    order (the same as the largest k of log q + Gumbel noise). k must not exceed vocab.
    """
    # 1 - coin lies in (0, 1]: times are finite, but for those of tokens without probability.
    arrival = -torch.log1p(-_noise(law.shape[-1], seed, position, index)) / law
    arrival.masked_fill_(law <= 0, torch.inf)
    times, tokens = arrival.topk(k, dim=-1, largest=False, sorted=True)
    return torch.where(times < torch.inf, tokens, -1)


def top_k_plus_one(
    law: torch.Tensor, k: int, seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k - 1 most probable tokens and one draw from the rest.

    Returns fixed [n, k - 1] int64, sampled [n] int64 and q' [n, vocab] = law without the fixed tokens, normalised: the
    law to be kept in Draws. -1 stands for a token that would have no probability; such a row of q' is all 0.
    """
    best, fixed = law.topk(k - 1, dim=-1)
    rest = law.scatter(-1, fixed, 0.0)
    mass = rest.sum(dim=-1)
    rest = rest / torch.where(mass > 0, mass, 1.0)[:, None]
    sampled = sample(rest, _noise(1, seed, position, index).squeeze(-1))
    return torch.where(best > 0, fixed, -1), torch.where(mass > 0, sampled, -1), rest


def _noise(slots: int, seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Coins [n, slots] float64, independent for every slot and index."""
    slot = torch.arange(slots, device=seed.device)
    return coins(seed[:, None], position[:, None], DRAFT, index=(index[:, None] << 32) + slot)
