# SPDX-License-Identifier: Apache-2.0
"""The walk shared by the rules that pick the LLM's token at every node first: descend while a child carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specinfer_vllm.tree.topology import TokenTrees


@dataclass(frozen=True)
class TreeRows:
    """A batch of trees as tensors on the LLM's device; row i of every tensor is row i of the logits.

    tokens      [rows] int64    token at the row; negative at placeholders, which nothing matches
    parent      [rows] int64    row of the parent, the row itself at a root
    depth       [rows] int64    0 at a root
    request     [rows] int64
    roots       [requests] int64    row of each request's root
    max_depth   deepest level of the batch
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    request: torch.Tensor
    roots: torch.Tensor
    max_depth: int

    @classmethod
    def of(cls, trees: TokenTrees, device: torch.device | str = "cpu") -> TreeRows:
        """The trees' arrays on `device`, one copy each."""

        def tensor(array):
            return torch.from_numpy(array).to(device=device, dtype=torch.int64)

        return cls(
            tokens=tensor(trees.tokens),
            parent=tensor(trees.parent_row),
            depth=tensor(trees.depth),
            request=tensor(trees.request),
            roots=tensor(trees.offsets[:-1]),
            max_depth=int(trees.depth.max(initial=0)),
        )


@dataclass(frozen=True)
class Accepted:
    """What one step adds to each request.

    tokens      [requests, width] int64    emitted tokens, -1 behind the last; width = deepest level + 1 at most
    rows        [requests, width] int64    row whose law gave the token: the root, then the accepted nodes; -1 behind
    num_tokens  [requests] int64           accepted nodes + 1
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    num_tokens: torch.Tensor


def walk(trees: TreeRows, chosen: torch.Tensor) -> Accepted:
    """Descend from each root while a child carries the token chosen at its parent.

    chosen  [rows] int64    the LLM's token at every row
    Siblings carry different tokens, so at most one node of a level is reached: `reached` level by level is the walk of
    all requests at once, max_depth small operations.
    """
    matches = trees.tokens == chosen[trees.parent]
    reached = trees.depth == 0
    for level in range(1, trees.max_depth + 1):
        reached = reached | ((trees.depth == level) & matches & reached[trees.parent])
    width = trees.max_depth + 1
    every = torch.arange(chosen.numel(), device=chosen.device)
    # Rows that are not reached write to a column of their own that is cut off: no host-side selection is needed.
    column = torch.where(reached, trees.depth, width)
    padded = torch.full((trees.roots.numel(), width + 1), -1, dtype=torch.int64, device=chosen.device)
    padded[trees.request, column] = every
    rows = padded[:, :width]
    tokens = torch.where(rows >= 0, chosen[rows.clamp(min=0)], -1)
    return Accepted(tokens=tokens, rows=rows, num_tokens=(rows >= 0).sum(dim=1))
