# SPDX-License-Identifier: Apache-2.0
"""Counters of a worker: what was proposed, accepted, moved, refused, and by whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from specinfer_vllm.config import MAX_DEPTH

if TYPE_CHECKING:
    from specinfer_vllm.tree.topology import TokenTrees


@dataclass
class Showcase:
    """One verified tree to look at: of those with branches the one with the longest accepted path so far.

    tokens, parent, owners  per row, the root first; owners are the names of the proposers that drew the node
    accepted                local indices of the accepted path
    bonus                   the LLM's own token behind it
    """

    tokens: list[int]
    parent: list[int]
    owners: list[list[str]]
    accepted: list[int]
    bonus: int

    @property
    def rank(self) -> int:
        """How much there is to see, as `ranks` has it."""
        is_chain = len(set(self.parent)) == len(self.parent)
        return int(self.ranks(np.array([len(self.accepted)]), np.array([is_chain]))[0])

    @staticmethod
    def ranks(accepted: np.ndarray, is_chain: np.ndarray) -> np.ndarray:
        """How much there is to see in trees [requests] int64: branches before length, nothing without acceptance."""
        return accepted + np.where(is_chain | (accepted <= 0), 0, MAX_DEPTH)

    @classmethod
    def of(cls, trees: TokenTrees, request: int, path: np.ndarray, root: int, bonus: int, names: list[str]) -> Showcase:
        """Tree `request` of the batch. path: local indices; root, bonus: token ids in front of and behind it."""
        one = trees.select([request])
        owners = [sorted({names[o] for o in one.draw_owner[one.draw_node == row]}) for row in range(one.num_rows)]
        return cls([root, *one.tokens[1:].tolist()], one.parent.tolist(), owners, path.tolist(), bonus)


@dataclass
class TreeStats:
    """Plain sums since the start of the worker; one LLM pass of one request is a request step.

    steps               LLM passes that sampled at least one token
    request_steps       requests that took part in them
    tokens              tokens these steps emitted
    drafted_steps       request steps that verified a tree of at least one node
    nodes               nodes verified
    accepted            nodes accepted
    moved               accepted nodes whose K/V had to move
    accepted_by         proposer -> accepted nodes that carry a draw of it (a shared node counts for each)
    proposed_by         proposer -> verified nodes that carry a draw of it
    undrafted           reason -> request steps served without drafts because of it
    proposer_failures   proposer -> times it raised
    showcase            the tree with the longest accepted path so far, one with branches if there was any
    """

    steps: int = 0
    request_steps: int = 0
    tokens: int = 0
    drafted_steps: int = 0
    nodes: int = 0
    accepted: int = 0
    moved: int = 0
    accepted_by: Counter[str] = field(default_factory=Counter)
    proposed_by: Counter[str] = field(default_factory=Counter)
    undrafted: Counter[str] = field(default_factory=Counter)
    proposer_failures: Counter[str] = field(default_factory=Counter)
    showcase: Showcase | None = None

    def observe(self, trees: TokenTrees, accepted_row: np.ndarray, emitted: np.ndarray, owners: list[str]) -> None:
        """Add one step.

        accepted_row  [rows] bool          nodes on the accepted paths, roots not included
        emitted       [requests] int64     tokens each request got, 0 while its prompt is not done
        owners        names of the proposers, indexed by draw_owner
        """
        sampled = emitted > 0
        if not sampled.any():
            return
        self.steps += 1
        self.request_steps += int(sampled.sum())
        self.tokens += int(emitted.sum())
        self.drafted_steps += int((trees.num_nodes > 0).sum())
        self.nodes += trees.num_rows - trees.num_requests
        self.accepted += int(accepted_row.sum())
        for counter, draws in (
            (self.proposed_by, trees.draw_owner),
            (self.accepted_by, trees.draw_owner[accepted_row[trees.draw_row]]),
        ):
            for owner, count in enumerate(np.bincount(draws, minlength=len(owners)) if len(draws) else ()):
                counter[owners[owner]] += int(count)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per LLM pass and request; 1 is plain decoding."""
        return self.tokens / self.request_steps if self.request_steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for RPC and JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
        plain["showcase"] = None if self.showcase is None else vars(self.showcase)
        return {**plain, "tokens_per_step": self.tokens_per_step}
