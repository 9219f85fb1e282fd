# SPDX-License-Identifier: Apache-2.0
"""Multi-step speculative sampling and its use for top-(k-1)+1, one tree, plain Python, float64."""

from __future__ import annotations

import numpy as np

from specinfer_vllm.verify.reference.drafted import ROOT, Chance, Drafted, after_refusal


def mss(tree: Drafted, p: np.ndarray, chance: Chance) -> tuple[list[int], list[int]]:
    """Multi-step speculative sampling (SpecInfer, Algorithm 2, VerifyStochastic).

    p [nodes, vocab] float64 = the LLM's law at each node. Returns emitted tokens and the nodes whose laws gave them.
    Algorithm 2 as printed leaves only the inner loop after the last refusal; there the residual is sampled and the walk
    ends. Here it goes on if a (one-hot) child happens to carry the sampled token.
    """
    u, emitted, nodes = ROOT, [], []
    while u is not None:
        nodes.append(u)
        residual = p[u]
        for number, draw in enumerate(tree.draws.get(u, ())):
            x, q = tree.tokens[draw.node], tree.laws[draw.law]
            if chance.accepts(u, number, residual[x], q[x]):
                emitted.append(x)
                u = draw.node
                break
            residual = after_refusal(residual, q)
        else:
            emitted.append(chance.pick(u, residual))
            u = tree.child(u, emitted[-1])
    return emitted, nodes


def top_k_plus_one(tree: Drafted, p: np.ndarray, chance: Chance) -> tuple[list[int], list[int]]:
    """One child drawn from q' = q without the k - 1 best, which are one-hot children beside it.

    Accept x with min(1, p(x) / q'(x)); else y ~ norm(relu(p - q')), and if y is any child, go on there. In a merged
    tree the second SSM's draw meets that residual in the place of p: multi-step speculative sampling.
    """
    return mss(tree, p, chance)
