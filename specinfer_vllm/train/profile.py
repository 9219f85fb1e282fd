# SPDX-License-Identifier: Apache-2.0
"""`specinfer profile`: how often SSMs have the LLM's token among their first k, alone and merged (SpecInfer, Table 1).

One pass of each SSM over texts that the LLM wrote: at a node whose path was accepted an SSM has read just that text, so
its ranks there are the acceptance that drafting meets. The LLM's token is the one in the text: its likeliest in greedy
answers, a draw in the others, whose counts are therefore those of `naive` with likeliest children.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.train import curves
from specinfer_vllm.train import tune as tuning
from specinfer_vllm.train.corpus import Corpus
from specinfer_vllm.train.cut import weight_hashes
from specinfer_vllm.train.inputs import InputError, read_json
from specinfer_vllm.tree.shape import Ranks
from specinfer_vllm.whole_file import whole_file

DEEPEST, WIDEST = 8, 16  # levels and children that are counted


@dataclass(frozen=True)
class Profile:
    """Ranks of the LLM's token for every SSM, WIDEST where it is not among so many.

    ssms         folders
    sha256       of each one's weights
    rank         [ssms, places] int64
    offsets      [texts + 1] int64
    temperature  [texts] float32    of each one, 0 = greedy
    """

    ssms: tuple[str, ...]
    sha256: tuple[str, ...]
    rank: np.ndarray
    offsets: np.ndarray
    temperature: np.ndarray

    @property
    def temperatures(self) -> list[float]:
        """Those of the texts, rising."""
        return [round(float(each), 6) for each in np.unique(self.temperature)]

    def at(self, temperature: float) -> Profile:
        """Of the texts at one temperature only. InputError when there are none."""
        texts = np.flatnonzero(np.isclose(self.temperature, temperature))
        if not len(texts):
            known = ", ".join(f"{each:g}" for each in self.temperatures)
            raise InputError(f"--temperature {temperature:g}: the profile has texts at {known}; name one of these")
        return self.of(texts)

    def of(self, texts: np.ndarray) -> Profile:
        """Of some of the texts [n] int64, rising."""
        lengths = np.diff(self.offsets)
        places = np.repeat(np.isin(np.arange(len(lengths)), texts), lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths[texts])])
        return replace(self, rank=self.rank[:, places], offsets=offsets, temperature=self.temperature[texts])

    def groups(self) -> dict[str, list[int]]:
        """What acceptance is counted for, by name: each SSM, and all of them where there are several."""
        every = list(range(len(self.ssms)))
        names = [Path(ssm).name for ssm in self.ssms]
        labels = [name if names.count(name) == 1 else ssm for name, ssm in zip(names, self.ssms, strict=True)]
        return {label: [i] for i, label in enumerate(labels)} | ({"merged": every} if len(every) > 1 else {})

    def ranks(self, ssm: int) -> Ranks:
        """Of one SSM."""
        return Ranks(self.rank[ssm], self.offsets, WIDEST)

    def coverage(self, ssms: Sequence[int], width: int) -> float:
        """Share of places whose token one of the SSMs has among its first `width`."""
        return float((self.rank[list(ssms)] < width).any(axis=0).mean())

    def by_depth(self, ssm: int, width: int) -> list[float]:
        """Chance that a node at depth 1, 2, .. is accepted once its parent was, with `width` children on each level."""
        accepted = self.ranks(ssm).accepted([width] * DEEPEST)
        ends = np.repeat(self.offsets[1:], np.diff(self.offsets))
        left = ends - np.arange(len(ends)) - 1  # tokens that could be accepted before the text ends
        shares = []
        for depth in range(1, DEEPEST + 1):
            tried = (accepted >= depth - 1) & (left >= depth)
            shares.append(float((accepted[tried] >= depth).mean()) if tried.any() else 0.0)
        return shares

    def summary(self) -> dict[str, Any]:
        """For people and for JSON."""
        ssms = [{"model": model, "sha256": digest} for model, digest in zip(self.ssms, self.sha256, strict=True)]
        return {"ssms": ssms, "acceptance": [self.at(each).acceptance() for each in self.temperatures]}

    def acceptance(self) -> dict[str, Any]:
        """Counts and shares over texts of one temperature."""
        every = range(len(self.ssms))
        return {
            "temperature": self.temperatures[0],
            "verification": "naive" if self.temperatures[0] else "greedy",
            "texts": len(self.temperature),
            "places": self.rank.shape[1],
            "ssms": [
                {
                    "by_rank": [self.coverage([i], width) for width in range(1, WIDEST + 1)],
                    "by_depth": {f"{width} children": self.by_depth(i, width) for width in (1, 2, 3)},
                }
                for i in every
            ],
            "merged_by_rank": [self.coverage(every, width) for width in range(1, WIDEST + 1)],
        }

    def save(self, file: Path) -> None:
        """The summary as JSON, and the ranks beside it for `specinfer shape`; both are new files."""
        arrays = {"rank": self.rank.astype(np.uint8), "offsets": self.offsets, "temperature": self.temperature}
        np.savez_compressed(file.with_suffix(".npz"), **arrays)
        with whole_file(file) as draft:
            draft.write_text(json.dumps(self.summary(), indent=1))

    @classmethod
    def load(cls, file: Path) -> Profile:
        """What save wrote. InputError when it is missing or damaged."""
        try:
            listed = read_json(file)["ssms"]
            models, hashes = (tuple(each[name] for each in listed) for name in ("model", "sha256"))
            with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
                rank, offsets = arrays["rank"].astype(np.int64), arrays["offsets"].astype(np.int64)
                temperature = arrays["temperature"].astype(np.float32)
            rising = offsets.ndim == 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
            fits = rank.ndim == 2 and len(rank) == len(models) and temperature.shape == (len(offsets) - 1,)
            if not rising or not fits or offsets[-1] != rank.shape[1]:
                raise ValueError("its arrays do not fit together")
        except Exception as error:  # whatever its damage leads to
            raise InputError(f"{file}: is no profile ({error}); make one with `specinfer profile`") from None
        return cls(models, hashes, rank, offsets, temperature)


def profile(corpus: Corpus, ssms: Sequence[Path], batch_tokens: int = 4096) -> Profile:
    """Ranks of the LLM's token at every place of the corpus' answers."""
    from tqdm import tqdm

    tuning.check_ssms(ssms, corpus)
    ranks, hashes, answers = [], [], corpus.answers
    for ssm in ssms:
        student = tuning.Student(ssm).eval()
        every = tuning.batches(corpus, np.arange(corpus.num_sequences), batch_tokens)
        rank = np.full(corpus.num_answers, WIDEST)
        for batch in tqdm(every, desc=ssm.name, unit="batch"):
            rank[batch.rows] = tuning.ranks(student, answers, batch, WIDEST)
        ranks.append(rank)
        hashes.append(",".join(weight_hashes(ssm)))
    folders = tuple(str(ssm.resolve()) for ssm in ssms)
    return Profile(folders, tuple(hashes), np.array(ranks), corpus.answer_offsets, corpus.temperature)


def plot(found: Profile, file: Path) -> None:
    """Acceptance by number of children, of each SSM and merged, at every temperature."""
    widths, shares = range(1, WIDEST + 1), {}
    for temperature in found.temperatures:
        part = found.at(temperature)
        for name, group in found.groups().items():
            shares[f"{name}, T={temperature:g}"] = [part.coverage(group, width) for width in widths]
    curves.plot(shares, widths, "children of each SSM", "holds the LLM's token", file)
