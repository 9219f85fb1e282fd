# SPDX-License-Identifier: Apache-2.0
"""What an LLM writes to a list of chats, greedily, and its best next tokens at each place, kept in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.bench import engines
from specinfer_vllm.whole_file import whole_file

AT_ONCE = 20


@dataclass(frozen=True, eq=False)
class Recording:
    """Chats one behind the other; row i of the outputs is the LLM's law that wrote output token i.

    prompts         [prompt tokens] int32      prompt_offsets [chats + 1] int64
    outputs         [output tokens] int32      output_offsets [chats + 1] int64
    successors      [output tokens, k] int32   the LLM's k best next tokens, best first, -1 behind the last known one
    probabilities   [output tokens, k] float32
    vocab_size      tokens of the LLM's vocabulary
    """

    prompts: np.ndarray
    prompt_offsets: np.ndarray
    outputs: np.ndarray
    output_offsets: np.ndarray
    successors: np.ndarray
    probabilities: np.ndarray
    vocab_size: int

    @property
    def num_chats(self) -> int:
        """Chats recorded."""
        return len(self.output_offsets) - 1

    def text(self, chat: int) -> tuple[np.ndarray, int]:
        """(tokens of prompt and output, length of the prompt) of a chat."""
        prompt = self.prompts[self.prompt_offsets[chat] : self.prompt_offsets[chat + 1]]
        output = self.outputs[self.output_offsets[chat] : self.output_offsets[chat + 1]]
        return np.concatenate([prompt, output]), len(prompt)

    def head(self, chats: int) -> Recording:
        """The first `chats` chats."""
        chats = min(chats, self.num_chats)
        prompt_end, end = self.prompt_offsets[chats], self.output_offsets[chats]
        return Recording(
            self.prompts[:prompt_end],
            self.prompt_offsets[: chats + 1],
            self.outputs[:end],
            self.output_offsets[: chats + 1],
            self.successors[:end],
            self.probabilities[:end],
            self.vocab_size,
        )

    def save(self, path: Path, recipe: str = "") -> None:
        """Write to a compressed .npz, in one piece."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        with whole_file(path) as draft, draft.open("wb") as file:  # a file, since numpy would add .npz to a name
            np.savez_compressed(file, recipe=recipe, **arrays)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """What `save` wrote. OSError, KeyError, ValueError: no such file, or another kind of file."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {each.name: file[each.name] for each in fields(cls)}
        return cls(**(arrays | {"vocab_size": int(arrays["vocab_size"])}))


def record(model: Path | str, chats: Sequence[list[dict[str, str]]], tokens: int, width: int, path: Path) -> Recording:
    """Record the greedy outputs of plain vLLM, `tokens` each, into `path`; what lies there already is not done again.

    model   folder or hub id
    chats   messages as `LLM.chat` takes them
    width   best next tokens per place
    """
    recipe = _recipe(model, chats, tokens, width)
    done = _recorded(path, recipe)
    if done is not None and done.num_chats == len(chats):
        return done
    # The engine runs in this process: it starts in 20 s, and nothing else is going on here.
    engines.use_in_process()
    from tqdm import tqdm
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 29,
        max_num_seqs=AT_ONCE,
        max_model_len=2048,
        max_logprobs=width,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=width)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    start = done.num_chats if done is not None else 0
    for first in tqdm(range(start, len(chats), AT_ONCE), desc="recording", unit=f"{AT_ONCE} chats"):
        answers = llm.chat(list(chats[first : first + AT_ONCE]), params, use_tqdm=False)
        more = _of_answers(answers, width, vocab_size)
        done = more if done is None else _joined(done, more)
        done.save(path, recipe)
    return done


def _recipe(model: Path | str, chats: Sequence[list[dict[str, str]]], tokens: int, width: int) -> str:
    """What a file must have been made from to be gone on with, all but the number of chats."""
    words = json.dumps([str(model), tokens, width, chats[0] if chats else None])
    return hashlib.sha256(words.encode()).hexdigest()


def _recorded(path: Path, recipe: str) -> Recording | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["recipe"]) != recipe:
                return None
        return Recording.load(path)
    except (OSError, KeyError, ValueError):
        return None


def _of_answers(answers: Sequence[Any], width: int, vocab_size: int) -> Recording:
    places = [place for answer in answers for place in answer.outputs[0].logprobs]
    successors = np.full((len(places), width), -1, np.int32)
    probabilities = np.zeros((len(places), width), np.float32)
    for row, place in enumerate(places):
        for rank, (token, logprob) in enumerate(_best(place, width)):
            successors[row, rank], probabilities[row, rank] = token, np.exp(logprob)
    prompts = [answer.prompt_token_ids for answer in answers]
    outputs = [answer.outputs[0].token_ids for answer in answers]
    return Recording(
        *_concatenated(prompts),
        *_concatenated(outputs),
        successors,
        probabilities,
        vocab_size,
    )


def _best(place: dict[int, Any], width: int) -> Iterator[tuple[int, float]]:
    ranked = sorted(place.items(), key=lambda item: item[1].rank)
    return ((token, each.logprob) for token, each in ranked[:width])


def _concatenated(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0] + [len(each) for each in lists], dtype=np.int64)
    return np.concatenate([np.asarray(each, np.int32) for each in lists]), offsets


def _joined(left: Recording, right: Recording) -> Recording:
    return Recording(
        np.concatenate([left.prompts, right.prompts]),
        np.concatenate([left.prompt_offsets, left.prompt_offsets[-1] + right.prompt_offsets[1:]]),
        np.concatenate([left.outputs, right.outputs]),
        np.concatenate([left.output_offsets, left.output_offsets[-1] + right.output_offsets[1:]]),
        np.concatenate([left.successors, right.successors]),
        np.concatenate([left.probabilities, right.probabilities]),
        left.vocab_size,
    )
