# SPDX-License-Identifier: Apache-2.0
"""`specinfer shape`: from a profile and costs to a speculative_config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer_vllm.config import METHOD, SsmOptions
from specinfer_vllm.train.cost import Cost
from specinfer_vllm.train.inputs import InputError
from specinfer_vllm.train.profile import Profile
from specinfer_vllm.tree.shape import Forest, best_forest

COLUMNS = ("side by side", "SSMs", "trees", "tokens per step, expected", "speed, expected")


@dataclass(frozen=True)
class Choice:
    """The best static trees of some SSMs at one number of requests side by side.

    label    the SSMs' names
    ssms     folders, one for each tree of the forest
    speed    expected, as a multiple of decoding without a tree
    """

    batch: int
    label: str
    ssms: tuple[str, ...]
    forest: Forest
    speed: float

    @property
    def row(self) -> tuple[str, ...]:
        """For the table."""
        trees = ", ".join(f"{tree.num_nodes} nodes, {tree.depth} deep" for tree in self.forest.trees)
        return (str(self.batch), self.label, trees, f"{self.forest.tokens_per_step:.3f}", f"{self.speed:.2f}x")

    def configuration(self) -> dict[str, Any]:
        """A speculative_config with the trees that have nodes."""
        trees = [(ssm, tree) for ssm, tree in zip(self.ssms, self.forest.trees, strict=True) if tree.num_nodes]
        return {"method": METHOD, "ssms": [{"model": ssm, "tree": list(tree.paths)} for ssm, tree in trees]}


def choices(profile: Profile, costs: Sequence[Cost], max_nodes: int, max_depth: int) -> Iterator[Choice]:
    """For every number of requests: each SSM alone, and all together."""
    for cost in costs:
        curve = cost.curve(max_nodes)
        for label, group in profile.groups().items():
            ranks, levels = [profile.ranks(i) for i in group], [cost.level[i] for i in group]
            forest = best_forest(ranks, max_nodes, max_depth, curve, levels)
            ssms = tuple(profile.ssms[i] for i in group)
            yield Choice(cost.batch, label, ssms, forest, forest.speed * float(curve[0]))


def fastest(found: Sequence[Choice], batch: int) -> Choice:
    """The fastest for so many requests. InputError: no tree pays."""
    best = max((each for each in found if each.batch == batch), key=lambda each: each.speed)
    if not best.forest.nodes:
        raise InputError("no tree pays at these costs; nothing is written")
    return best


def best_first(profile: Profile, cost: Cost, max_nodes: int, max_depth: int) -> dict[str, Any]:
    """A speculative_config whose trees grow best-first under the measured costs, in passes over one row."""
    row_cost, one = cost.row_cost(max_nodes), cost.one_row(max_nodes)
    read = cost.batch * SsmOptions.width  # rows of a level
    return {
        "method": METHOD,
        "ssms": [{"model": ssm} for ssm in profile.ssms],
        "num_nodes": max_nodes,
        "depth": max_depth,
        "row_cost": round(min(row_cost, 1.0), 4),
        "draft_cost": round(min(max(cost.level) / one / (1 + row_cost * (read - 1)), 1.0), 4),
    }
