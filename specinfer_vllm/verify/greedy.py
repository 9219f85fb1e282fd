# SPDX-License-Identifier: Apache-2.0
"""VerifyGreedy (SpecInfer, section 4.3): accept the path of the LLM's most probable tokens."""

from __future__ import annotations

import torch

from specinfer_vllm.verify.walk import Accepted, TreeRows, walk


def greedy(trees: TreeRows, logits: torch.Tensor) -> Accepted:
    """Accept while a child carries the argmax of its parent's row. logits [rows, vocab]; ties go to the lowest id."""
    return walk(trees, logits.argmax(dim=-1))
