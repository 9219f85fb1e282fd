# SPDX-License-Identifier: Apache-2.0
"""The sampled rules by name, and the way of drafting that each needs to be exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from specinfer_vllm.verify.draws import Draws
from specinfer_vllm.verify.mss import mss
from specinfer_vllm.verify.offers import independent
from specinfer_vllm.verify.rejection import descend
from specinfer_vllm.verify.top_k_plus_one import top_k_plus_one
from specinfer_vllm.verify.traversal import traversal
from specinfer_vllm.verify.walk import Accepted, TreeRows
from specinfer_vllm.verify.without_replacement import without_replacement

Drafting = Literal["any", "iid", "without_replacement", "top_k_plus_one"]
Verify = Callable[[TreeRows, Draws, torch.Tensor, torch.Tensor, torch.Tensor], Accepted]


@dataclass(frozen=True)
class Rule:
    """A rule `verify(trees, draws, law, seed, position)` and how its sampled draws must be made (see draft.py).

    looks_everywhere    it reads the law at every row; the others index it by the rows they visit, a level at a time, so
                        that anything with a tensor's shape, dtype, device and law[rows] will do
    """

    verify: Verify
    drafting: Drafting
    looks_everywhere: bool = False


def _naive(trees: TreeRows, draws: Draws, law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> Accepted:
    """What naive() gives, with the arguments of the others: it samples only the rows that it visits."""
    none = replace(draws, row=draws.row[:0], law=draws.law[:0], order=draws.order[:0], max_order=0)
    return descend(trees, none, independent(trees, none), law, seed, position)


RULES: dict[str, Rule] = {
    "naive": Rule(_naive, "any"),
    "mss": Rule(mss, "iid"),
    "without_replacement": Rule(without_replacement, "without_replacement"),
    "top_k_plus_one": Rule(top_k_plus_one, "top_k_plus_one"),
    "traversal": Rule(traversal, "without_replacement", looks_everywhere=True),
}
