# SPDX-License-Identifier: Apache-2.0
"""What the LLM said after which context: a bounded ring of its best next tokens, found by owner and token.

Token recycling (arXiv 2408.08696, section 3.2) keeps one row per token of the vocabulary. Here a row also keeps the
tokens in front of it, so that of several rows for one token the one with the most alike context can count most, and the
request it belongs to, so that nobody else's rows are found.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from specinfer_vllm.propose.primer import CONTEXT, read_primer
from specinfer_vllm.propose.proposer import Observation
from specinfer_vllm.whole_file import whole_file

NOBODY = 0  # owner of rows that every request may read
UNIT = 255  # a probability of 1
FIRST_ROWS = 1024


class Rows(NamedTuple):
    """The arrays behind SuccessorRows, as kernels take them. The row written as number n stands at n % capacity.

    context        [capacity, CONTEXT] int32   the row's token and those in front of it, nearest first, -1 where unknown
    owner          [capacity] int64
    successors     [capacity, k] int32         best first, -1 behind the last one
    probabilities  [capacity, k] uint8         in units of 1 / UNIT
    older          [capacity] int64            number of the row written before this one in the same bucket, -1 = none
    newest         [buckets] int64             number of each bucket's last row, -1 = none; buckets = a power of two
    written        [1] int64                   rows written so far
    """

    context: np.ndarray
    owner: np.ndarray
    successors: np.ndarray
    probabilities: np.ndarray
    older: np.ndarray
    newest: np.ndarray
    written: np.ndarray


class SuccessorRows:
    """Rows of the LLM's best next tokens: doubles up to `max_rows`, then the oldest row of all gives way to the newest.

    max_rows    bound on rows; one takes 32 + 5 * width bytes, and 8 to 16 more go to its share of the buckets
    width       successors kept per row
    vocab_size  tokens outside 0 <= token < vocab_size are never stored
    """

    def __init__(self, max_rows: int, width: int, vocab_size: int) -> None:
        for name, value in (("max_rows", max_rows), ("width", width), ("vocab_size", vocab_size)):
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        self.max_rows, self.width, self.vocab_size = max_rows, width, vocab_size
        self.rows = _blank(min(FIRST_ROWS, max_rows), width, 1 << (max_rows - 1).bit_length())

    @property
    def num_rows(self) -> int:
        """Rows that can be found."""
        return min(int(self.rows.written[0]), len(self.rows.owner))

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self.rows)

    def append(self, owners: np.ndarray, tails: np.ndarray, seen: Observation) -> None:
        """Add one row per row of `seen` whose slot, token and successors are valid.

        owners  [slots] int64               who the rows of a slot belong to
        tails   [slots, CONTEXT - 1] int32  last tokens read on each slot, nearest first; moved on by `seen`
        """
        self._reserve(len(seen.slots))
        _append(
            self.rows,
            owners,
            tails,
            np.asarray(seen.slots, np.int64),
            np.asarray(seen.tokens, np.int32),
            np.ascontiguousarray(seen.successors, np.int32),
            np.ascontiguousarray(seen.probabilities, np.float32),
            self.vocab_size,
        )

    def _reserve(self, more: int) -> None:
        capacity, written = len(self.rows.owner), int(self.rows.written[0])
        wanted = min(written + more, self.max_rows)
        if wanted <= capacity:
            return
        while capacity < wanted:
            capacity = min(2 * capacity, self.max_rows)
        # The ring has not wrapped yet, since it grows before it would: row n stands at n in either size.
        larger = _blank(capacity, self.width, 0)
        for array, old in zip(larger[:5], self.rows[:5], strict=True):
            array[: len(old)] = old
        self.rows = larger._replace(newest=self.rows.newest, written=self.rows.written)

    def save(self, path: Path) -> None:
        """Write the rows to a compressed .npz, oldest first, without their owners; under its name in one piece."""
        start = max(0, int(self.rows.written[0]) - len(self.rows.owner))
        order = np.arange(start, int(self.rows.written[0])) % len(self.rows.owner)
        with whole_file(path) as draft, draft.open("wb") as file:  # a file, since numpy would add .npz to a name
            np.savez_compressed(
                file,
                vocab_size=self.vocab_size,
                context=self.rows.context[order],
                successors=self.rows.successors[order],
                probabilities=self.rows.probabilities[order],
            )

    @classmethod
    def load(cls, path: Path, vocab_size: int, max_rows: int | None = None) -> SuccessorRows:
        """Rows that `save` wrote, owned by NOBODY; the newest max_rows of them.

        OSError: cannot be read. ValueError: another vocabulary, or not such a file.
        """
        context, successors, probabilities = read_primer(path, vocab_size)
        count = len(context) if max_rows is None else min(max_rows, len(context))
        loaded = cls(max(count, 1), successors.shape[1], vocab_size)
        # Each row is its own slot here: its context comes from its tail and not from the row before.
        context = context[len(context) - count :].astype(np.int32)
        loaded.append(
            np.full(count, NOBODY, np.int64),
            context[:, 1:].copy(),
            Observation(
                slots=np.arange(count),
                tokens=context[:, 0],
                successors=successors[len(successors) - count :],
                probabilities=probabilities[len(probabilities) - count :].astype(np.float32) / UNIT,
            ),
        )
        return loaded


def _blank(capacity: int, width: int, buckets: int) -> Rows:
    return Rows(
        context=np.full((capacity, CONTEXT), -1, np.int32),
        owner=np.full(capacity, -1, np.int64),
        successors=np.full((capacity, width), -1, np.int32),
        probabilities=np.zeros((capacity, width), np.uint8),
        older=np.full(capacity, -1, np.int64),
        newest=np.full(buckets, -1, np.int64),
        written=np.zeros(1, np.int64),
    )


@numba.njit(cache=True, nogil=True)
def bucket_of(owner, token, buckets):
    """Bucket of an owner's rows for a token; buckets is a power of two."""
    mixed = (np.int64(token) * 0x9E3779B1 + np.int64(owner) * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) & (buckets - 1)


@numba.njit(cache=True, nogil=True)
def _append(rows, owners, tails, slots, tokens, successors, probabilities, vocab_size):
    capacity, buckets = len(rows.owner), len(rows.newest)
    width = min(rows.successors.shape[1], successors.shape[1])
    for i in range(len(slots)):
        slot, token = slots[i], tokens[i]
        if not 0 <= slot < len(owners):
            continue
        tail = tails[slot]
        if 0 <= token < vocab_size:
            number = rows.written[0]
            at = number % capacity
            kept = 0
            for k in range(width):
                successor, probability = successors[i, k], probabilities[i, k]
                unit = int(min(probability, 1.0) * UNIT + 0.5) if probability > 0 else 0
                if 0 <= successor < vocab_size and unit > 0:
                    rows.successors[at, kept] = successor
                    rows.probabilities[at, kept] = unit
                    kept += 1
            rows.successors[at, kept:] = -1
            rows.probabilities[at, kept:] = 0
            rows.context[at, 0] = token
            rows.context[at, 1:] = tail
            rows.owner[at] = owners[slot]
            bucket = bucket_of(owners[slot], token, buckets)
            rows.older[at] = rows.newest[bucket]
            rows.newest[bucket] = number
            rows.written[0] = number + 1
        for back in range(CONTEXT - 2, 0, -1):
            tail[back] = tail[back - 1]
        tail[0] = token
