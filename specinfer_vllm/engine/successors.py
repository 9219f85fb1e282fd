# SPDX-License-Identifier: Apache-2.0
"""The LLM's best next tokens at the rows of a pass, and their probabilities: what proposers learn from."""

from __future__ import annotations

import torch

BLOCK = 64


def best_successors(logits: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [k, count] int64, probabilities [k, count] float32), best first.

    logits [all rows, vocab] float; rows [k] int64; count <= vocab
    """
    picked = 2 * len(rows) < len(logits)  # copying a row costs twice its softmax
    laws = (logits[rows] if picked else logits).softmax(dim=-1, dtype=torch.float32)
    tokens, probabilities = top(laws, count)
    return (tokens, probabilities) if picked else (tokens[rows], probabilities[rows])


def top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) [rows, count] of each row's largest values [rows, vocab], as torch.topk finds them.

    Only blocks whose largest value is among the `count` largest can hold any of them: two short searches and one
    vectorised pass take half the time of topk over a vocabulary on a CPU.
    """
    rows, vocab = values.shape
    blocks = vocab // BLOCK
    if blocks <= 2 * count:
        best = values.topk(count, dim=-1)
        return best.indices, best.values
    tiled = values[:, : blocks * BLOCK].view(rows, blocks, BLOCK)
    chosen = tiled.amax(dim=-1).topk(count, dim=-1).indices[:, :, None]
    indices = (chosen * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    tail = torch.arange(blocks * BLOCK, vocab, device=values.device).expand(rows, -1)
    indices = torch.cat([indices, tail], dim=-1)
    best = values.gather(-1, indices).topk(count, dim=-1)
    return indices.gather(-1, best.indices), best.values
