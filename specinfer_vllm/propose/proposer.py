# SPDX-License-Identifier: Apache-2.0
"""What every proposer is: batch in, token trees out, and what the LLM said comes back to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from specinfer_vllm.tree.topology import TokenTrees


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """The requests that draft this step; all arrays are read-only to a proposer.

    slots      [requests] int64   the engine's index of a request, the same for its whole life, below max_num_seqs
    history    [max_num_seqs, max_model_len] int32   committed tokens, owned by the engine
    rows       [requests] int64   request i's tokens are history[rows[i], :lengths[i]]
    lengths    [requests] int64   committed tokens, prompt and output; the last one is the tree's root
    max_depth  [requests] int32   longest path that may be proposed, 0 = none
    max_nodes  [requests] int32   most nodes that may be proposed, 0 = none
    """

    slots: np.ndarray
    history: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray
    max_depth: np.ndarray
    max_nodes: np.ndarray

    @property
    def num_requests(self) -> int:
        """Requests that draft."""
        return len(self.slots)

    def root_tokens(self) -> np.ndarray:
        """Last committed token of each request [requests] int32; 0 for a request without any."""
        last = self.history[self.rows, np.maximum(self.lengths - 1, 0)]
        return np.where(self.lengths > 0, last, 0).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Observation:
    """What the last LLM pass showed on the accepted paths: one row per committed token it read.

    A request's rows stand in the order of its path, its root first.

    slots          [rows] int64
    tokens         [rows] int32        the token at the row
    successors     [rows, k] int32     the LLM's k best next tokens, best first
    probabilities  [rows, k] float32   their probabilities, before temperature
    """

    slots: np.ndarray
    tokens: np.ndarray
    successors: np.ndarray
    probabilities: np.ndarray


class Proposer(ABC):
    """Proposes one token tree per request.

    name            what counters and logs call it
    num_successors  how many best next tokens per row `observe` wants to see, 0 = it does not look
    """

    name: str = "proposer"
    num_successors: int = 0

    @abstractmethod
    def propose(self, batch: DraftBatch) -> TokenTrees:
        """One tree per request of the batch, in its order, within max_depth and max_nodes; draw_owner is 0.

        Roots carry the last committed token. A node's score is the log of the estimated chance that its whole path is
        accepted.
        """

    def observe(self, observation: Observation) -> None:  # noqa: B027
        """Learn from the last LLM pass. The default learns nothing."""

    def start(self, slot: int) -> None:
        """A request begins on `slot`. Whatever an earlier request left there must not be seen by this one."""
        self.finish(slot)

    def finish(self, slot: int) -> None:  # noqa: B027
        """The request on `slot` ended or was preempted: drop all of its state. The default has none."""
