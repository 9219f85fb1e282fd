# SPDX-License-Identifier: Apache-2.0
"""Sampled draws of the V2 runner, from when an SSM made them until the walk weighs them against the LLM's law."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specinfer_vllm.triton_kernels.tree_verify import DraftRows, law_sums


@dataclass(frozen=True)
class SampledDraws:
    """The draws of one drafting. A request's draws stand in the order in which they were made, SSM after SSM.

    place   [slots] int64               place of the slot's request in that batch, -1 = it was not in it
    node    [requests, draws] int64     row of the tree that carries the draw
    parent  [requests, draws] int64     row under which it was made
    law     [requests, draws] int64     row of `laws`
    kept    [requests, draws] bool      it was sampled, and stands in the tree
    laws    [laws, vocab] float32       as sampled from
    """

    place: torch.Tensor
    node: torch.Tensor
    parent: torch.Tensor
    law: torch.Tensor
    kept: torch.Tensor
    laws: torch.Tensor

    def rows(
        self, slots: torch.Tensor, is_whole: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor, drawing: str
    ) -> DraftRows:
        """The draws of a batch's trees, as tree_verify takes them.

        slots     [requests] int64
        is_whole  [requests] bool           all nodes are verified. What is left of a cut tree depends on the tokens
                                            drawn, so that its draws count as not sampled
        start     [requests + 1] int32      rows of each request
        tokens    [rows] int32              of the trees. One that was taken away (-1) cannot be accepted, and to refuse
                                            it would be to say that the LLM did: its draw counts as not sampled
        drawing   as of tree_verify
        """
        num_rows = len(tokens)
        place = self.place[slots]
        at = place.clamp(min=0)
        weighed = self.kept[at] & (is_whole & (place >= 0))[:, None]
        first = start[:-1, None].long()
        row = first + self.node[at]
        weighed &= tokens[row.clamp(max=num_rows - 1)] >= 0
        parent = torch.where(weighed, first + self.parent[at], num_rows).flatten()
        order = parent.argsort(stable=True)
        begin = torch.searchsorted(parent[order], torch.arange(num_rows + 1, device=parent.device), out_int32=True)
        row = row.flatten()[order].int()
        law = self.law[at].flatten()[order].int()
        sums = law_sums(self.laws) if drawing == "without_replacement" else (None, None)
        return DraftRows(begin, row, law, self.laws, *sums)
