# SPDX-License-Identifier: Apache-2.0
"""The trees of the V2 runner's requests, on the device, from when they are drafted until they are verified."""

from __future__ import annotations

import torch

from specinfer_vllm.tree.device import DeviceNodes
from specinfer_vllm.triton_kernels.tree_build import OrderedTrees, TreeArrays, depth_first, words_for


class DeviceTrees:
    """The trees of all slots, rows = 1 + nodes; row 0 is the root, whose token stands with the engine.

    tokens     [slots, rows] int32          -1 at the root and at nodes that do not exist
    parent     [slots, rows] int32          row of the parent, -1 at the root
    depth      [slots, rows] int32
    ancestors  [slots, rows, words] int64   bit j of row i: node j is on i's path, i itself included
    owner      [slots, rows] int32          bits of the proposers that drew the node, 0 at rows without one
    fields     [4, slots, rows] int32       tokens, parent, depth, owner: these are its views
    """

    def __init__(self, slots: int, nodes: int, requests: int, device: torch.device | str) -> None:
        """requests: most requests whose trees are written at once.

        There is one slot more, which nobody has: what a graph's padding writes goes there.
        """
        self.nodes, self.rows, self.device = nodes, nodes + 1, device
        slots += 1
        words = words_for(self.rows)
        self.fields = torch.zeros(4, slots, self.rows, dtype=torch.int32, device=device)
        self.tokens, self.parent, self.depth, self.owner = self.fields
        self.ancestors = torch.zeros(slots, self.rows, words, dtype=torch.int64, device=device)
        self._owner = torch.zeros(requests, self.rows, dtype=torch.int32, device=device)
        self.blank = self._blank(words)
        self.start = torch.arange(requests + 1, dtype=torch.int32, device=device) * self.rows
        self.no_prefix = torch.zeros(requests, dtype=torch.int32, device=device)
        self._written = [
            torch.full((requests, self.rows), fill, dtype=dtype, device=device)
            for fill, dtype in ((-1, torch.int32), (-1, torch.int32), (torch.inf, torch.float32))
        ]
        self._made = torch.zeros(4, requests * self.rows, dtype=torch.int32, device=device)
        self._ordered = OrderedTrees(
            *self._made[:2],
            torch.empty(requests * self.rows, dtype=torch.int32, device=device),
            TreeArrays(
                depth=self._made[2],
                position=torch.empty(requests * self.rows, dtype=torch.int64, device=device),
                ancestors=torch.empty(requests * self.rows, words, dtype=torch.int64, device=device),
                slot=None,
            ),
            torch.empty(2, requests * self.rows, dtype=torch.int32, device=device),
        )
        self.reset(torch.arange(slots, device=device))

    def _blank(self, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`fields` and `ancestors` of a tree without nodes: all rows but the root hang on it and match nothing."""
        row = torch.arange(self.rows, device=self.device)
        bits = torch.zeros(self.rows, words, dtype=torch.int64, device=self.device)
        bits[row, row // 64] = torch.ones_like(row) << (row % 64)
        bits[:, 0] |= 1
        depth = (row > 0).int()
        return torch.stack([torch.full_like(depth, -1), depth - 1, depth, torch.zeros_like(depth)]), bits

    def reset(self, slots: torch.Tensor) -> None:
        """Slots [k] int64 have no tree: their request is new, or another's."""
        fields, bits = self.blank
        self.fields[:, slots], self.ancestors[slots] = fields[:, None], bits

    def write(self, slots: torch.Tensor, nodes: DeviceNodes) -> torch.Tensor:
        """Keep the trees of slots [requests] int64, depth-first.

        Returns their tokens [requests, nodes] int32, -1 = none: valid until the next call.
        """
        requests = len(slots)
        for buffer, values in zip(self._written, (nodes.token, nodes.parent, nodes.score), strict=True):
            buffer[:requests, 1:] = values
        flat = [buffer[:requests].view(-1) for buffer in self._written]
        ordered = depth_first(
            *flat, self.start[: requests + 1], self.no_prefix[:requests], max_rows=self.rows, out=self._ordered
        )
        self._owner[:requests, 1:] = nodes.owner
        rows = requests * self.rows
        torch.index_select(self._owner.view(-1), 0, ordered.source[:rows], out=self._made[3, :rows])
        made = self._made[:, :rows].view(4, requests, self.rows)
        self.fields[:, slots] = made
        self.ancestors[slots] = ordered.arrays.ancestors[:rows].view(requests, self.rows, -1)
        return made[0, :, 1:]

    def rows_of(self, requests: int) -> torch.Tensor:
        """Where the trees written last have their nodes [requests, rows] int64: entry i is the row of node number i."""
        source = self._ordered.source[: requests * self.rows].view(requests, self.rows).long() % self.rows
        row = torch.arange(self.rows, device=source.device).expand_as(source)
        return torch.empty_like(source).scatter_(1, source, row)
