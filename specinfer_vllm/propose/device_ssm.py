# SPDX-License-Identifier: Apache-2.0
"""An SSM on the V2 runner: model and draws of propose/ssm.py, in shapes that do not depend on what is accepted.

Each request reads as many rows as its longest accepted path would need; those behind its last committed token have no
slot to write to and nobody reads their states. So the host never asks the device what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.propose.children import ChildSampler
from specinfer_vllm.propose.ssm import Level, SsmProposer, pack_bits
from specinfer_vllm.tree.device import DeviceDraws, child_path

NO_SLOT = -1  # vLLM's PAD_SLOT_ID: nothing is written


@dataclass(frozen=True)
class DeviceStep:
    """What the LLM read in a step, of every request of its batch.

    slots     [requests] int64                 vLLM's
    history   [slots, max_model_len] int32     committed tokens
    length    [requests] int64                 how many of them; the last is the new root
    first     [requests] int64                 sequence index of the first token that the LLM read
    counts    [requests] int64, on the host    rows to read from there on: bound of length - first
    table     [requests, blocks] int32         of the SSM's KV cache group
    branches  [requests] int32                 most children per node
    max_len   bound of any length, known to the host
    """

    slots: torch.Tensor
    history: torch.Tensor
    length: torch.Tensor
    first: torch.Tensor
    counts: np.ndarray
    table: torch.Tensor
    branches: torch.Tensor
    max_len: int


class DeviceSsm(SsmProposer):
    """SSM `index` of the options, drafting for all requests of a batch without the host."""

    def draws(self, step: DeviceStep) -> DeviceDraws:
        """Catch up with what was committed, then draw level by level."""
        self.device_step = step
        requests = len(step.counts)
        states = self.read_committed(step)
        root = step.length - 1
        self.sampler = ChildSampler(None, root, self.index, None if self.head is None else self.head.ids)
        every = torch.arange(requests, device=self.device)
        levels = self.levels(states, every, root, self.depth)
        drafts = step.length + self.num_slots <= self.max_len
        return self.as_draws(levels, drafts)

    def read_committed(self, step: DeviceStep) -> torch.Tensor:
        """Read the step's tokens. Returns the hidden state at each request's last one [requests, hidden]."""
        starts = np.concatenate([[0], np.cumsum(step.counts)])
        request = async_tensor_h2d(np.repeat(np.arange(len(step.counts)), step.counts), device=self.device)
        start = async_tensor_h2d(starts.astype(np.int32), device=self.device)
        local = torch.arange(int(starts[-1]), device=self.device) - start[request]
        index = step.first[request] + local
        tokens = step.history[step.slots[request], index.clamp(max=step.history.shape[1] - 1)]
        hidden = self.run_pass(
            tokens=tokens.long(),
            positions=index,
            index=torch.where(index < step.length[request], index, -1),
            request=request,
            starts=(start, torch.from_numpy(starts.astype(np.int32))),
            seq_len=step.first + async_tensor_h2d(step.counts, device=self.device),
        )
        last = start[:-1] + (step.length - 1 - step.first).clamp(min=0)
        return hidden[torch.minimum(last, start[1:] - 1).long()]

    def draw(
        self, states: torch.Tensor, parents: tuple[torch.Tensor, torch.Tensor] | None, first: int, level: int
    ) -> Level:
        """As SsmProposer.draw; children past a request's bound do not exist, nor what hangs on them."""
        drawn = super().draw(states, parents, first, level)
        width, kept = self.options.width, slice(None)
        if self.static is not None:
            width, kept = self.static[level].width, self.static[level].kept
        rank = torch.arange(states.shape[1] * width, device=self.device)[kept] % width
        drawn.score.masked_fill_(rank >= self.device_step.branches[:, None], -torch.inf)
        return drawn

    def read_level(
        self, token: torch.Tensor, ancestors: torch.Tensor, depth: int, root: torch.Tensor, requests: torch.Tensor
    ) -> torch.Tensor:
        """One pass over a level's frontier, as SsmProposer.read_level."""
        count, nodes = token.shape
        tree = ancestors.shape[2]
        index = root[:, None] + 1 + torch.arange(tree - nodes, tree, device=self.device)
        starts = torch.arange(count + 1, dtype=torch.int32)
        start = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        batch = None
        if tree > depth:  # some level holds more than one node, so not everything behind the root is an ancestor
            row_depth = torch.full((count * nodes,), depth - 1, dtype=torch.int32, device=self.device)
            batch = TreeBatch(
                num_requests=count,
                num_rows=count * nodes,
                max_rows=nodes,
                query_start=start * nodes,
                prefix_len=(root + 1).int(),
                ancestors=pack_bits(ancestors).flatten(0, 1),
                depth=(self.read_depths(tree, depth, nodes).to(self.device, torch.int32) - 1).repeat(count),
                tree_start=start * tree,
                row_depth=row_depth,
                max_slots=tree,
            )
        hidden = self.run_pass(
            tokens=token.flatten(),
            positions=(root + depth)[:, None].expand(count, nodes).flatten(),
            index=index.flatten(),
            request=torch.arange(count, device=self.device)[:, None].expand(count, nodes).flatten(),
            starts=(start * nodes, starts * nodes),
            seq_len=root + 1 + tree,
            tree=batch,
        )
        return hidden.view(count, nodes, -1)

    def run_pass(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        index: torch.Tensor,
        request: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor],
        seq_len: torch.Tensor,
        tree: TreeBatch | None = None,
    ) -> torch.Tensor:
        """One pass of the SSM.

        tokens, positions  [rows] int64
        index              [rows] int64        place in the sequence, which gives the slot; -1 = none
        request            [rows] int64        row of the block table
        starts             [requests + 1] int32, on the device and on the host: rows of each request
        seq_len            [requests] int64    sequence length behind the last row
        Returns the hidden states [rows, hidden].
        """
        step, block_size = self.device_step, self.groups[0].kv_cache_spec.block_size
        room = min(self.max_len, step.table.shape[1] * block_size)
        block = (index.clamp(min=0) // block_size).clamp(max=step.table.shape[1] - 1)
        slot = step.table[request, block].long() * block_size + index % block_size
        slot = torch.where((index >= 0) & (index < room), slot, NO_SLOT)
        counts = starts[1].diff()
        longest = min(step.max_len + int(counts.max()) + self.num_slots, step.table.shape[1] * block_size)
        common = CommonAttentionMetadata(
            query_start_loc=starts[0],
            query_start_loc_cpu=starts[1],
            seq_lens=seq_len.clamp(max=step.table.shape[1] * block_size).to(torch.int32),
            seq_lens_cpu_upper_bound=torch.full((len(counts),), longest, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=longest,
            block_table_tensor=step.table,
            slot_mapping=slot,
            causal=True,
            positions=positions,
        )
        metadata = {}
        for group in self.groups:
            builder = group.get_metadata_builder()
            builder.tree = tree
            built = builder.build(0, common)
            metadata.update(dict.fromkeys(set(group.layer_names) & set(self.layer_names), built))
        slots = dict.fromkeys(self.layer_names, slot)
        with set_forward_context(metadata, self.llm_config, num_tokens=len(tokens), slot_mapping=slots):
            bounded = positions.clamp(max=self.model_config.max_model_len - 1)
            return self.model(input_ids=tokens.contiguous(), positions=bounded.contiguous())

    def as_draws(self, levels: list[Level], drafts: torch.Tensor) -> DeviceDraws:
        """The drawn levels; requests [requests] bool that do not draft have none."""
        token, score, parent = (
            torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("token", "score", "parent")
        )
        path = torch.zeros(len(token), 1, dtype=torch.int64, device=self.device)
        depth = torch.empty_like(token, dtype=torch.int32)
        at = 0
        for number, level in enumerate(levels, start=1):
            above = path.gather(1, level.parent)
            path = torch.cat([path, child_path(above, level.token)], dim=1)
            depth[:, at : at + level.token.shape[1]] = number
            at += level.token.shape[1]
        score = score.masked_fill(~drafts[:, None], -torch.inf)
        owner = torch.full_like(depth, 1 << self.index)
        return DeviceDraws(token.int(), parent.int(), score, depth, path[:, 1:], owner)
