# SPDX-License-Identifier: Apache-2.0
"""`specinfer profile`: how often SSMs have the LLM's token among their first k, alone and merged (SpecInfer, Table 1).

One pass of each SSM over texts that the LLM wrote: at a node whose path was accepted an SSM has read just that text, so
its ranks there are the acceptance that drafting meets. Every measurement is of greedy verification: the LLM's token is
its likeliest one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.train import curves
from specinfer_vllm.train import tune as tuning
from specinfer_vllm.train.corpus import Corpus
from specinfer_vllm.train.cut import weight_hashes
from specinfer_vllm.train.inputs import InputError, read_json
from specinfer_vllm.tree.shape import Ranks

DEEPEST, WIDEST = 8, 16  # levels and children that are counted


@dataclass(frozen=True)
class Profile:
    """Ranks of the LLM's token for every SSM, WIDEST where it is not among so many.

    ssms      folders
    sha256    of each one's weights
    rank      [ssms, places] int64
    offsets   [texts + 1] int64
    """

    ssms: tuple[str, ...]
    sha256: tuple[str, ...]
    rank: np.ndarray
    offsets: np.ndarray

    def ranks(self, ssm: int) -> Ranks:
        """Of one SSM."""
        return Ranks(self.rank[ssm], self.offsets)

    def coverage(self, ssms: Sequence[int], width: int) -> float:
        """Share of places whose token one of the SSMs has among its first `width`."""
        return float((self.rank[list(ssms)] < width).any(axis=0).mean())

    def by_depth(self, ssm: int, width: int) -> list[float]:
        """Chance that a node at depth 1, 2, .. is accepted once its parent was, with `width` children on each level."""
        accepted = self.ranks(ssm).accepted([width] * DEEPEST)
        reached = [(accepted >= depth).sum() for depth in range(DEEPEST + 1)]
        return [float(after / max(before, 1)) for before, after in zip(reached, reached[1:], strict=False)]

    def summary(self) -> dict[str, Any]:
        """For people and for JSON."""
        every = range(len(self.ssms))
        return {
            "verification": "greedy",
            "texts": len(self.offsets) - 1,
            "places": self.rank.shape[1],
            "ssms": [
                {
                    "model": self.ssms[i],
                    "sha256": self.sha256[i],
                    "by_rank": [self.coverage([i], width) for width in range(1, WIDEST + 1)],
                    "by_depth": {f"{width} children": self.by_depth(i, width) for width in (1, 2, 3)},
                }
                for i in every
            ],
            "merged_by_rank": [self.coverage(every, width) for width in range(1, WIDEST + 1)],
        }

    def save(self, file: Path) -> None:
        """The summary as JSON, and the ranks beside it for `specinfer shape`; both are new files."""
        np.savez_compressed(file.with_suffix(".npz"), rank=self.rank.astype(np.uint8), offsets=self.offsets)
        file.write_text(json.dumps(self.summary(), indent=1))

    @classmethod
    def load(cls, file: Path) -> Profile:
        """What save wrote. InputError when it is missing or damaged."""
        try:
            listed = read_json(file)["ssms"]
            models, hashes = (tuple(each[name] for each in listed) for name in ("model", "sha256"))
            with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
                rank, offsets = arrays["rank"].astype(np.int64), arrays["offsets"].astype(np.int64)
            rising = offsets.ndim == 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
            if rank.ndim != 2 or len(rank) != len(models) or not rising or offsets[-1] != rank.shape[1]:
                raise ValueError("its arrays do not fit together")
        except Exception as error:  # whatever its damage leads to
            raise InputError(f"{file}: is no profile ({error}); make one with `specinfer profile`") from None
        return cls(models, hashes, rank, offsets)


def profile(corpus: Corpus, ssms: Sequence[Path], batch_tokens: int = 4096) -> Profile:
    """Ranks of the LLM's token at every place of the corpus' answers."""
    from tqdm import tqdm

    tuning.check_ssms(ssms, corpus)
    ranks, hashes = [], []
    for ssm in ssms:
        student = tuning.Student(ssm).eval()
        every = tuning.batches(corpus, np.arange(corpus.num_sequences), batch_tokens)
        rank = np.full(corpus.num_answers, WIDEST)
        for batch in tqdm(every, desc=ssm.name, unit="batch"):
            rank[batch.rows] = tuning.ranks(student, corpus, batch, WIDEST)
        ranks.append(rank)
        hashes.append(",".join(weight_hashes(ssm)))
    return Profile(tuple(map(str, ssms)), tuple(hashes), np.array(ranks), corpus.answer_offsets)


def plot(found: Profile, file: Path) -> None:
    """Acceptance by number of children, of each SSM and merged."""
    every, widths = range(len(found.ssms)), range(1, WIDEST + 1)
    groups = {Path(found.ssms[i]).name: [i] for i in every} | ({"merged": every} if len(every) > 1 else {})
    shares = {name: [found.coverage(group, width) for width in widths] for name, group in groups.items()}
    curves.plot(shares, widths, "children of each SSM", "holds the LLM's token", file)
