# SPDX-License-Identifier: Apache-2.0
"""What an LLM wrote, with its likeliest tokens at each place: a folder of safetensors parts, written one by one.

A part holds some sequences behind each other:

offsets    [sequences + 1] int64    sequence i is tokens[offsets[i]:offsets[i + 1]]
tokens     [total] int32            prompt and answer
first      [sequences] int64        where the answer begins, within the sequence: its law is known from there on
best       [answers, width] int32   the LLM's likeliest tokens at each place of the answers, -1 where fewer are known
logprob    [answers, width] float32     log of their probabilities at temperature 1
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "corpus.json"
FIELDS = {"offsets": np.int64, "tokens": np.int32, "first": np.int64, "best": np.int32, "logprob": np.float32}


class CorpusError(ValueError):
    """A corpus that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Corpus:
    """Arrays as above, of one part or of many."""

    offsets: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    best: np.ndarray
    logprob: np.ndarray

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return len(self.first)

    @property
    def num_answers(self) -> int:
        """Places whose law is known."""
        return len(self.best)

    @property
    def answer_offsets(self) -> np.ndarray:
        """Rows of `best` that belong to each sequence [sequences + 1] int64."""
        return np.concatenate([[0], np.cumsum(np.diff(self.offsets) - self.first)])

    @classmethod
    def of(cls, sequences: Sequence[tuple[Sequence[int], int, np.ndarray, np.ndarray]], width: int) -> Corpus:
        """From (tokens, first, best, logprob) of each sequence."""
        lengths = [len(tokens) for tokens, *_ in sequences]
        empty = np.zeros((0, width))
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.concatenate([np.zeros(0), *(tokens for tokens, *_ in sequences)]).astype(np.int32),
            first=np.array([first for _, first, *_ in sequences], np.int64),
            best=np.concatenate([empty, *(best for *_, best, _ in sequences)]).astype(np.int32),
            logprob=np.concatenate([empty, *(logprob for *_, logprob in sequences)]).astype(np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Corpus]) -> Corpus:
        """The sequences of all parts."""
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        others = {name: np.concatenate([getattr(part, name) for part in parts]) for name in list(FIELDS)[1:]}
        return cls(offsets=np.concatenate([[0], *offsets]), **others)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """All finished parts of a folder. CorpusError when there are none, or one is damaged."""
        parts = [read_part(file) for file in part_files(folder)]
        if not sum(part.num_answers for part in parts):
            raise CorpusError(f"{folder}: holds no corpus; make one with `specinfer generate LLM --out {folder}`")
        return cls.joined(parts)


def frequent_tokens(corpus: Corpus, size: int) -> np.ndarray:
    """A draft vocabulary: the `size` ids that most often are the LLM's token or its likeliest, rising, int64."""
    likeliest = corpus.best[:, 0]
    ends = zip(corpus.offsets[1:], np.diff(corpus.answer_offsets), strict=True)
    answers = np.concatenate([corpus.tokens[end - count : end] for end, count in ends])
    counts = np.bincount(np.concatenate([answers, likeliest[likeliest >= 0]]))
    chosen = np.argsort(-counts, kind="stable")[:size]
    return np.sort(chosen[counts[chosen] > 0])


class CorpusWriter:
    """Appends parts to a folder; what is there already is kept, and counted by `num_parts`."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        """recipe: what the parts are made of. CorpusError when the folder was made by another one."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / MANIFEST
        if manifest.exists():
            differing = _differing(json.loads(manifest.read_text()), recipe)
            if differing:
                raise CorpusError(f"{folder}: was made with another {', '.join(differing)}; name a new folder")
        elif any(folder.iterdir()):
            raise CorpusError(f"{folder}: holds other files; name a new folder")
        else:
            _replace(manifest, json.dumps(recipe, indent=1).encode())
        self.num_parts = len(part_files(folder))

    def append(self, part: Corpus) -> None:
        """One more part, under its name in one piece."""
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(getattr(part, name), dtype) for name, dtype in FIELDS.items()}
        _replace(self.folder / f"part-{self.num_parts:05d}.safetensors", save(arrays))
        self.num_parts += 1


def check_new(folder: Path) -> None:
    """CorpusError when a folder to be written is there already, and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CorpusError(f"{folder}: holds files already; name a new folder")


def check_disk(folder: Path, needed: int) -> None:
    """CorpusError when the disk that `folder` is to lie on has less than `needed` bytes left."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CorpusError(
            f"{folder}: needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free; choose another"
        )


def part_files(folder: Path) -> list[Path]:
    """The finished parts of a corpus in their order."""
    return sorted(folder.glob("part-*.safetensors"))


def read_part(file: Path) -> Corpus:
    """One part. CorpusError when it is damaged."""
    from safetensors.numpy import load_file

    try:
        part = Corpus(**{name: load_file(file)[name] for name in FIELDS})
    except Exception as error:
        raise CorpusError(f"{file}: damaged ({error}); remove it and run the same command again") from error
    if part.offsets[-1] != len(part.tokens) or part.answer_offsets[-1] != len(part.best):
        raise CorpusError(f"{file}: its arrays do not fit together; remove it and run the same command again")
    return part


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def _replace(file: Path, content: bytes) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)
