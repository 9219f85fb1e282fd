# SPDX-License-Identifier: Apache-2.0
"""Multi-step speculative sampling (SpecInfer, Algorithm 2, VerifyStochastic).

Exact for children drawn independently, every draw kept with its SSM and its place: merged trees verify the draws of
one SSM after the other's, each with its own q. Not exact for top-k children with the full q, for children without
replacement, or once double draws are dropped.
"""

from __future__ import annotations

import torch

from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.offers import independent
from specinfer_vllm.verify.rejection import descend
from specinfer_vllm.verify.walk import Accepted, TreeRows


def mss(trees: TreeRows, draws: Draws, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> Accepted:
    """Accept draw x with min(1, R[x] / q[x]); a refusal leaves R = norm(relu(R - q)). Arguments as in descend()."""
    return descend(trees, draws, independent(trees, draws), law, seed, position)
