# SPDX-License-Identifier: Apache-2.0
"""The k - 1 most probable children, fixed, and one drawn from the rest of the law.

The drawn child is in Draws with q' = q without the fixed tokens, normalised; the fixed ones are one-hot. This is
multi-step speculative sampling with one draw, whose last line (y ~ R, go on if any child carries y) serves the fixed
children: the acceptance is p(fixed) + the sum of min(p, q') over the others.
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.mss import mss
from specinfer_vllm.verify.walk import Accepted, TreeRows


def top_k_plus_one(
    trees: TreeRows, draws: Draws, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> Accepted:
    """Accept the drawn x with min(1, p[x] / q'[x]), else y ~ norm(relu(p - q')). Arguments as in descend()."""
    return mss(trees, draws, law, seed, position)
