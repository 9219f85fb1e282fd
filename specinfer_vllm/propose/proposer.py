# SPDX-License-Identifier: Apache-2.0
"""What every proposer is: batch in, token trees out, and what the LLM said comes back to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from specinfer_vllm.tree.topology import TokenTrees


@dataclass(frozen=True, eq=False)
class DraftSampling:
    """How the children of sampled requests are drawn, so that a rule that weighs p against q stays exact.

    drafting     iid, without_replacement or top_k_plus_one: what the rule needs (verify/draft.py)
    sampled      [requests] bool       requests whose children are sampled; the others get the likeliest ones
    temperature  [requests] float32    above 0 where sampled
    top_k        [requests] int32      vocabulary size = no bound
    top_p        [requests] float32    1 = no bound
    seed         [requests] int64      keys the draws
    """

    drafting: str
    sampled: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """The requests that draft this step; all arrays are read-only to a proposer.

    slots      [requests] int64   the engine's index of a request, the same for its whole life, below max_num_seqs
    history    [max_num_seqs, max_model_len] int32   committed tokens, owned by the engine
    rows       [requests] int64   request i's tokens are history[rows[i], :lengths[i]]
    lengths    [requests] int64   committed tokens, prompt and output; the last one is the tree's root
    max_depth  [requests] int32   longest path that may be proposed, 0 = none
    max_nodes  [requests] int32   most nodes that may be proposed, 0 = none
    sampling   None when no request's children are sampled
    covered    [requests, levels] float64    chance that a node which was proposed before is accepted at depth 1, 2, ..;
               for proposers that are `last`, None for the others
    """

    slots: np.ndarray
    history: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray
    max_depth: np.ndarray
    max_nodes: np.ndarray
    sampling: DraftSampling | None = None
    covered: np.ndarray | None = None

    @property
    def sampled(self) -> np.ndarray:
        """Requests whose children are sampled [requests] bool."""
        return np.zeros(self.num_requests, bool) if self.sampling is None else self.sampling.sampled

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
    laws            [laws, vocab] float32, what the last `propose` sampled from; None when it sampled nothing
    last            whether it proposes after those that are not, and is told what they have: its own drafts cost time
    """

    last: bool = False
    name: str = "proposer"
    num_successors: int = 0
    laws: torch.Tensor | None = None

    @abstractmethod
    def propose(self, batch: DraftBatch) -> TokenTrees:
        """One tree per request of the batch, in its order, within max_depth and max_nodes; draw_owner is 0.

        Roots carry the last committed token. A node's score is the log of the estimated chance that its whole path is
        accepted. The score of a sampled node must not depend on its own token, nor on draws made after it: it decides
        whether the draw is verified (else the rules are biased). draw_law of sampled draws is a row of `laws`.
        """

    def observe(self, observation: Observation) -> None:  # noqa: B027
        """Learn from the last LLM pass. The default learns nothing."""

    def start(self, slot: int) -> None:
        """A request begins on `slot`. Whatever an earlier request left there must not be seen by this one."""
        self.finish(slot)

    def finish(self, slot: int) -> None:  # noqa: B027
        """The request on `slot` ended or was preempted: drop all of its state. The default has none."""
