# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's draft-free proposers where no kernel runs: their kernels' references draft in a replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from specinfer_vllm.propose.device_primer import device_primer
from specinfer_vllm.propose.device_recycling import DeviceRecycling
from specinfer_vllm.propose.proposer import DraftBatch, Observation, Proposer
from specinfer_vllm.propose.recycling import WIDTH
from specinfer_vllm.propose.votes import with_one_draw_each
from specinfer_vllm.tree.topology import TokenTrees
from specinfer_vllm.triton_kernels.recycle import NGRAM_WEIGHTS, Grown
from specinfer_vllm.triton_kernels.reference import recycle as reference


class DeviceReplay(Proposer):
    """`ngram` or `recycling` of the V2 runner, one text's places after the other as that runner shows them.

    slots, max_len  requests at a time, and tokens of the longest; primer: as RecyclingProposer's
    """

    def __init__(self, name: str, vocab_size: int, slots: int, max_len: int, primer: Path | None = None) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.num_successors = WIDTH if name == "recycling" else 0
        table = None if primer is None else device_primer(primer, vocab_size, "cpu")
        self.rows = DeviceRecycling(slots, max_len, 1, 1, 0, vocab_size, "cpu", table)
        self.unplaced: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def observe(self, observation: Observation) -> None:
        """Keep rows until the next draft says where they stand."""
        rows = zip(observation.slots.tolist(), observation.successors, observation.probabilities, strict=True)
        for slot, *best in rows:
            self.unplaced.setdefault(slot, []).append(tuple(best))

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """As Proposer.propose."""
        for slot, length in zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True):
            self._place(slot, length)
        slots, texts = len(self.rows.place), torch.from_numpy(batch.history)
        history = torch.zeros(slots, texts.shape[1], dtype=torch.int32)
        history[batch.slots] = texts[batch.rows]
        length, last = torch.zeros(2, slots, dtype=torch.int32)
        length[batch.slots] = torch.from_numpy(batch.lengths).int()
        last[batch.slots] = torch.from_numpy(batch.lengths + batch.max_depth + 1).int()
        nodes = int(batch.max_nodes.max(initial=0))
        limits = {"branches": torch.full_like(last, WIDTH), "last": last, "max_depth": nodes, "vocab": self.vocab_size}
        shared = {"history": history, "length": length, "slot": torch.from_numpy(batch.slots), **limits}
        out = Grown.empty(batch.num_requests, nodes, "cpu")
        if self.name == "ngram":
            reference.ngram(**shared, weight=torch.tensor(NGRAM_WEIGHTS), out=out)
        else:
            rows = {name: getattr(self.rows, name) for name in ("place", "successors", "chances", "weight", "primer")}
            reference.recycle(**shared, **rows, out=out)
        return _as_trees(batch, out)

    def finish(self, slot: int) -> None:
        """As Proposer.finish."""
        self.unplaced.pop(slot, None)
        self.rows.reset(torch.tensor([slot]))

    def _place(self, slot: int, length: int) -> None:
        """The rows seen since the last draft belong to the places in front of the root."""
        best = self.unplaced.pop(slot, [])
        if not best:
            return
        index = torch.arange(length - 1 - len(best), length - 1)[None]
        tokens, chances = (torch.from_numpy(np.stack(each)) for each in zip(*best, strict=True))
        self.rows.observe(torch.tensor([slot]), index, torch.ones_like(index, dtype=torch.bool), (tokens, chances))


def _as_trees(batch: DraftBatch, grown: Grown) -> TokenTrees:
    """The trees on the host, with their roots in front of the nodes."""
    blank = torch.zeros(batch.num_requests, 1, dtype=torch.int32)
    roots = torch.from_numpy(batch.root_tokens())[:, None].int()
    exists = torch.cat([blank == 0, grown.tokens >= 0], dim=1)
    columns = [(roots, grown.tokens), (blank - 1, grown.parent), (blank, grown.depth), (blank.float(), grown.score)]
    arrays = [torch.cat(pair, dim=1)[exists].numpy() for pair in columns]
    return with_one_draw_each(np.concatenate([[0], exists.sum(dim=1).cumsum(0).numpy()]), *arrays)
