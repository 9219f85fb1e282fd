# SPDX-License-Identifier: Apache-2.0
"""`specinfer shape`: from a profile and costs to a speculative_config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer_vllm.config import METHOD
from specinfer_vllm.train.cost import Cost
from specinfer_vllm.train.inputs import InputError
from specinfer_vllm.train.profile import Profile
from specinfer_vllm.tree.shape import Forest, best_forest


@dataclass(frozen=True)
class Choice:
    """The best static trees of some SSMs at one number of requests side by side.

    ssms     folders, one for each tree of the forest
    speed    expected, as a multiple of decoding without a tree
    """

    batch: int
    ssms: tuple[str, ...]
    forest: Forest
    speed: float

    @property
    def row(self) -> tuple[str, ...]:
        """For the table."""
        trees = ", ".join(f"{tree.num_nodes} nodes, {tree.depth} deep" for tree in self.forest.trees)
        names = " + ".join(Path(ssm).name for ssm in self.ssms)
        return (str(self.batch), names, trees, f"{self.forest.tokens_per_step:.3f}", f"{self.speed:.2f}x")

    def configuration(self) -> dict[str, Any]:
        """A speculative_config with the trees that have nodes."""
        trees = [(ssm, tree) for ssm, tree in zip(self.ssms, self.forest.trees, strict=True) if tree.num_nodes]
        return {"method": METHOD, "ssms": [{"model": _folder(ssm), "tree": list(tree.paths)} for ssm, tree in trees]}


COLUMNS = ("side by side", "SSMs", "trees", "tokens per step, expected", "speed, expected")


def choices(profile: Profile, costs: Sequence[Cost], max_nodes: int, max_depth: int) -> Iterator[Choice]:
    """For every number of requests: each SSM alone, and all together."""
    every = range(len(profile.ssms))
    for cost in costs:
        curve = cost.curve(max_nodes)
        for group in [*([i] for i in every), *([every] if len(every) > 1 else [])]:
            ranks, levels = [profile.ranks(i) for i in group], [cost.level[i] for i in group]
            forest = best_forest(ranks, max_nodes, max_depth, curve, levels)
            yield Choice(cost.batch, tuple(profile.ssms[i] for i in group), forest, forest.speed * float(curve[0]))


def fastest(found: Sequence[Choice], batch: int | None) -> Choice:
    """The fastest for so many requests, of the first number by default. InputError: not measured, or no tree pays."""
    known = list(dict.fromkeys(each.batch for each in found))
    if batch is not None and batch not in known:
        raise InputError(f"--batch {batch}: the costs are of {known} side by side; name one of these")
    best = max((each for each in found if each.batch == (batch or known[0])), key=lambda each: each.speed)
    if not best.forest.nodes:
        raise InputError("no tree pays at these costs; nothing is written")
    return best


def best_first(profile: Profile, cost: Cost, max_nodes: int, max_depth: int) -> dict[str, Any]:
    """A speculative_config whose trees grow best-first under the measured costs."""
    curve, plain = cost.curve(max_nodes), cost.llm[0]
    return {
        "method": METHOD,
        "ssms": [{"model": _folder(ssm)} for ssm in profile.ssms],
        "num_nodes": max_nodes,
        "depth": max_depth,
        "row_cost": round(float(curve[-1] - curve[0]) / (max_nodes * cost.batch * plain), 4),
        "draft_cost": round(max(cost.level) / plain, 4),
    }


def _folder(ssm: str) -> str:
    return str(Path(ssm).resolve())
