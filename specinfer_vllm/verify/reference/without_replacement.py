# SPDX-License-Identifier: Apache-2.0
"""Recursive rejection sampling of children drawn without replacement, one tree, plain Python, float64."""

from __future__ import annotations

import numpy as np

from specinfer_vllm.verify.reference.drafted import ROOT, Chance, Drafted, after_refusal, without


def without_replacement(tree: Drafted, p: np.ndarray, chance: Chance) -> tuple[list[int], list[int]]:
    """Recursive rejection sampling (RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024, Algorithm 2).

    p [nodes, vocab] float64 = the LLM's law at each node. Returns emitted tokens and the nodes whose laws gave them.
    """
    u, emitted, nodes = ROOT, [], []
    while u is not None:
        nodes.append(u)
        residual, law, drawn = p[u], None, []
        for number, draw in enumerate(tree.draws.get(u, ())):
            if draw.law != law:  # the next SSM begins
                law, drawn = draw.law, []
            x, d = tree.tokens[draw.node], without(tree.laws[law], drawn)
            if chance.accepts(u, number, residual[x], d[x]):
                emitted.append(x)
                u = draw.node
                break
            residual = after_refusal(residual, d)
            drawn.append(x)
        else:
            emitted.append(chance.pick(u, residual))
            u = tree.child(u, emitted[-1])
    return emitted, nodes
