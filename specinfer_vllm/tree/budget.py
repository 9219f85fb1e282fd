# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step is worth: the rule of goodput, with the cost of a row as one number.

A pass over all requests takes 1 + row_cost * (rows - 1), in passes over one row; it emits one token per request and,
for every node, one more with the chance that its whole path is accepted. The best number of nodes has the most tokens
per time (AdaServe and TurboSpec use the same quotient with a measured curve in place of the line).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specinfer_vllm.tree.topology import TokenTrees


def worthwhile(trees: TokenTrees, row_cost: float) -> int:
    """How many of the batch's best nodes by score to verify, 0 or more.

    row_cost: time of one more row in a pass, as a share of the time of a pass over one row. Scores are logs of the
    chance that a node's path is accepted, and never rise along a path, so the best n nodes are trees for every n.
    """
    return int(_best_count(trees.score[trees.parent >= 0], trees.num_requests, row_cost))


def worthwhile_alone(score: np.ndarray, row_cost: float) -> np.ndarray:
    """How many of its best nodes each request would verify if it were alone [requests] int64.

    score [requests, nodes], -inf where there is none. For what must not depend on who else is in the batch.
    """
    return _best_count(score, 1, row_cost)


def level_pays(
    levels: Sequence[np.ndarray],
    reads: Sequence[np.ndarray],
    covered: np.ndarray,
    row_cost: float,
    level_cost: float,
) -> bool:
    """Whether an SSM should draw one more level: what it should gain above what others have, against its time.

    levels [requests, nodes] each: scores of the levels drawn so far; reads [requests, parents] each: scores of those of
    their nodes that are the next level's parents. covered [requests]: chance that a node of another proposer is
    accepted at the next level's depth. A level is taken to keep as much of its parents' chance as the one before it.
    level_cost: time of drafting a level for one row, as a share of an LLM pass over one row; more rows cost as there.
    """
    read = np.exp(reads[-1])
    tokens, time = _goodput(np.concatenate(levels, axis=1).reshape(-1), len(read), row_cost)
    each = level_cost * (1 + row_cost * (read.size - 1))
    rate = float((tokens / (time + each * len(levels))).max())
    above = float(np.exp(reads[-2]).sum()) if len(reads) > 1 else len(read)
    kept = float(np.exp(levels[-1]).sum()) / max(above, 1e-9)
    return float(np.maximum(kept * read.sum(axis=1) - covered, 0).sum()) > each * rate


def _best_count(score: np.ndarray, requests: int, row_cost: float) -> np.ndarray:
    """The number of nodes with the most tokens per time, along the last axis of score [.., nodes]."""
    tokens, time = _goodput(score, requests, row_cost)
    return np.argmax(tokens / time, axis=-1)


def _goodput(score: np.ndarray, requests: int, row_cost: float) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [.., nodes + 1], time [nodes + 1]) of a pass with the best 0, 1, .. of the nodes."""
    chances = -np.sort(-np.exp(score.astype(np.float64)), axis=-1)
    none = np.zeros((*chances.shape[:-1], 1))
    tokens = requests + np.concatenate([none, np.cumsum(chances, axis=-1)], axis=-1)
    time = 1 + row_cost * (requests - 1 + np.arange(tokens.shape[-1]))
    return tokens, time
