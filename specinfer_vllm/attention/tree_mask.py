# SPDX-License-Identifier: Apache-2.0
"""Which keys each tree row sees: the committed prefix, and of the tree part its own ancestors. Host-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from specinfer_vllm.attention.tree_batch import TreeBatch

WORD_BITS = 64


@dataclass(frozen=True)
class TreeMask:
    """The tree part of one pass, built once per step and shared by all layers.

    rows         [requests, width] int64    flat query row of each request's tree rows; padding repeats the first
    valid        [requests, width] bool     False at padding
    words        [requests, width, words] int64    bit j: tree slot j is visible to the row (itself included)
    position     [requests, width] int64    position of the row: prefix length + depth of the node
    tree_depth   [requests, tree] int64     tree slot j's distance in positions from the end of the prefix
    prefix_len   [requests] int64           committed tokens, visible to every row, in front of the tree slots
    tree_len     [requests] int64           tree slots of the request
    batch        [requests] int64           row of the block table
    covers_all   no query row lies outside `rows`
    """

    rows: torch.Tensor
    valid: torch.Tensor
    words: torch.Tensor
    position: torch.Tensor
    tree_depth: torch.Tensor
    prefix_len: torch.Tensor
    tree_len: torch.Tensor
    batch: torch.Tensor
    covers_all: bool

    @classmethod
    def of_batch(cls, batch: TreeBatch, num_rows: int) -> TreeMask:
        """The mask of the V2 runner's trees, for backends that want it padded; num_rows: query rows of the pass."""
        rows, valid, counts = padded(batch.query_start, batch.num_requests, batch.max_rows)
        slots, tree_len = rows, counts
        if batch.tree_start is not None:
            slots, _, tree_len = padded(batch.tree_start, batch.num_requests, batch.max_slots)
        depth = batch.depth if batch.row_depth is None else batch.row_depth
        prefix_len = batch.prefix_len[: batch.num_requests].to(torch.int64)
        return cls(
            rows=rows,
            valid=valid,
            words=batch.ancestors[rows],
            position=prefix_len[:, None] + depth[rows],
            tree_depth=batch.depth[slots].to(torch.int64),
            prefix_len=prefix_len,
            tree_len=tree_len,
            batch=torch.arange(batch.num_requests, device=rows.device),
            covers_all=batch.num_rows == num_rows,
        )

    @cached_property
    def num_keys(self) -> int:
        """Keys of the longest request, prefix and tree."""
        return int((self.prefix_len + self.tree_len).max())

    @cached_property
    def padded_rows(self) -> torch.Tensor:
        """`rows` with -1 at padding."""
        return torch.where(self.valid, self.rows, -1)

    def visible(self, num_keys: int, window: int | None = None) -> torch.Tensor:
        """Which keys each row sees [requests, width, num_keys] bool; what stands at padding has no meaning.

        num_keys counts key slots from the start of the sequence. A window is measured in positions, so that a node at
        depth d sees as far back as plain decoding would at that position, whatever its slot.
        """
        slot = torch.arange(num_keys, device=self.rows.device)
        tree_slot = slot - self.prefix_len[:, None]
        in_prefix = tree_slot < 0
        in_tree = (tree_slot >= 0) & (tree_slot < self.tree_len[:, None])
        tree_size = self.tree_depth.shape[1]
        index = tree_slot.clamp(0, tree_size - 1)
        of_tree = torch.arange(tree_size, device=self.rows.device)
        bits = ((self.words[..., of_tree // WORD_BITS] >> (of_tree % WORD_BITS)) & 1).bool()
        visible = bits.gather(2, index[:, None, :].expand(-1, bits.shape[1], -1))
        visible &= in_tree[:, None, :]
        visible |= in_prefix[:, None, :]
        if window is not None:
            key_position = torch.where(in_prefix, slot, self.prefix_len[:, None] + self.tree_depth.gather(1, index))
            visible &= key_position[:, None, :] > (self.position - window)[:, :, None]
        return visible

    def bias(self, num_keys: int, window: int | None = None) -> torch.Tensor:
        """Additive mask [requests, width, num_keys] float32, 0 where visible and -inf elsewhere; see `visible`."""
        visible = self.visible(num_keys, window)
        # A padded row sees the first key, so that its softmax is defined; nobody reads its result.
        visible[..., 0] |= ~self.valid
        return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def padded(starts: torch.Tensor, requests: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, valid, counts) of ragged rows, [requests, width] twice and [requests]; padding repeats the first row.

    starts [requests + 1 or more] int32: rows of request r are starts[r]:starts[r + 1]
    """
    starts = starts[: requests + 1].to(torch.int64)
    counts = starts.diff()
    local = torch.arange(width, device=starts.device)
    valid = local < counts[:, None]
    return starts[:-1, None] + torch.where(valid, local, 0), valid, counts
