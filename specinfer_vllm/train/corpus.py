# SPDX-License-Identifier: Apache-2.0
"""What an LLM wrote, with its likeliest tokens at each place: a folder of safetensors parts, written one by one.

A part holds some sequences behind each other:

offsets      [sequences + 1] int64    sequence i is tokens[offsets[i]:offsets[i + 1]]
tokens       [total] int32            prompt and answer
first        [sequences] int64        where the answer begins, within the sequence: its law is known from there on
temperature  [sequences] float32      what the answer was drawn at, 0 = greedy
best         [answers, width] int32   the LLM's likeliest tokens at each place of the answers, -1 where fewer are known
logprob      [answers, width] float32 log of their probabilities at temperature 1
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.train.inputs import InputError, check_new, read_json
from specinfer_vllm.whole_file import whole_file

MANIFEST = "corpus.json"
FIELDS = {
    "offsets": np.int64,
    "tokens": np.int32,
    "first": np.int64,
    "temperature": np.float32,
    "best": np.int32,
    "logprob": np.float32,
}


@dataclass(frozen=True)
class Corpus:
    """Arrays as above, of one part or of many."""

    offsets: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    temperature: np.ndarray
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

    @property
    def answers(self) -> np.ndarray:
        """The tokens of the answers [answers] int32, one for each row of `best`."""
        ends = zip(self.offsets[1:], np.diff(self.answer_offsets), strict=True)
        return np.concatenate([np.zeros(0, np.int32), *(self.tokens[end - count : end] for end, count in ends)])

    @classmethod
    def of(cls, sequences: Sequence[tuple[Sequence[int], int, float, np.ndarray, np.ndarray]], width: int) -> Corpus:
        """From (tokens, first, temperature, best, logprob) of each sequence."""
        lengths = [len(tokens) for tokens, *_ in sequences]
        empty = np.zeros((0, width))
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.concatenate([np.zeros(0), *(tokens for tokens, *_ in sequences)]).astype(np.int32),
            first=np.array([first for _, first, *_ in sequences], np.int64),
            temperature=np.array([temperature for _, _, temperature, *_ in sequences], np.float32),
            best=np.concatenate([empty, *(best for *_, best, _ in sequences)]).astype(np.int32),
            logprob=np.concatenate([empty, *(logprob for *_, logprob in sequences)]).astype(np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Corpus]) -> Corpus:
        """The sequences of all parts."""
        if len({part.best.shape[1] for part in parts}) > 1:
            raise InputError("the corpus' parts keep different numbers of likeliest tokens; generate it anew")
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        others = {name: np.concatenate([getattr(part, name) for part in parts]) for name in list(FIELDS)[1:]}
        return cls(offsets=np.concatenate([[0], *offsets]), **others)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """All finished parts of a folder. InputError when there are none, or one is damaged."""
        parts = [read_part(file) for file in part_files(folder)]
        if not sum(part.num_answers for part in parts):
            raise InputError(f"{folder}: holds no corpus; make one with `specinfer generate LLM --out {folder}`")
        return cls.joined(parts)


def frequent_tokens(corpus: Corpus, size: int) -> np.ndarray:
    """A draft vocabulary: the `size` ids that most often are the LLM's token or its likeliest, rising, int64."""
    likeliest = corpus.best[:, 0]
    counts = np.bincount(np.concatenate([corpus.answers, likeliest[likeliest >= 0]]))
    chosen = np.argsort(-counts, kind="stable")[:size]
    return np.sort(chosen[counts[chosen] > 0])


class CorpusWriter:
    """Writes the parts of a folder that are not there yet; what is there is kept."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        """recipe: what the parts are made of. InputError when the folder was made by another one."""
        self.folder = folder
        manifest = folder / MANIFEST
        if manifest.exists():
            differing = _differing(read_json(manifest), recipe)
            if differing:
                raise InputError(f"{folder}: was made with another {', '.join(differing)}; name a new folder")
        else:
            check_new(folder)
            folder.mkdir(parents=True, exist_ok=True)
            _write(manifest, json.dumps(recipe, indent=1).encode())

    def missing(self, parts: int) -> list[int]:
        """Numbers below `parts` of those that are not there."""
        return [number for number in range(parts) if not self._file(number).exists()]

    def write(self, number: int, part: Corpus) -> None:
        """Part `number`, under its name in one piece."""
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(getattr(part, name), dtype) for name, dtype in FIELDS.items()}
        _write(self._file(number), save(arrays))

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"


def part_files(folder: Path) -> list[Path]:
    """The finished parts of a corpus in their order."""
    return sorted(folder.glob("part-*.safetensors"))


def read_part(file: Path) -> Corpus:
    """One part. InputError when it is damaged."""
    from safetensors.numpy import load_file

    remedy = "remove it and run `specinfer generate` again, which writes it anew"
    try:
        arrays = load_file(file)
        part = Corpus(**{name: arrays[name] for name in FIELDS})
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    except Exception as error:  # whatever its damage leads to
        raise InputError(f"{file}: damaged ({error}); {remedy}") from None
    lengths = np.diff(part.offsets)
    fits = part.offsets.ndim == part.first.ndim == 1 and len(lengths) == len(part.first) == len(part.temperature)
    fits = fits and part.temperature.ndim == 1 and part.best.ndim == 2
    fits = fits and part.offsets[0] == 0 and part.offsets[-1] == len(part.tokens) and (part.tokens >= 0).all()
    fits = fits and (part.first >= 0).all() and (part.first <= lengths).all() and part.best.shape == part.logprob.shape
    if not fits or part.answer_offsets[-1] != len(part.best) or not part.best.shape[1]:
        raise InputError(f"{file}: damaged (its arrays do not fit together); {remedy}")
    return part


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def _write(file: Path, content: bytes) -> None:
    with whole_file(file) as draft:
        draft.write_bytes(content)
