# SPDX-License-Identifier: Apache-2.0
"""An SSM on the V2 runner: model and draws of propose/ssm.py, in shapes that do not depend on what is accepted.

Each request reads as many rows as its longest accepted path would need; those behind its last committed token have no
slot to write to and nobody reads their states. So the host never asks the device what was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from specinfer_vllm.attention.tree_batch import TreeBatch
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.children import over_vocabulary
from specinfer_vllm.propose.device_children import DeviceChildSampler, DeviceDraftSampling
from specinfer_vllm.propose.ssm import Level, SsmProposer, pack_bits
from specinfer_vllm.tree.device import DeviceDraws, child_path

HELD = 1e4  # added to the score of what must be verified
NO_SLOT = -1  # vLLM's PAD_SLOT_ID: nothing is written


@dataclass(frozen=True)
class DeviceStep:
    """What the LLM read in a step, of every request of its batch.

    place     [requests] int64                 vLLM's slots, and one behind them for a request that is not there
    slots     [requests] int64                 the same, some slot in the place of the one behind
    history   [slots, max_model_len] int32     committed tokens
    length    [requests] int64                 how many of them; the last is the new root. 0 where there is no request
    first     [requests] int64                 sequence index of the first token that the LLM read
    counts    [requests] int64, on the host    rows to read from there on: bound of length - first
    sampled   [requests] bool                  the prompt is read to its end
    branches  [requests] int64                 most children per node
    last      [requests] int64                 sequence length at which the request ends
    sampling  how children are sampled, None when the rule samples none
    max_len   bound of any length, known to the host
    """

    place: torch.Tensor
    slots: torch.Tensor
    history: torch.Tensor
    length: torch.Tensor
    first: torch.Tensor
    counts: np.ndarray
    sampled: torch.Tensor
    branches: torch.Tensor
    last: torch.Tensor
    sampling: DeviceDraftSampling | None
    max_len: int

    def part(self, requests: slice) -> DeviceStep:
        """Of some of its requests."""
        names = ("place", "slots", "length", "first", "counts", "sampled", "branches", "last")
        mine = {name: getattr(self, name)[requests] for name in names}
        return replace(self, **mine, sampling=None if self.sampling is None else self.sampling.part(requests))


@dataclass(frozen=True)
class ReadRows:
    """Rows of a pass over what the LLM read, request behind request.

    request  [rows] int64
    local    [rows] int64              place among the request's
    start    [requests + 1] int64      rows of each request
    starts   the same in int32, on the device and on the host
    counts   [requests] int64
    """

    request: torch.Tensor
    local: torch.Tensor
    start: torch.Tensor
    starts: tuple[torch.Tensor, torch.Tensor]
    counts: torch.Tensor

    @classmethod
    def of(cls, counts: np.ndarray, device: torch.device) -> ReadRows:
        """counts [requests] int64, on the host; one copy to the device."""
        starts = np.concatenate([[0], np.cumsum(counts)])
        request = np.repeat(np.arange(len(counts)), counts)
        known = request, np.arange(starts[-1]) - starts[request], starts, counts
        sizes = [len(each) for each in known]
        request, local, start, counts = async_tensor_h2d(np.concatenate(known), device=device).split(sizes)
        return cls(request, local, start, (start.int(), torch.from_numpy(starts.astype(np.int32))), counts)


@dataclass(frozen=True)
class LevelRows:
    """What a pass over a level needs of its shape alone: `nodes` of each request, behind others of its tree.

    starts      [requests + 1] int32, on the device and on the host    rows of each request
    tree_start  [requests + 1] int32      nodes read so far
    request     [rows] int64
    behind      [nodes] int64             place behind the root
    depth       [nodes] int64             all alike, 1 = below the root
    row_depth   [rows] int32              one less, as TreeBatch counts
    tree_depth  [requests * tree] int32   of all nodes read so far
    """

    starts: tuple[torch.Tensor, torch.Tensor]
    tree_start: torch.Tensor
    request: torch.Tensor
    behind: torch.Tensor
    depth: torch.Tensor
    row_depth: torch.Tensor
    tree_depth: torch.Tensor

    @classmethod
    def of(cls, requests: int, nodes: int, depths: np.ndarray, device: torch.device) -> LevelRows:
        """depths [tree] of the nodes read so far, the level's last."""
        tree, depth = len(depths), depths[-1]
        start = np.arange(requests + 1, dtype=np.int32)
        arrays = (
            start * nodes,
            start * tree,
            np.repeat(np.arange(requests), nodes),
            np.arange(tree - nodes, tree) + 1,
            np.full(nodes, depth),
            np.full(requests * nodes, depth - 1, np.int32),
            np.tile(depths.astype(np.int32) - 1, requests),
        )
        rows, *others = (async_tensor_h2d(each, device=device) for each in arrays)
        return cls((rows, torch.from_numpy(arrays[0])), *others)


@dataclass(frozen=True)
class Drafted:
    """What one SSM drew, and what it drew from.

    law   [requests, draws] int64             row of the request's laws, -1 = not sampled; None without `laws`
    laws  [requests, laws, tokens] float32    over the tokens that the SSM drafts; None when the rule samples none
    """

    draws: DeviceDraws
    law: torch.Tensor | None = None
    laws: torch.Tensor | None = None

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Drafted:
        """The same of every tensor."""
        draws = DeviceDraws(*map(function, vars(self.draws).values()))
        return Drafted(draws, *(None if other is None else function(other) for other in (self.law, self.laws)))

    @classmethod
    def joined(cls, parts: Sequence[Drafted]) -> Drafted:
        """Of the requests of all parts."""
        if len(parts) == 1:
            return parts[0]
        columns = [torch.cat(each) for each in zip(*(part.tensors() for part in parts), strict=True)]
        count = len(vars(parts[0].draws))
        return cls(DeviceDraws(*columns[:count]), *columns[count:])

    def copy_(self, other: Drafted) -> None:
        """Take over what the other holds; it may have fewer requests."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine[: len(theirs)] = theirs

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in a fixed order."""
        return [each for each in (*vars(self.draws).values(), self.law, self.laws) if each is not None]


class DeviceSsm(SsmProposer):
    """SSM `index` of the options, drafting for all requests of a batch without the host.

    path       [requests, 1 + draws so far] int64    path numbers, the root's in front
    shape      (depth, owner) of the draws, [1, draws] int32
    ranks      per level, [draws] int64: place of each draw among its parent's
    path_rows  by requests: rows of a step in which each reads as much as a longest path
    rows       by requests and level
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Slots whose K/V is no longer valid because a pass failed: not drafted until another request has them.
        self.lost = torch.zeros(len(self.lost), dtype=torch.bool, device=self.device)
        self.shape: tuple[torch.Tensor, torch.Tensor] | None = None
        self.ranks: dict[int, torch.Tensor] = {}
        tree = tree_config(self.llm_config).tree
        self.num_draws = tree.max_nodes // len(tree.ssms)  # of a sampled request
        self.longest_path = tree.longest_path
        self.path_rows: dict[int, ReadRows] = {}
        narrow = self.draft_vocab
        self.draft_ids = None if narrow is None else torch.from_numpy(narrow).to(self.device)
        self.rows: dict[tuple[int, int], LevelRows] = {}

    def draft(self, step: DeviceStep, table: torch.Tensor, states: torch.Tensor) -> Drafted:
        """Draw level by level; what was committed has been read.

        table [requests, blocks] int32: of the SSM's KV cache group; states [requests, hidden]: as `read` gives them
        """
        self.device_step, self.table = step, table
        requests = len(step.counts)
        room = min(self.max_len, self.table.shape[1] * self.block_size)
        self.drafts = step.sampled & (step.length + self.num_slots <= room) & ~self.lost[step.slots]
        # One that does not draft reads the front of its sequence, so that no key stands outside the block table.
        root = (step.length - 1) * self.drafts
        self.idle, self.prefix_len = ~self.drafts[:, None], (root + 1).int()
        self.path = torch.zeros(requests, 1, dtype=torch.int64, device=self.device)
        ids = None if self.head is None else self.head.ids
        self.sampler = DeviceChildSampler(step.sampling, step.length, self.index, ids)
        levels = self.levels(states, torch.arange(requests, device=self.device), root, self.depth)
        drafted = Drafted(self.as_draws(levels))
        if step.sampling is None:
            return drafted
        law = torch.cat([level.law for level in levels], dim=1)
        return replace(drafted, law=law, laws=torch.cat(self.sampler.kept, dim=1))

    @property
    def block_size(self) -> int:
        """Slots per block of its KV cache group."""
        return self.groups[0].kv_cache_spec.block_size

    @property
    def widest_level(self) -> int:
        """Most nodes of a request that one pass reads."""
        return max(self._read_sizes, default=1)

    def read(self, step: DeviceStep, table: torch.Tensor) -> torch.Tensor:
        """Catch up with what was committed. Returns the hidden state at each request's last token [requests, hidden].

        table [requests, blocks] int32: of the SSM's KV cache group
        """
        self.device_step, self.table = step, table
        rows = self.read_rows(step.counts)
        index = step.first[rows.request] + rows.local
        tokens = step.history[step.slots[rows.request], index.clamp(max=step.history.shape[1] - 1)]
        hidden = self.run_pass(
            tokens=tokens.long(),
            positions=index,
            index=index.masked_fill(index >= step.length[rows.request], -1),
            request=rows.request,
            starts=rows.starts,
            seq_len=step.first + rows.counts,
        )
        committed = torch.minimum((step.length - step.first).clamp(min=1), rows.counts)
        return hidden[rows.start[:-1] + committed - 1]

    def read_rows(self, counts: np.ndarray) -> ReadRows:
        """Of a step; where every request reads a longest path they are kept for good."""
        if (counts != self.longest_path).any():
            return ReadRows.of(counts, self.device)
        if len(counts) not in self.path_rows:
            self.path_rows[len(counts)] = ReadRows.of(counts, self.device)
        return self.path_rows[len(counts)]

    def draw(
        self, states: torch.Tensor, parents: tuple[torch.Tensor, torch.Tensor] | None, first: int, level: int
    ) -> Level:
        """As SsmProposer.draw; children past a request's bound do not exist, nor what hangs on them."""
        drawn = super().draw(states, parents, first, level)
        above = self.path.gather(1, drawn.parent)
        self.path = torch.cat([self.path, child_path(above, drawn.token)], dim=1)
        if level not in self.ranks:
            width, kept = self.options.width, slice(None)
            if self.static is not None:
                width, kept = self.static[level].width, self.static[level].kept
            self.ranks[level] = torch.arange(states.shape[1] * width, device=self.device)[kept] % width
        drawn.score.masked_fill_(self.ranks[level] >= self.device_step.branches[:, None], -torch.inf)
        return drawn

    def read_level(
        self, token: torch.Tensor, ancestors: torch.Tensor, depth: int, root: torch.Tensor, requests: torch.Tensor
    ) -> torch.Tensor:
        """One pass over a level's frontier, as SsmProposer.read_level."""
        count, nodes = token.shape
        tree = ancestors.shape[2]
        rows = self.level_rows(count, nodes, depth)
        batch = None
        if tree > depth:  # some level holds more than one node, so not everything behind the root is an ancestor
            batch = TreeBatch(
                num_requests=count,
                num_rows=count * nodes,
                max_rows=nodes,
                query_start=rows.starts[0],
                prefix_len=self.prefix_len,
                ancestors=pack_bits(ancestors).flatten(0, 1),
                depth=rows.tree_depth,
                tree_start=rows.tree_start,
                row_depth=rows.row_depth,
                max_slots=tree,
            )
        hidden = self.run_pass(
            tokens=token.flatten(),
            positions=(root[:, None] + rows.depth).flatten(),
            index=(root[:, None] + rows.behind).masked_fill(self.idle, -1).flatten(),
            request=rows.request,
            starts=rows.starts,
            seq_len=root + (1 + tree),
            tree=batch,
        )
        return hidden.view(count, nodes, -1)

    def level_rows(self, requests: int, nodes: int, depth: int) -> LevelRows:
        """Of the level at this depth, kept for good."""
        if (requests, depth) not in self.rows:
            sizes = [*self._read_sizes[: depth - 1], nodes]
            depths = np.repeat(np.arange(1, depth + 1), sizes)
            self.rows[requests, depth] = LevelRows.of(requests, nodes, depths, self.device)
        return self.rows[requests, depth]

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
        step, block_size = self.device_step, self.block_size
        room = min(self.max_len, self.table.shape[1] * block_size)
        inside = index.clamp(0, room - 1)
        slot = torch.add(inside % block_size, self.table[request, inside // block_size], alpha=block_size)
        slot.masked_fill_(inside != index, NO_SLOT)
        counts = starts[1].diff()
        longest = min(step.max_len + int(counts.max()) + self.num_slots, self.table.shape[1] * block_size)
        common = CommonAttentionMetadata(
            query_start_loc=starts[0],
            query_start_loc_cpu=starts[1],
            seq_lens=seq_len.clamp(max=self.table.shape[1] * block_size).to(torch.int32),
            seq_lens_cpu_upper_bound=torch.full((len(counts),), longest, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=longest,
            block_table_tensor=self.table,
            slot_mapping=slot,
            causal=True,
            positions=positions,
        )
        for group in self.groups:
            group.get_metadata_builder().tree = tree
        built = [group.build_metadata(common, 0) for group in self.groups]
        bounded = positions.clamp(max=self.model_config.max_model_len - 1)
        return self.forward(tokens, bounded, slot, built)

    def as_draws(self, levels: list[Level]) -> DeviceDraws:
        """The drawn levels; requests that do not draft have none."""
        token, score, parent = (
            torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("token", "score", "parent")
        )
        if self.shape is None:
            depth = np.repeat(np.arange(1, len(levels) + 1, dtype=np.int32), [each.token.shape[1] for each in levels])
            shape = np.stack([depth, np.full_like(depth, 1 << self.index)])[:, None]
            self.shape = async_tensor_h2d(shape, device=self.device).unbind()
        depth, owner = (each.expand_as(token) for each in self.shape)
        score = score.masked_fill(self.idle, -torch.inf)
        if self.sampler.sampling is not None:
            score, owner = self._held(levels, score, owner)
        return DeviceDraws(token.int(), parent.int(), score, depth, self.path[:, 1:], owner)

    def _held(self, levels: list[Level], score: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and owners when children are sampled.

        A sampled request verifies a number of draws that was fixed before they were made, by their rank alone: a budget
        that chose among them would bias the rules. They all stay, in front of whatever others propose. Of a token that
        was drawn again the first draw alone carries the owner.
        """
        sampled = self.sampler.sampling.sampled[:, None]
        rank = (-score).argsort(dim=1, stable=True).argsort(dim=1)
        held = score.masked_fill(rank >= self.num_draws, -torch.inf) + HELD
        twin = torch.cat([level.twin for level in levels], dim=1)
        is_first = twin == torch.arange(1, twin.shape[1] + 1, device=self.device)
        return torch.where(sampled, held, score), owner * is_first

    def widened(self, laws: torch.Tensor) -> torch.Tensor:
        """Laws of this SSM's draws, which need not be loaded here, over the whole vocabulary."""
        return over_vocabulary(laws, self.draft_ids, self.llm_config.model_config.get_vocab_size())

    @property
    def num_law_tokens(self) -> int:
        """Tokens that it may draft."""
        return self.num_tokens if self.draft_ids is None else len(self.draft_ids)
