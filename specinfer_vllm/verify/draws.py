# SPDX-License-Identifier: Apache-2.0
"""Sampled draws of a batch of trees: what the rules that compare p with q need beside the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specinfer_vllm.tree.paths import place_among_equals
from specinfer_vllm.verify.walk import TreeRows

if TYPE_CHECKING:
    from specinfer_vllm.tree.topology import TokenTrees


def put(values: torch.Tensor, place: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of values [n] with new[i] at place[i]; what goes to place n is dropped, without the host selecting it."""
    return torch.cat((values, values.new_zeros(1))).index_put((place,), new)[:-1]


@dataclass(frozen=True)
class Draws:
    """Sampled draws of a batch of trees and the laws they were drawn from.

    Nodes chosen without sampling (draft-free proposers, fixed top-k children) are one-hot draws: not listed here, the
    rules try them after all sampled draws of their parent were refused. A node with several draws is listed once for
    each.

    row      [draws] int64      row (as in TreeRows) of the node that carries the draw
    law      [draws] int64      row of `laws` that the draw was sampled from; draws of one parent and one SSM share it
    order    [draws] int64      0, 1, .. without gaps among the sampled draws under the same parent, in the order of
                                drawing (all draws of the first SSM, then the second's)
    laws     [laws, vocab] float    q as sampled from (after temperature, top-k and top-p mask), normalised
    max_order    most sampled draws under one parent, 0 = no draws at all
    max_per_request    most sampled draws in one request's tree, for the rules that visit every draw (traversal); None
                       if the host does not know it: they then read it back from the device
    """

    row: torch.Tensor
    law: torch.Tensor
    order: torch.Tensor
    laws: torch.Tensor
    max_order: int
    max_per_request: int | None = None

    @classmethod
    def of(cls, trees: TokenTrees, laws: torch.Tensor | None, vocab_size: int) -> Draws:
        """The sampled draws of a batch of trees, on the device of `laws` [laws, vocab_size]; None = nothing sampled."""
        drawn = np.flatnonzero(trees.draw_law >= 0)
        row = trees.draw_row[drawn]
        order = place_among_equals(trees.parent_row[row])
        laws = torch.zeros(0, vocab_size) if laws is None else laws

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device=laws.device, dtype=torch.int64)

        return cls(
            row=tensor(row),
            law=tensor(trees.draw_law[drawn]),
            order=tensor(order),
            laws=laws,
            max_order=int(order.max(initial=-1)) + 1,
            max_per_request=int(np.bincount(trees.request[row]).max(initial=0)),
        )

    def tokens(self, trees: TreeRows) -> torch.Tensor:
        """Drawn tokens [draws] int64."""
        return trees.tokens[self.row]

    def parent(self, trees: TreeRows) -> torch.Tensor:
        """Row under which each draw was made [draws] int64."""
        return trees.parent[self.row]

    def table(self, trees: TreeRows) -> torch.Tensor:
        """Draws under each row in their order, [rows, max_order + 1] int64, -1 behind the last (never empty)."""
        table = torch.full((trees.tokens.numel(), self.max_order + 1), -1, dtype=torch.int64, device=self.row.device)
        table[self.parent(trees), self.order] = torch.arange(self.row.numel(), device=self.row.device)
        return table
