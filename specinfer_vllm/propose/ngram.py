# SPDX-License-Identifier: Apache-2.0
"""Suffix matching over the request's own tokens."""

from __future__ import annotations

import numpy as np

from specinfer_vllm.propose.proposer import DraftBatch, Proposer
from specinfer_vllm.propose.successors import NOBODY, SuccessorRows
from specinfer_vllm.propose.votes import Weights, grow
from specinfer_vllm.tree.topology import TokenTrees

ANY_TOKEN = 2**31 - 1
# Fitted like recycling.WEIGHTS, without its rows.
WEIGHTS = Weights(doubt=9.6, text=1.0, text_growth=2.9, text_fade=0.85)


class NgramProposer(Proposer):
    """What followed the last tokens earlier in this text, longest match first, as a tree.

    Prompt lookup decoding with branches. Stateless: it reads the history and nothing else. vocab_size bounds what it
    may
    propose, where a text can hold ids past the LLM's vocabulary.
    """

    name = "ngram"

    def __init__(self, vocab_size: int = ANY_TOKEN, weights: Weights = WEIGHTS) -> None:
        self.vocab_size, self.weights = vocab_size, weights
        self._no_rows = SuccessorRows(max_rows=1, width=1, vocab_size=1).rows

    def propose(self, batch: DraftBatch) -> TokenTrees:
        """As Proposer.propose."""
        owners = np.full(batch.num_requests, NOBODY, np.int64)
        return grow(batch, self.weights, self._no_rows, owners, self._no_rows, self.vocab_size)
