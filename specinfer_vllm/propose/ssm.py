# SPDX-License-Identifier: Apache-2.0
"""A small speculative model: any decoder that vLLM loads, with layers of its own in the LLM's paged KV pool.

Every step it first reads what the LLM read (prompt chunks, the accepted path) and the new root, so its K/V is valid for
every committed token after acceptance, prefix hits, chunked prefill and preemption alike; then it draws level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import LoadConfig, ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.utils import replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata

from specinfer_vllm.attention.cpu import TreePass
from specinfer_vllm.attention.tree_mask import WORD_BITS, TreeMask
from specinfer_vllm.config import AUTO, SHARDED, ssm_slots
from specinfer_vllm.engine.vocabulary import draftable_tokens
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.patches.tensor_parallel import this_rank_alone, unsharded
from specinfer_vllm.propose import bf16_weights
from specinfer_vllm.propose.children import ChildSampler
from specinfer_vllm.propose.draft_vocab import NarrowHead, read_draft_vocab
from specinfer_vllm.propose.proposer import DraftBatch, Proposer
from specinfer_vllm.tree.budget import level_pays, worthwhile_alone
from specinfer_vllm.tree.static import StaticTree
from specinfer_vllm.tree.topology import TokenTrees, from_arrays, roots


@dataclass(frozen=True)
class SsmStep:
    """What the LLM read this step, for every request of its batch.

    history      [batch, max_model_len] int32    committed tokens
    slots        [requests] int64                engine slots, negative without one
    first        [requests] int64                sequence index of the first token the LLM read
    end          [requests] int64                behind the last token to read, the new root included once there is one
    block_table  [requests, blocks] int32        of the SSM's KV cache group
    """

    history: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    end: np.ndarray
    block_table: torch.Tensor


@dataclass(frozen=True)
class Level:
    """The draws of one level, the same number for each request; draw i has local index first + i.

    token, score  [requests, draws]    score = log of the estimated chance that the path is accepted, -inf where the law
                                       had no further token (token 0 there)
    parent        [requests, draws]    local index of the parent
    twin          [requests, draws]    local index of the first draw of this token under this parent: usually its own
    law           [requests, draws]    row of the laws it was sampled from, -1 = not sampled
    first         local index of the level's first draw
    """

    token: torch.Tensor
    score: torch.Tensor
    parent: torch.Tensor
    twin: torch.Tensor
    law: torch.Tensor
    first: int


@dataclass(frozen=True)
class LevelShape:
    """One level of a static tree; nodes are counted within the level.

    width     draws below every node that was read: as many as the widest of them keeps
    kept      which of these draws, node behind node, are in the tree: [nodes] int64, or all
    frontier  [read] int64    which of the kept have children, and are read to draw the next level
    """

    width: int
    kept: torch.Tensor | slice
    frontier: torch.Tensor

    @classmethod
    def of(cls, children: Sequence[int], below: Sequence[int], device: torch.device) -> LevelShape:
        """children [nodes] of the level above, below [nodes] of this one."""
        kept, width = torch.tensor([each for each in children if each]), max(children)
        draws = torch.arange(width) < kept[:, None]
        kept = slice(None) if bool(draws.all()) else draws.flatten().nonzero()[:, 0].to(device)
        return cls(width, kept, torch.tensor(below).nonzero()[:, 0].to(device))

    @classmethod
    def of_tree(cls, tree: StaticTree | None, device: torch.device) -> list[LevelShape] | None:
        """Level by level; None without a static tree."""
        if tree is None:
            return None
        below = (*tree.levels[1:], (0,) * sum(tree.levels[-1]))
        return [cls.of(*each, device) for each in zip(tree.levels, below, strict=True)]


class SsmProposer(Proposer):
    """SSM `index` of the options."""

    last = True

    def __init__(self, vllm_config: VllmConfig, index: int) -> None:
        config = tree_config(vllm_config)
        self.options, self.index = config.tree.ssms[index], index
        self.name = f"ssm{index}"
        self.device = torch.device(vllm_config.device_config.device)
        self.static = LevelShape.of_tree(config.tree.static_trees[index], self.device)
        self.max_depth = config.tree.max_depth
        self.row_cost, self.level_cost = config.tree.cost_of_row, config.tree.cost_of_level
        self.num_ssms = len(config.tree.ssms)
        self.num_slots = ssm_slots(config.tree, index)
        self.llm_config = vllm_config
        is_parallel = vllm_config.parallel_config.tensor_parallel_size > 1
        self.is_whole = is_parallel and config.tree.ssm_placement != SHARDED
        self.model_config = ssm_model_config(self.options.model, self.options.revision, vllm_config)
        self.max_len = min(self.model_config.max_model_len, vllm_config.model_config.max_model_len)
        self.num_tokens = draftable_tokens(self.model_config.get_vocab_size(), vllm_config.model_config)
        self.draft_vocab = read_draft_vocab(self.options.model, self.options.revision, self.num_tokens)
        self.head: NarrowHead | None = None
        self.layer_names: list[str] = []
        self.groups: list[Any] = []
        self.step: SsmStep | None = None
        # Requests whose K/V is no longer valid because a pass failed: not drafted until they end.
        self.lost = np.zeros(vllm_config.scheduler_config.max_num_seqs, bool)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the weights beside the LLM's, under a prefix of its own (vLLM refuses equal layer names)."""
        before = attention_layers(self.llm_config)
        # Draws follow the law to its last bits, and in bfloat16 these depend on who else is in the batch.
        may_round = self.options.dtype == AUTO and not tree_config(self.llm_config).tree.samples_drafts
        bf16 = may_round and bf16_weights.applies(self.llm_config.model_config, self.model_config)
        quant_config = bf16_weights.Bf16Weights() if bf16 else None
        parallel = self.llm_config.parallel_config
        config = replace(
            self.llm_config,
            model_config=self.model_config,
            quant_config=quant_config,
            parallel_config=unsharded(parallel) if self.is_whole else parallel,
        )
        load_config = LoadConfig(download_dir=self.llm_config.load_config.download_dir)
        with set_model_tag(self.name), self.own_group():
            self.model = get_model(vllm_config=config, prefix=self.name, load_config=load_config)
        self.layer_names = sorted(attention_layers(self.llm_config) - before)
        if self.draft_vocab is not None:
            self.head = NarrowHead.of(self.model, self.draft_vocab, bf16_weights.matrix if bf16 else None)

    def own_group(self) -> AbstractContextManager[None]:
        """Where its layers are built and run: on the LLM's tensor-parallel ranks, or each on its own."""
        return this_rank_alone() if self.is_whole else nullcontext()

    def bind(self, attn_groups: Sequence[Sequence[Any]]) -> int:
        """Find the metadata builders of the SSM's layers, once the KV cache is there. Returns the KV cache group.

        ValueError when its layers lie in several groups: they would need several block tables.
        """
        mine = set(self.layer_names)
        every = [(i, group) for i, groups in enumerate(attn_groups) for group in groups]
        found = [(i, group) for i, group in every if mine & set(group.layer_names)]
        self.groups = [group for _, group in found]
        if len({i for i, _ in found}) != 1:
            raise ValueError(
                f"speculative_config.ssms: {self.options.model!r} mixes kinds of attention layers; use another"
            )
        return found[0][0]

    def warm_up(self, rows: int = 8) -> torch.Tensor:
        """One pass without attention, as vLLM warms up its own models: compiles the SSM. Returns its hidden states."""
        # Two tensors: what is compiled for one in both places reads the tokens for positions ever after.
        tokens, positions = (torch.zeros(rows, dtype=torch.int64, device=self.device) for _ in range(2))
        with set_forward_context(None, self.llm_config, num_tokens=rows), self.own_group():
            return self.model(input_ids=tokens, positions=positions)

    # -- drafting ------------------------------------------------------------------------------------------------------

    def begin(self, step: SsmStep) -> None:
        """The next `propose` or `catch_up` reads what this step committed."""
        self.step = step

    def finish(self, slot: int) -> None:
        """A new request on this slot starts with valid K/V."""
        self.lost[slot] = False

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """Catch up all requests of the step, then draw trees for those of the batch."""
        slots = self.step.slots
        try:
            return self._propose(batch)
        except Exception:
            self.lost[slots[slots >= 0]] = True
            raise

    def _propose(self, batch: DraftBatch) -> TokenTrees:
        hidden = self.catch_up()
        self.laws = None
        root = torch.from_numpy(batch.lengths - 1)
        fits = (batch.lengths + self.num_slots <= self.max_len) & ~self.lost[batch.slots] & (batch.max_depth > 0)
        chosen = np.flatnonzero(fits)
        ids = None if self.head is None else self.head.ids
        self.sampler = ChildSampler.of(batch.sampling, chosen, batch.lengths, self.index, ids)
        if not len(chosen):
            return roots(batch.root_tokens())
        depth = int(batch.max_depth[chosen].max())
        covered = np.zeros((len(chosen), depth)) if batch.covered is None else batch.covered[chosen]
        levels = self.levels(hidden, torch.from_numpy(batch.rows[chosen]), root[chosen], depth, covered)
        self.laws = self.sampler.laws(self.llm_config.model_config.get_vocab_size())
        return self.trees(levels, batch, chosen)

    def catch_up(self) -> torch.Tensor:
        """Read the step's tokens. Returns the hidden state at each request's last one [requests, hidden]."""
        step, self.step = self.step, None
        self.table = step.block_table
        end = np.minimum(step.end, self.max_len)
        counts = np.maximum(end - step.first, 0)
        active = np.flatnonzero(counts)
        if not len(active):  # every text is longer than the SSM can read
            return torch.zeros(len(counts), 1)
        request = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts) + step.first[request]
        hidden = self.run(
            tokens=torch.from_numpy(step.history[request, position].astype(np.int64)),
            positions=torch.from_numpy(position),
            index=torch.from_numpy(position),
            requests=torch.from_numpy(active),
            counts=torch.from_numpy(counts[active]),
            seq_len=torch.from_numpy(end[active]),
        )
        last = torch.zeros(len(counts), dtype=torch.int64)
        last[torch.from_numpy(active)] = torch.from_numpy(np.cumsum(counts[active]) - 1)
        return hidden[last]

    def levels(
        self,
        hidden: torch.Tensor,
        requests: torch.Tensor,
        root: torch.Tensor,
        max_depth: int,
        covered: np.ndarray | None = None,
    ) -> list[Level]:
        """Draw level by level.

        hidden [batch, ..]; requests [requests] int64 rows of the batch that draw; root [requests] last index; covered
        [requests, levels] as in DraftBatch, None = every level is drawn
        """
        drawn = [self.draw(hidden[requests][:, None], None, first=1, level=0)]
        parents: list[torch.Tensor] = []  # their scores, level by level, [requests, nodes]
        read: list[torch.Tensor] = []  # local indices of the nodes read so far, level by level, [requests, nodes]
        ancestors = torch.zeros(len(requests), 0, 0, dtype=torch.bool, device=self.device)
        while len(drawn) < min(max_depth, self.depth):
            level = drawn[-1]
            frontier = self.frontier(level, len(drawn))
            token, score = level.token.gather(1, frontier), level.score.gather(1, frontier)
            parents.append(score)
            if covered is not None and not self.pays(drawn, parents, covered[:, len(drawn)]):
                break
            ancestors = extend(ancestors, read, level.parent.gather(1, frontier))
            read.append(frontier + level.first)
            states = self.read_level(token, ancestors, len(drawn), root, requests)
            first = level.first + level.token.shape[1]
            drawn.append(self.draw(states, (score, frontier + level.first), first, level=len(drawn)))
        return drawn

    def pays(self, drawn: list[Level], parents: list[torch.Tensor], covered: np.ndarray) -> bool:
        """Whether one more level is drawn; parents, covered: `reads` and `covered` of level_pays.

        Where children are sampled it is: a depth that knew the tokens would choose among draws.
        """
        if not self.level_cost or self.sampler.sampling is not None:
            return True
        scores = [level.score.numpy() for level in drawn]
        return level_pays(scores, [each.numpy() for each in parents], covered, self.row_cost, self.level_cost)

    @property
    def depth(self) -> int:
        """Levels it draws at most."""
        return len(self.static) if self.static is not None else self.max_depth

    def frontier(self, level: Level, depth: int) -> torch.Tensor:
        """Which nodes at this depth are read to draw the next level [requests, nodes]: a static tree's or EAGLE-2's.

        The former have children, the latter are the best by path.
        """
        nodes = level.token.shape[1]
        if self.static is not None:
            return self.static[depth - 1].frontier.expand(len(level.token), -1)
        if nodes <= self.options.width:
            return torch.arange(nodes, device=self.device).expand(len(level.token), nodes)
        is_node = level.twin == torch.arange(level.first, level.first + nodes, device=self.device)
        score = level.score.masked_fill(~is_node, -torch.inf)
        return score.topk(self.options.width, dim=1).indices.sort(dim=1).values

    def draw(
        self, states: torch.Tensor, parents: tuple[torch.Tensor, torch.Tensor] | None, first: int, level: int
    ) -> Level:
        """The children of each state [requests, nodes, hidden]; padded ids are never drawn.

        parents  (score, local index) [requests, nodes] of the states' nodes, None at the root
        """
        width, kept = self.options.width, slice(None)
        if self.static is not None:
            width, kept = self.static[level].width, self.static[level].kept
        requests, nodes = states.shape[:2]
        logits = self.logits(states.flatten(0, 1))
        if parents is None:
            path = torch.zeros(requests, nodes, device=self.device)
            parents = path, torch.zeros_like(path, dtype=torch.int64)
        path, parent = parents
        children = self.sampler.children(logits.view(requests, nodes, -1), width, parent)
        score = (path[:, :, None] + children.score).masked_fill(children.token < 0, -torch.inf)
        parent = parent[:, :, None].expand_as(children.token)
        # A node keeps the first of its draws, so that a draw's twin is as far before it as it was among all of them.
        token, score, parent, back, law = (
            each.flatten(1)[:, kept] for each in (children.token, score, parent, children.back, children.law)
        )
        twin = torch.arange(first, first + token.shape[1], device=self.device) - back
        return Level(token.clamp(min=0), score, parent, twin, law, first)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, draftable tokens] float32 of states [rows, hidden]; of the draft vocabulary where there is one."""
        if self.head is not None:
            return self.head.logits(states).float()
        with self.own_group():
            return self.model.compute_logits(states)[:, : self.num_tokens].float()

    def read_level(
        self, token: torch.Tensor, ancestors: torch.Tensor, depth: int, root: torch.Tensor, requests: torch.Tensor
    ) -> torch.Tensor:
        """One pass over a level's frontier. token [requests, nodes]; ancestors [requests, nodes, read so far].

        Returns hidden states [requests, nodes, hidden]. Slots follow the root in reading order; positions are depths.
        """
        count, nodes = token.shape
        tree = ancestors.shape[2]
        index = root[:, None] + 1 + torch.arange(tree - nodes, tree)
        position = (root + depth)[:, None].expand(count, nodes)
        mask = None
        if tree > depth:  # some level holds more than one node, so not everything behind the root is an ancestor
            mask = TreeMask(
                rows=torch.arange(count * nodes).view(count, nodes),
                valid=torch.ones(count, nodes, dtype=torch.bool),
                words=pack_bits(ancestors),
                position=position.contiguous(),
                tree_depth=(self.read_depths(tree, depth, nodes) - 1).expand(count, tree).contiguous(),
                prefix_len=root + 1,
                tree_len=torch.full((count,), tree),
                batch=torch.arange(count),
                covers_all=True,
            )
        hidden = self.run(
            tokens=token.flatten(),
            positions=position.flatten(),
            index=index.flatten(),
            requests=requests,
            counts=torch.full((count,), nodes),
            seq_len=root + 1 + tree,
            mask=mask,
        )
        return hidden.view(count, nodes, -1)

    def read_depths(self, tree: int, depth: int, nodes: int) -> torch.Tensor:
        """Depth of each node read so far [tree] int64."""
        sizes = self._read_sizes[: depth - 1]
        return torch.repeat_interleave(torch.arange(1, depth + 1), torch.tensor([*sizes, tree - sum(sizes)]))

    @property
    def _read_sizes(self) -> list[int]:
        """Nodes read on each level."""
        if self.static is None:
            return [self.options.width] * self.max_depth
        return [len(level.frontier) for level in self.static]

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        index: torch.Tensor,
        requests: torch.Tensor,
        counts: torch.Tensor,
        seq_len: torch.Tensor,
        mask: TreeMask | None = None,
    ) -> torch.Tensor:
        """One pass of the SSM.

        tokens, positions, index  [rows] int64         index = place in the sequence, which gives the slot
        requests                  [requests] int64     rows of the block table
        counts, seq_len           [requests] int64     query rows, and sequence length behind the last of them
        Returns the hidden states [rows, hidden].
        """
        table = self.table[requests]
        block_size = self.groups[0].kv_cache_spec.block_size
        owner = torch.repeat_interleave(torch.arange(len(requests)), counts)
        slot_mapping = table[owner, index // block_size].to(torch.int64) * block_size + index % block_size
        starts = torch.zeros(len(requests) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_len.to(torch.int32),
            seq_lens_cpu_upper_bound=seq_len.to(torch.int32),
            num_reqs=len(requests),
            num_actual_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_len.max()),
            block_table_tensor=table,
            slot_mapping=slot_mapping,
            causal=True,
            positions=positions,
        )
        built = [group.build_metadata(common, 0) for group in self.groups]
        for metadata in built:
            metadata.tree = None if mask is None else TreePass.of(mask, table, block_size)
        return self.forward(tokens, positions, slot_mapping, built)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, built: Sequence[Any]
    ) -> torch.Tensor:
        """The model's pass over tokens, positions, slot_mapping [rows] int64; built: attention metadata of each group.

        Returns the hidden states [rows, hidden].
        """
        metadata = {}
        for group, mine in zip(self.groups, built, strict=True):
            metadata.update(dict.fromkeys(set(group.layer_names) & set(self.layer_names), mine))
        slots = dict.fromkeys(self.layer_names, slot_mapping)
        context = set_forward_context(metadata, self.llm_config, num_tokens=len(tokens), slot_mapping=slots)
        with context, self.own_group():
            # vLLM's CPU kernels read raw pointers: an expanded view would send them out of bounds.
            return self.model(input_ids=tokens.contiguous(), positions=positions.contiguous())

    def trees(self, levels: list[Level], batch: DraftBatch, chosen: np.ndarray) -> TokenTrees:
        """The drawn levels as TokenTrees; requests that did not draw keep their root only."""
        drawn = Drawn.of(levels)
        exists = drawn.exist(batch.max_depth[chosen])
        if batch.sampling is not None:
            score = np.where(exists, drawn.score, -np.inf)
            limit = np.minimum(worthwhile_alone(score, self.row_cost), batch.max_nodes[chosen] // self.num_ssms)
            limit[~batch.sampled[chosen]] = exists.shape[1]
            exists &= ranks(score) < limit[:, None]
        return drawn.trees(batch.root_tokens(), chosen, exists)


@dataclass(frozen=True)
class Drawn:
    """All draws of one step, arrays [requests, draws] as in Level; draw i has local index i + 1.

    depth  [draws]
    """

    token: np.ndarray
    score: np.ndarray
    parent: np.ndarray
    twin: np.ndarray
    law: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, levels: list[Level]) -> Drawn:
        """Level behind level."""
        names = ("token", "score", "parent", "twin", "law")
        arrays = {name: torch.cat([getattr(level, name) for level in levels], dim=1).numpy() for name in names}
        sizes = [level.token.shape[1] for level in levels]
        return cls(**arrays, depth=np.repeat(np.arange(len(levels)) + 1, sizes))

    @property
    def is_node(self) -> np.ndarray:
        """Draws [requests, draws] that are the first of their token: a node stands there."""
        return self.twin == np.arange(self.twin.shape[1]) + 1

    def exist(self, max_depth: np.ndarray) -> np.ndarray:
        """Draws [requests, draws] that have a token, are not deeper than max_depth [requests], and hang on a node."""
        exists = (self.score > -np.inf) & (self.depth <= max_depth[:, None])
        nodes = np.ones((len(exists), exists.shape[1] + 1), bool)  # the root first
        for depth in range(1, self.depth[-1] + 1):
            at = np.flatnonzero(self.depth == depth)
            exists[:, at] &= np.take_along_axis(nodes, self.parent[:, at], axis=1)
            nodes[:, at + 1] = exists[:, at] & self.is_node[:, at]
        return exists

    def trees(self, root_tokens: np.ndarray, chosen: np.ndarray, kept: np.ndarray) -> TokenTrees:
        """Trees of the kept draws [requests, draws]; a kept draw's parent and twin are kept, too.

        root_tokens  [all requests]; chosen [requests] int64 says which of them the rows here are
        """
        alive = kept & self.is_node
        place = np.concatenate([np.zeros((len(alive), 1), np.int64), np.cumsum(alive, axis=1)], axis=1)
        offsets = offsets_of(alive, chosen, len(root_tokens), extra=1)
        is_root = np.zeros(offsets[-1], bool)
        is_root[offsets[:-1]] = True

        def rows(at_roots: Any, at_nodes: np.ndarray, dtype: Any) -> np.ndarray:
            values = np.empty(len(is_root), dtype)
            values[is_root], values[~is_root] = at_roots, at_nodes
            return values

        return from_arrays(
            offsets=offsets,
            tokens=rows(root_tokens, self.token[alive], np.int32),
            parent=rows(-1, np.take_along_axis(place, self.parent, axis=1)[alive], np.int32),
            score=rows(0.0, self.score[alive], np.float32),
            draw_offsets=offsets_of(kept, chosen, len(root_tokens), extra=0),
            draw_node=np.take_along_axis(place, self.twin, axis=1)[kept],
            draw_law=self.law[kept],
        )


def offsets_of(kept: np.ndarray, chosen: np.ndarray, requests: int, extra: int) -> np.ndarray:
    """Offsets [requests + 1] of the kept entries of each chosen request, and `extra` more of every request."""
    counts = np.full(requests, extra)
    counts[chosen] += kept.sum(axis=1)
    return np.concatenate([[0], np.cumsum(counts)])


def ranks(score: np.ndarray) -> np.ndarray:
    """Place of each draw among its request's [requests, draws], best first, ties by the earlier one."""
    return (-score).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")


def extend(ancestors: torch.Tensor, read: list[torch.Tensor], parent: torch.Tensor) -> torch.Tensor:
    """Visibility of the next frontier among all nodes read [requests, frontier, read + frontier] bool.

    ancestors  [requests, last frontier, read]    of the frontier before
    read       per level, local indices [requests, nodes]
    parent     [requests, frontier]
    A node sees what its parent sees, and itself.
    """
    requests, nodes = parent.shape
    itself = torch.eye(nodes, dtype=torch.bool, device=parent.device).expand(requests, nodes, nodes)
    if not read:
        return itself.clone()
    place = (parent[:, :, None] == read[-1][:, None, :]).int().argmax(dim=2)
    above = ancestors.gather(1, place[:, :, None].expand(requests, nodes, ancestors.shape[2]))
    return torch.cat([above, itself], dim=2)


def pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """[.., nodes] bool to [.., words] int64, bit j of word j // 64."""
    padding = -visible.shape[-1] % WORD_BITS
    bits = torch.nn.functional.pad(visible.to(torch.int64), (0, padding)).unflatten(-1, (-1, WORD_BITS))
    return (bits << torch.arange(WORD_BITS, device=visible.device)).sum(dim=-1)


def attention_layers(config: VllmConfig) -> set[str]:
    """Names of the attention layers built so far that have a KV cache."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    return {name for name, layer in layers.items() if layer.get_kv_cache_spec(config) is not None}


def ssm_model_config(model: str, revision: str | None, config: VllmConfig) -> ModelConfig:
    """The SSM's ModelConfig: it takes the LLM's tokenizer, dtype and seed, and nothing else by accident.

    No quantisation, no overrides, no length (vllm#58080, #48787).
    """
    llm = config.model_config
    return ModelConfig(
        model=model,
        revision=revision,
        runner="draft",
        tokenizer=llm.tokenizer,
        tokenizer_mode=llm.tokenizer_mode,
        trust_remote_code=llm.trust_remote_code,
        dtype=llm.dtype,
        seed=llm.seed,
        enforce_eager=llm.enforce_eager,
        spec_target_max_model_len=llm.max_model_len,
    )
