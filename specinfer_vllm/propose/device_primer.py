# SPDX-License-Identifier: Apache-2.0
"""A primer as the device looks it up: the votes behind each context that it was recorded with, added up beforehand.

On the host (propose/votes.py) every row whose last tokens equal a node's votes for its successors, and weighs more the
more tokens are equal. Which rows vote, and with what weight, depends on nothing but the longest context of the primer
that a node has: so each context gets one row with the sum of these votes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from specinfer_vllm.propose.primer import CONTEXT, read_primer
from specinfer_vllm.propose.recycling import WEIGHTS, WIDTH
from specinfer_vllm.propose.successors import UNIT
from specinfer_vllm.propose.votes import ROW_VOTERS
from specinfer_vllm.tree.device import child_path
from specinfer_vllm.triton_kernels.recycle import PROBES, Primer


class Contexts(NamedTuple):
    """The different contexts of one length, sorted, and the votes behind each.

    tokens     [contexts, length] int32         nearest first
    successors [contexts, width] int32, votes [contexts, width] float64: best first, -1 behind the last
    total      [contexts] float64               all votes
    """

    tokens: np.ndarray
    successors: np.ndarray
    votes: np.ndarray
    total: np.ndarray


def device_primer(path: Path, vocab_size: int, device: torch.device | str) -> Primer:
    """The primer in a file, as the kernel's contract says. OSError, ValueError: as read_primer."""
    context, successors, probabilities = read_primer(path, vocab_size)
    chances = np.where((successors >= 0) & (successors < vocab_size), probabilities / UNIT, 0.0)
    lengths, above = [], None
    for length in range(1, CONTEXT + 1):
        above = _contexts(context[:, :length].astype(np.int32), successors.astype(np.int64), chances, above)
        lengths.append(above)
    return _table(lengths, device)


def _contexts(context: np.ndarray, successors: np.ndarray, chances: np.ndarray, above: Contexts | None) -> Contexts:
    """Contexts of one length, from the rows of a primer and from the contexts that are one token shorter.

    context [rows, length]; successors and chances [rows, k]. A row that also has this longer context votes with as much
    more than it did with the shorter one; of very many rows their mean counts as often as rows are looked at.
    """
    length = context.shape[1]
    known = (context >= 0).all(axis=1)
    tokens, which, count = np.unique(context[known], axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    weight = _weight(length) - (_weight(length - 1) if length > 1 else 0.0)
    each = weight * np.minimum(count, ROW_VOTERS) / count
    total = each * count
    where = np.repeat(which, successors.shape[1])
    what, votes = successors[known].ravel(), (chances[known] * each[which, None]).ravel()
    if above is not None:
        parent = _rows_of(above.tokens, tokens[:, :-1])
        total = total + above.total[parent]
        where = np.concatenate([where, np.repeat(np.arange(len(tokens)), WIDTH)])
        what = np.concatenate([what, above.successors[parent].ravel()])
        votes = np.concatenate([votes, above.votes[parent].ravel()])
    return Contexts(tokens, *_best(where, what, votes, len(tokens)), total)


def _weight(equal: int) -> float:
    """What a row says whose last tokens are as many equal ones, where doubt weighs 1."""
    return WEIGHTS.primer / WEIGHTS.doubt * WEIGHTS.primer_growth ** (equal - 1)


def _rows_of(tokens: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each of the `wanted` rows stands among the different rows of `tokens`, which have all of them."""
    _, at = np.unique(np.concatenate([tokens, wanted]), axis=0, return_inverse=True)
    return at.reshape(-1)[len(tokens) :]


def _best(where: np.ndarray, what: np.ndarray, votes: np.ndarray, contexts: int) -> tuple[np.ndarray, np.ndarray]:
    """The WIDTH tokens with the most votes of each context: votes[i] goes to token what[i] behind context where[i]."""
    cast = votes > 0
    pairs, which = np.unique(np.stack([where[cast], what[cast]]), axis=1, return_inverse=True)
    sums = np.bincount(which.reshape(-1), weights=votes[cast], minlength=pairs.shape[1])
    order = np.lexsort((pairs[1], -sums, pairs[0]))
    context, token, sums = pairs[0][order], pairs[1][order], sums[order]
    rank = np.arange(len(context)) - np.searchsorted(context, context)
    kept = rank < WIDTH
    tokens, best = np.full((contexts, WIDTH), -1, np.int32), np.zeros((contexts, WIDTH))
    tokens[context[kept], rank[kept]], best[context[kept], rank[kept]] = token[kept], sums[kept]
    return tokens, best


def _table(lengths: list[Contexts], device: torch.device | str) -> Primer:
    """All contexts in buckets; the number of buckets doubles until none holds more than is looked at."""
    keys = torch.cat([_numbers(torch.from_numpy(each.tokens)) for each in lengths])
    buckets = 1
    while (counts := torch.bincount(keys & (buckets - 1), minlength=buckets)).max(dim=0).values > PROBES:
        buckets *= 2
    order = (keys & (buckets - 1)).argsort(stable=True)
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    columns = (np.concatenate([getattr(each, name) for each in lengths]) for name in ("successors", "votes", "total"))
    tokens, votes, total = (torch.from_numpy(each)[order] for each in columns)
    arrays = (start.int(), keys[order], tokens, votes.float(), total.float())
    return Primer(*(each.contiguous().to(device) for each in arrays))


def _numbers(tokens: torch.Tensor) -> torch.Tensor:
    """Numbers [contexts] int64 of contexts [contexts, length], nearest token first."""
    number = torch.zeros(len(tokens), dtype=torch.int64)
    for token in tokens.unbind(dim=1):
        number = child_path(number, token)
    return number
