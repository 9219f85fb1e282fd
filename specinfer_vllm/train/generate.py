# SPDX-License-Identifier: Apache-2.0
"""`specinfer generate`: the LLM writes the corpus its SSMs learn from, with its likeliest tokens at every place.

Without a prompt file it asks itself: it continues the chat template's opening of a user's turn, which gives questions
of the kind it was tuned on (Xu et al. 2024, arXiv 2406.08464), some behind given first words, and then answers them. No
data set is needed.
Every batch follows from the seed and its number alone, so a run that was stopped is gone on with where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.train.corpus import Corpus, CorpusWriter
from specinfer_vllm.train.inputs import InputError
from specinfer_vllm.train.starts import STARTS

MARK = "\x00question\x00"
MIN_QUESTION = 4  # tokens; shorter ones are what a sampled end of turn leaves
CONCURRENT = 128  # requests at a time; a part holds more, so that its last answers do not leave the machine idle


@dataclass(frozen=True)
class Recipe:
    """What a corpus is made of.

    samples        sequences in all
    batch          sequences of one part
    temperatures   of the answers, in turns; 0 = greedy
    asking         temperature of the questions
    max_tokens     of an answer; question_tokens: of a question
    width          likeliest tokens kept at each place
    prompts        what the questions are instead of its own, by SHA-256 or name
    starts         first words of its own questions, in turns
    dtype          vLLM's; another one rounds to another text
    """

    model: str
    samples: int = 2048
    batch: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.5, 0.9)
    asking: float = 0.8
    max_tokens: int = 256
    question_tokens: int = 96
    width: int = 16
    seed: int = 0
    prompts: str = ""
    starts: tuple[str, ...] = STARTS
    dtype: str = "auto"

    def as_dict(self) -> dict[str, Any]:
        """For the corpus' manifest: what its texts follow from; `samples` may grow."""
        named = vars(self) | {"temperatures": list(self.temperatures), "starts": list(self.starts)}
        unused = {"samples", *(("starts", "asking", "question_tokens") if self.prompts else ())}
        return {name: value for name, value in named.items() if name not in unused}


def read_prompts(file: Path) -> list[str]:
    """The prompts of a text file, one per line, or of a .jsonl file of strings or objects with "prompt" or "text".

    Raises InputError that names the line at fault.
    """
    if not file.is_file():
        raise InputError(f"--prompts {file}: no such file")
    prompts = []
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {file}: is no UTF-8 text ({error})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        prompts.append(_prompt(line, f"--prompts {file}, line {number}") if file.suffix == ".jsonl" else line.strip())
    if not prompts:
        raise InputError(f"--prompts {file}: is empty")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: is no JSON ({error})") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text"))
    if not isinstance(value, str) or not value.strip():
        raise InputError(f'{where}: must be a string, or an object with a string "prompt" or "text"')
    return value


def serving(recipe: Recipe, max_model_len: int) -> Any:
    """Plain vLLM."""
    from specinfer_vllm.bench import engines

    engines.use_all_cores()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; a CPU's default is nearly all memory, and swaps
    from vllm import LLM

    return LLM(
        model=recipe.model,
        dtype=recipe.dtype,
        max_model_len=max_model_len,
        max_num_seqs=min(recipe.batch, CONCURRENT),
        # vLLM 0.32 ends on a CPU when a seeded prompt is read in chunks ("CPU Generator does not use offset").
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(2048, max_model_len),
        enforce_eager=True,
        seed=0,
    )


def generate(llm: Any, recipe: Recipe, writer: CorpusWriter, prompts: Sequence[str] = ()) -> Corpus:
    """Write the parts that are still missing and return the corpus. llm: a vLLM `LLM`; prompts: instead of its own."""
    from tqdm import tqdm

    tokenizer = llm.get_tokenizer()
    opening, closing = turn(tokenizer)
    special = set(tokenizer.all_special_ids)  # no question holds them
    total = -(-recipe.samples // recipe.batch)
    missing = writer.missing(total)
    for number in tqdm(missing, initial=total - len(missing), total=total, unit="part", desc="generate"):
        seeds = [_seed(recipe.seed, number, i) for i in range(recipe.batch)]
        asked = [prompts[(number * recipe.batch + i) % len(prompts)] for i in range(recipe.batch)] if prompts else []
        texts = [tokenizer.encode(text, add_special_tokens=False) for text in asked]
        if not prompts:
            texts = questions(llm, recipe, number, opening, special, seeds)
        chats = [[*opening, *text, *closing] for text in texts]
        part = answered(llm, recipe, chats, seeds[: len(chats)])
        writer.write(number, part)
        tqdm.write(f"part {number}: {part.num_sequences} answers, {part.num_answers} tokens")
    return Corpus.load(writer.folder)


def _seed(*numbers: int) -> int:
    """A request's seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "little")


def questions(
    llm: Any, recipe: Recipe, number: int, opening: list[int], special: set[int], seeds: Sequence[int]
) -> list[list[int]]:
    """What the LLM would ask: token ids behind `opening`, without `special` ones; number: of the part."""
    from vllm import SamplingParams

    tokenizer, turns = llm.get_tokenizer(), len(recipe.temperatures)
    starts = [tokenizer.encode(start, add_special_tokens=False) for start in recipe.starts]
    # Every start meets every temperature of the answers.
    begun = [starts[(number + i // turns) % len(starts)] for i in range(len(seeds))]
    params = [
        SamplingParams(temperature=recipe.asking, top_p=0.99, max_tokens=recipe.question_tokens, seed=seed)
        for seed in seeds
    ]
    outputs = llm.generate([{"prompt_token_ids": [*opening, *each]} for each in begun], params, use_tqdm=False)
    written = [
        [*start, *(token for token in each.outputs[0].token_ids if token not in special)]
        for start, each in zip(begun, outputs, strict=True)
    ]
    return [question for question in written if len(question) >= MIN_QUESTION]


def turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids (before a user's text, between it and the answer) by the chat template; the start token without one."""
    if not tokenizer.chat_template:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise InputError("the LLM has neither a chat template nor a token that begins or ends texts")
        return [start], []
    chat = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if text.count(MARK) != 1:
        raise InputError("the LLM's chat template does not keep a user's text as it is; give --prompts to a base model")
    opening, closing = text.split(MARK)
    return tokenizer.encode(opening, add_special_tokens=False), tokenizer.encode(closing, add_special_tokens=False)


def answered(llm: Any, recipe: Recipe, chats: Sequence[list[int]], seeds: Sequence[int]) -> Corpus:
    """The LLM's answers to prompts of token ids, with its likeliest tokens."""
    from vllm import SamplingParams

    limit = llm.llm_engine.vllm_config.model_config.max_model_len - recipe.max_tokens
    fitting = [(chat, seed) for chat, seed in zip(chats, seeds, strict=True) if len(chat) < limit]
    if not fitting:  # questions that were too long or too short: the part stays empty, and the run goes on
        return Corpus.of([], recipe.width)
    chats, seeds = zip(*fitting, strict=True)
    params = [
        SamplingParams(
            temperature=recipe.temperatures[i % len(recipe.temperatures)],
            max_tokens=recipe.max_tokens,
            seed=seed,
            logprobs=recipe.width,
            detokenize=False,
        )
        for i, seed in enumerate(seeds)
    ]
    outputs = llm.generate([{"prompt_token_ids": chat} for chat in chats], params, use_tqdm=False)
    sequences = []
    for chat, asked, output in zip(chats, params, outputs, strict=True):
        answer, law = output.outputs[0], likeliest(output.outputs[0].logprobs, recipe.width)
        sequences.append(([*chat, *answer.token_ids], len(chat), asked.temperature, *law))
    return Corpus.of(sequences, recipe.width)


def likeliest(positions: Sequence[dict[int, Any]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n, width] int32, log-probabilities [n, width] float32) of vLLM's logprobs, likeliest first."""
    best = np.full((len(positions), width), -1, np.int32)
    logprob = np.full((len(positions), width), -np.inf, np.float32)
    for i, entries in enumerate(positions):
        ranked = sorted(entries.items(), key=lambda entry: -entry[1].logprob)[:width]
        best[i, : len(ranked)] = [token for token, _ in ranked]
        logprob[i, : len(ranked)] = [entry.logprob for _, entry in ranked]
    return best, logprob
