# SPDX-License-Identifier: Apache-2.0
"""Token recycling: the LLM's own best next tokens, seen earlier, come back as drafts (arXiv 2408.08696)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specinfer_vllm.propose.proposer import DraftBatch, Observation, Proposer
from specinfer_vllm.propose.successors import CONTEXT, NOBODY, SuccessorRows
from specinfer_vllm.propose.votes import Weights, grow
from specinfer_vllm.tree.topology import TokenTrees

WIDTH = 8
MAX_ROWS = 32768
# Fitted by coordinate search on 80 recorded greedy chats of SmolLM2-135M-Instruct (MT-bench and HumanEval, 128 tokens
# each), checked on 80 others: tokens per pass time at 0.035 and 0.05 of a pass per row, with and without a primer. On
# the others a path estimated at 0.5, 0.7, 0.9 was accepted in 0.58, 0.72, 0.93 of all cases. A row of the own request
# counts less the longer its context matches, since the text then says the same.
WEIGHTS = Weights(
    doubt=10.2,
    text=1.0,
    text_growth=2.92,
    own=8.0,
    own_growth=0.15,
    own_fade=0.72,
    primer=0.26,
    primer_growth=5.7,
)
# The paper's rule: only the last row of a token counts, whatever stood in front of it.
PUBLISHED = Weights(doubt=1.0, own=1.0, own_fade=0.0)


class RecyclingProposer(Proposer):
    """Proposes what the LLM held likely in like places: its rows of this request, the text so far, and a primer.

    Beyond the paper: of all rows for a token those count most whose context matches longest; the text's own
    continuations vote along, so that a prompt helps before any row exists; and a primer, rows recorded once from the
    LLM on harmless prompts, serves a request from its first step.

    num_slots   slots that requests may have
    shared      every request learns from all others' rows. More hits, but the timing then shows what others asked: a
                side channel. Off by default
    primer      file of rows that SuccessorRows.save wrote, read-only here; None = none. OSError, ValueError: unusable
    max_rows    rows kept of all live requests together, 72 bytes each; the oldest gives way, whoever it belongs to
    """

    name = "recycling"
    num_successors = WIDTH

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        shared: bool = False,
        primer: str | Path | None = None,
        max_rows: int = MAX_ROWS,
        weights: Weights = WEIGHTS,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots: {num_slots} must be at least 1")
        if shared and weights.primer:  # rows of everybody are like a primer's, not like one's own
            growth, fade = weights.primer_growth, weights.primer_fade
            weights = weights._replace(own=weights.primer, own_growth=growth, own_fade=fade)
        self.shared, self.weights = shared, weights
        self.seen = SuccessorRows(max_rows, WIDTH, vocab_size)
        self.primer = SuccessorRows.load(Path(primer), vocab_size) if primer else SuccessorRows(1, WIDTH, vocab_size)
        # A request's rows are found only under its own number, and no number is given twice.
        self._owners = np.full(num_slots, NOBODY, np.int64) if shared else np.arange(1, num_slots + 1)
        self._next_owner = num_slots + 1
        self._tails = np.full((num_slots, CONTEXT - 1), -1, np.int32)

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, the primer's included."""
        return self.seen.num_bytes + self.primer.num_bytes

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """As Proposer.propose."""
        self._align(batch)
        return grow(
            batch,
            self.weights,
            self.seen.rows,
            self._owners[batch.slots],
            self.primer.rows,
            self.seen.vocab_size,
        )

    def observe(self, observation: Observation) -> None:
        """Keep one row per row of the accepted paths. Ids outside the vocabulary and unknown slots are passed over."""
        self.seen.append(self._owners, self._tails, observation)

    def finish(self, slot: int) -> None:
        """Forget the request on `slot`: nobody finds its rows again. With `shared`, what all learned from it stays."""
        self._tails[slot] = -1
        if not self.shared:
            self._owners[slot] = self._next_owner
            self._next_owner += 1

    def _align(self, batch: DraftBatch) -> None:
        """Tokens in front of each root: the next pass reads the root, whatever passes it was not shown."""
        back = batch.lengths[:, None] - 2 - np.arange(CONTEXT - 1)
        tails = batch.history[batch.rows[:, None], np.maximum(back, 0)]
        self._tails[batch.slots] = np.where(back >= 0, tails, -1)
