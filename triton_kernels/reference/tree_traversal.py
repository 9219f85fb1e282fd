# SPDX-License-Identifier: Apache-2.0
"""Traversal, one request and one node at a time: laws in float64, coins in Python integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from specinfer_vllm.triton_kernels.reference.tree_verify import ACCEPT, SAMPLE, Coin, coin_of, pick, without
from specinfer_vllm.triton_kernels.tree_verify import DraftRows, Walk


def traverse(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    greedy: torch.Tensor | None = None,
    draws: DraftRows | None = None,
    drawing: str = "without_replacement",
    residual: torch.Tensor | None = None,
    out: Walk | None = None,
    margin: torch.Tensor | None = None,
) -> Walk:
    """Tensors as in the kernel's contract; margin, and what is not looked at, as of reference/tree_verify.py."""
    requests, width, vocab = len(start) - 1, max_depth + 1, logits.shape[1]
    out = out or Walk.empty(requests, width, logits.device)
    for request, (first, end) in enumerate(pairwise(start.tolist())):
        best_only = greedy is not None and bool(greedy[request])
        child = {
            (first + above, int(token)): first + node
            for node, (above, token) in enumerate(zip(parent[first:end].tolist(), tokens[first:end], strict=True))
            if 0 <= above < node
        }
        emitted, rows, distances, law, fresh = [], [], [torch.inf], None, True
        row = first if first < end else None
        if row is not None and draws is not None and not best_only:
            toss = partial(coin_of, int(seed[request]), int(position[first]), ACCEPT)
            path, law = _Climb(logits, tokens, draws, drawing, toss, max_depth, distances).enter(first, 1.0, 0)
            *rows, row = path
            emitted = tokens[path[1:]].tolist()
            begin, behind = draws.start[row : row + 2].tolist()
            fresh = [carrier not in draws.row[begin:behind].tolist() for carrier in range(end)]
        while row is not None and len(emitted) < width:
            rows.append(row)
            law = _law(logits, row) if law is None else law
            if law is None:
                token = vocab  # no child carries it
            elif best_only:
                token = int(logits[row].float().argmax())
            else:
                token = pick(law, coin_of(int(seed[request]), int(position[row]), SAMPLE), distances)
            emitted.append(token)
            row = child.get((row, token))
            if row is not None and fresh is not True and not fresh[row]:
                row = None
            law, fresh = None, True
        for column, list_ in ((out.tokens, emitted), (out.rows, rows)):
            column[request] = torch.tensor(list_ + [-1] * (width - len(list_)))
        out.num_tokens[request] = len(emitted)
        if margin is not None:
            margin[request] = min(distances)
    return out


@dataclass
class _Climb:
    """One request's draws; `left` counts those that were left."""

    logits: torch.Tensor
    tokens: torch.Tensor
    draws: DraftRows
    drawing: str
    toss: Coin
    max_depth: int
    distances: list[float] = field(default_factory=list)
    left: int = 0

    def enter(self, row: int, height: float, depth: int) -> tuple[list[int], torch.Tensor | None] | None:
        """(rows from this one to the accepted node, the law behind it), None if all are refused."""
        law = _law(self.logits, row)
        first, end = self.draws.start[row : row + 2].tolist() if depth < self.max_depth and law is not None else (0, 0)
        previous, drawn, carriers = None, [], set()
        for carrier, which in zip(self.draws.row[first:end].tolist(), self.draws.law[first:end].tolist(), strict=True):
            if which != previous:  # the next SSM begins
                previous, drawn = which, []
            x, q = int(self.tokens[carrier]), self.draws.laws[which].double()
            if self.drawing == "without_replacement":
                q = without(q, drawn)
            wanted, offered = height * float(law[x]), float(q[x])
            if carrier in carriers:
                self.refuses(0.0)
            elif found := self.enter(carrier, chance(wanted, offered), depth + 1):
                return [row, *found[0]], found[1]
            carriers.add(carrier)
            drawn.append(x)
            raw = (height * law - q).clamp(min=0)
            mass = float(raw.sum())
            if mass:
                height, law = mass / (mass + 1 - height), raw / mass
            else:  # rounding, where h = 1
                height = float(height >= 1)
        return None if depth and self.refuses(height) else ([row], law)

    def refuses(self, height: float) -> bool:
        """Toss the next draw's coin."""
        coin = self.toss(self.left)
        self.left += 1
        self.distances.append(abs(coin - height))
        return coin >= height


def chance(wanted: float, offered: float) -> float:
    """min(1, wanted / offered); 0 for a token that is not wanted."""
    if not wanted:
        return 0.0
    return 1.0 if wanted >= offered else wanted / offered


def _law(logits: torch.Tensor, row: int) -> torch.Tensor | None:
    """The LLM's law at a row [vocab] float64, None where its logits give none."""
    law = logits[row].double().softmax(0)
    return law if law.isfinite().all() else None
