# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step is worth: the rule of goodput, with the cost of a row as one number.

A pass over all requests takes 1 + row_cost * (rows - 1), in passes over one row; it emits one token per request and,
for
every node, one more with the chance that its whole path is accepted. The best number of nodes has the most tokens per
time (AdaServe and TurboSpec use the same quotient with a measured curve in place of the line).
"""

from __future__ import annotations

import numpy as np

from specinfer_vllm.tree.topology import TokenTrees


def worthwhile(trees: TokenTrees, row_cost: float) -> int:
    """How many of the batch's best nodes by score to verify, 0 or more.

    row_cost: time of one more row in a pass, as a share of the time of a pass over one row. Scores are logs of the
    chance
    that a node's path is accepted, and never rise along a path, so the best n nodes are trees for every n.
    """
    nodes = trees.score[trees.parent >= 0].astype(np.float64)
    chances = -np.sort(-np.exp(nodes))
    requests = trees.num_requests
    tokens = requests + np.concatenate([[0.0], np.cumsum(chances)])
    time = 1 + row_cost * (requests - 1 + np.arange(len(tokens)))
    return int(np.argmax(tokens / time))
