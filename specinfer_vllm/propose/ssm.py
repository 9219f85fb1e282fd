# SPDX-License-Identifier: Apache-2.0
"""A small speculative model: any decoder that vLLM loads, with layers of its own in the LLM's paged KV pool.

Every step it first reads what the LLM read (prompt chunks, the accepted path) and the new root, so its K/V is valid for
every committed token after acceptance, prefix hits, chunked prefill and preemption alike; then it draws level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from specinfer_vllm.config import ssm_slots
from specinfer_vllm.engine.vocabulary import draftable_tokens
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.proposer import DraftBatch, Proposer
from specinfer_vllm.tree.expand import level_sizes
from specinfer_vllm.tree.topology import TokenTrees, from_arrays, keep_rows, roots


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
    """The nodes drawn on one level, the same number for each request.

    token, score  [requests, nodes]    score = log-probability of the path
    parent        [requests, nodes]    local index of the parent
    first         local index of the level's first node
    """

    token: torch.Tensor
    score: torch.Tensor
    parent: torch.Tensor
    first: int


class SsmProposer(Proposer):
    """SSM `index` of the options."""

    def __init__(self, vllm_config: VllmConfig, index: int) -> None:
        config = tree_config(vllm_config)
        self.options = config.tree.ssms[index]
        self.name = f"ssm{index}"
        self.expansion = config.tree.expansions[index]
        self.max_depth = config.tree.max_depth
        self.num_slots = ssm_slots(config.tree, index)
        self.llm_config = vllm_config
        self.model_config = ssm_model_config(self.options.model, self.options.revision, vllm_config)
        self.max_len = min(self.model_config.max_model_len, vllm_config.model_config.max_model_len)
        self.num_tokens = draftable_tokens(self.model_config.get_vocab_size(), vllm_config.model_config)
        self.layer_names: list[str] = []
        self.groups: list[Any] = []
        self.step: SsmStep | None = None
        # Requests whose K/V is no longer valid because a pass failed: not drafted until they end.
        self.lost = np.zeros(vllm_config.scheduler_config.max_num_seqs, bool)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the weights beside the LLM's, under a prefix of its own (vLLM refuses equal layer names)."""
        before = attention_layers(self.llm_config)
        config = replace(self.llm_config, model_config=self.model_config, quant_config=None)
        load_config = LoadConfig(download_dir=self.llm_config.load_config.download_dir)
        with set_model_tag(self.name):
            self.model = get_model(vllm_config=config, prefix=self.name, load_config=load_config)
        self.layer_names = sorted(attention_layers(self.llm_config) - before)

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

    def warm_up(self) -> None:
        """One pass without attention, as vLLM warms up its own models: compiles the SSM."""
        with set_forward_context(None, self.llm_config, num_tokens=8):
            self.model(input_ids=torch.zeros(8, dtype=torch.int64), positions=torch.arange(8))

    # -- drafting ------------------------------------------------------------------------------------------------------

    def begin(self, step: SsmStep) -> None:
        """The next `propose` or `catch_up` reads what this step committed."""
        self.step = step

    def finish(self, slot: int) -> None:
        """A new request on this slot starts with valid K/V."""
        self.lost[slot] = False

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """Catch up all requests of the step, then draw trees for those of the batch."""
        try:
            return self._propose(batch)
        except Exception:
            slots = self.step.slots
            self.lost[slots[slots >= 0]] = True
            raise

    def _propose(self, batch: DraftBatch) -> TokenTrees:
        hidden = self.catch_up()
        tokens = batch.history[batch.rows, batch.lengths - 1]
        root = torch.from_numpy(batch.lengths - 1)
        fits = (batch.lengths + self.num_slots <= self.max_len) & ~self.lost[batch.slots] & (batch.max_depth > 0)
        chosen = np.flatnonzero(fits)
        if not len(chosen):
            return roots(tokens)
        levels = self.levels(hidden, batch.rows[chosen], root[chosen], int(batch.max_depth[chosen].max()))
        return self.trees(levels, tokens, chosen, batch.max_depth)

    def catch_up(self) -> torch.Tensor:
        """Read the step's tokens. Returns the hidden state at each request's last one [requests, hidden]."""
        step, self.step = self.step, None
        self.table = step.block_table
        end = np.minimum(step.end, self.max_len)
        counts = np.maximum(end - step.first, 0)
        active = np.flatnonzero(counts)
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

    def levels(self, hidden: torch.Tensor, rows: np.ndarray, root: torch.Tensor, max_depth: int) -> list[Level]:
        """Draw level by level. hidden [batch, ..]; rows [requests] batch rows that draw; root [requests] last index."""
        requests = torch.from_numpy(rows)
        drawn = [self.draw(hidden[requests][:, None], None, first=1, level=0)]
        read: list[torch.Tensor] = []  # local indices of the nodes read so far, level by level, [requests, nodes]
        ancestors = torch.zeros(len(rows), 0, 0, dtype=torch.bool)
        while len(drawn) < min(max_depth, self.depth):
            level = drawn[-1]
            frontier = self.frontier(level)
            token, score = level.token.gather(1, frontier), level.score.gather(1, frontier)
            ancestors = extend(ancestors, read, level.parent.gather(1, frontier))
            read.append(frontier + level.first)
            states = self.read_level(token, ancestors, len(drawn), root, requests)
            first = level.first + level.token.shape[1]
            drawn.append(self.draw(states, (score, frontier + level.first), first, level=len(drawn)))
        return drawn

    @property
    def depth(self) -> int:
        """Levels it draws at most."""
        return len(self.expansion) if self.expansion is not None else self.max_depth

    def frontier(self, level: Level) -> torch.Tensor:
        """Which nodes of a level are read to draw the next one [requests, nodes]: all, or EAGLE-2's best by path."""
        nodes = level.token.shape[1]
        if self.expansion is not None or nodes <= self.options.width:
            return torch.arange(nodes).expand(len(level.token), nodes)
        return level.score.topk(self.options.width, dim=1).indices.sort(dim=1).values

    def draw(
        self, states: torch.Tensor, parents: tuple[torch.Tensor, torch.Tensor] | None, first: int, level: int
    ) -> Level:
        """The likeliest children of each state [requests, nodes, hidden]; padded ids are never drawn."""
        width = self.expansion[level] if self.expansion is not None else self.options.width
        requests, nodes = states.shape[:2]
        logits = self.model.compute_logits(states.flatten(0, 1))[:, : self.num_tokens].float()
        score, token = logits.log_softmax(dim=-1).topk(width, dim=-1)
        score, token = score.view(requests, nodes, width), token.view(requests, nodes, width)
        parent = torch.zeros(requests, nodes, dtype=torch.int64)
        if parents is not None:
            score, parent = score + parents[0][:, :, None], parents[1]
        return Level(token.flatten(1), score.flatten(1), parent[:, :, None].expand_as(token).flatten(1), first)

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
        if self.expansion is None:
            return [self.options.width] * self.max_depth
        return level_sizes(self.expansion)

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
        metadata = {}
        for group in self.groups:
            built = group.build_metadata(common, 0)
            built.tree = None if mask is None else TreePass.of(mask, table, block_size)
            metadata.update(dict.fromkeys(set(group.layer_names) & set(self.layer_names), built))
        slots = dict.fromkeys(self.layer_names, slot_mapping)
        with set_forward_context(metadata, self.llm_config, num_tokens=len(tokens), slot_mapping=slots):
            # vLLM's CPU kernels read raw pointers: an expanded view would send them out of bounds.
            return self.model(input_ids=tokens.contiguous(), positions=positions.contiguous())

    def trees(self, levels: list[Level], tokens: np.ndarray, chosen: np.ndarray, max_depth: np.ndarray) -> TokenTrees:
        """The drawn levels as TokenTrees; requests that did not draw keep their root only."""
        parent = torch.cat([level.parent for level in levels], dim=1)
        nodes = parent.shape[1]
        counts = np.zeros(len(tokens), np.int64)
        counts[chosen] = nodes
        offsets = np.concatenate([[0], np.cumsum(counts + 1)])
        is_node = np.ones(offsets[-1], bool)
        is_node[offsets[:-1]] = False

        def flat(values: list[torch.Tensor], at_root: Any, dtype: Any) -> np.ndarray:
            rows = np.empty(len(is_node), dtype)
            rows[~is_node] = at_root
            rows[is_node] = torch.cat(values, dim=1).flatten().numpy()
            return rows

        trees = from_arrays(
            offsets=offsets,
            tokens=flat([level.token for level in levels], tokens, np.int32),
            parent=flat([parent], -1, np.int32),
            score=flat([level.score for level in levels], 0.0, np.float32),
        )
        return keep_rows(trees, trees.depth <= max_depth[trees.request])


def extend(ancestors: torch.Tensor, read: list[torch.Tensor], parent: torch.Tensor) -> torch.Tensor:
    """Visibility of the next frontier among all nodes read [requests, frontier, read + frontier] bool.

    ancestors  [requests, last frontier, read]    of the frontier before
    read       per level, local indices [requests, nodes]
    parent     [requests, frontier]
    A node sees what its parent sees, and itself.
    """
    requests, nodes = parent.shape
    itself = torch.eye(nodes, dtype=torch.bool).expand(requests, nodes, nodes)
    if not read:
        return itself.clone()
    place = (parent[:, :, None] == read[-1][:, None, :]).int().argmax(dim=2)
    above = ancestors.gather(1, place[:, :, None].expand(requests, nodes, ancestors.shape[2]))
    return torch.cat([above, itself], dim=2)


def pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """[.., nodes] bool to [.., words] int64, bit j of word j // 64."""
    padding = -visible.shape[-1] % WORD_BITS
    bits = torch.nn.functional.pad(visible.to(torch.int64), (0, padding)).unflatten(-1, (-1, WORD_BITS))
    return (bits << torch.arange(WORD_BITS)).sum(dim=-1)


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
