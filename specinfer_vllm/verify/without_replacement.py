# SPDX-License-Identifier: Apache-2.0
"""Recursive rejection sampling of children drawn without replacement (RSD, Jeon et al. 2024; Sequoia's node rule).

Exact only in the order of drawing. A drafter may stop early when its support is exhausted, or go on with a uniform law
over the tokens that it has not drawn yet.
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify import offers
from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.rejection import descend
from specinfer_vllm.verify.walk import Accepted, TreeRows


def without_replacement(
    trees: TreeRows, draws: Draws, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> Accepted:
    """Accept draw x with min(1, R[x] / D[x]); a refusal leaves R = norm(relu(R - D)) and takes x out of D.

    D starts at q and starts anew with the next SSM's draws. Arguments as in descend().
    """
    return descend(trees, draws, offers.without_replacement(trees, draws), law, seed, position)
