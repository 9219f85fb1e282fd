# SPDX-License-Identifier: Apache-2.0
"""The trees of one pass of the V2 runner, in persistent buffers on the device: what attention backends need. Host-free.

Nothing here is read by the host and no shape depends on the topology, so a CUDA graph that was captured over these
buffers holds for every tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeBatch:
    """Rows that a pass verifies. Requests with a tree stand first in the batch, their rows are its first rows.

    num_requests  how many of the batch's requests have a tree, padding of a graph included; the host knows it
    num_rows      rows of these requests
    max_rows      most rows of one request: nodes + 1
    query_start   [requests + 1] int32       rows of request r: query_start[r]:query_start[r + 1], the root first
    prefix_len    [requests] int32           committed tokens in front of the root, visible to every row
    ancestors     [rows, words] int64        bit j of row i: tree slot j is on i's path, i itself included
    depth         [tree slots] int32         0 at a root
    tree_start    [requests + 1] int32       tree slots of request r, when the rows are not all of them but the last
                                             level: an SSM reads its tree level by level. None = query_start
    row_depth     [rows] int32               with tree_start only: depth of the rows
    max_slots     most tree slots of one request, 0 = max_rows
    """

    num_requests: int
    num_rows: int
    max_rows: int
    query_start: torch.Tensor
    prefix_len: torch.Tensor
    ancestors: torch.Tensor
    depth: torch.Tensor
    tree_start: torch.Tensor | None = None
    row_depth: torch.Tensor | None = None
    max_slots: int = 0
