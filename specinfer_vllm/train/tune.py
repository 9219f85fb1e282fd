# SPDX-License-Identifier: Apache-2.0
"""`specinfer tune`: boost-tuning (SpecInfer, section 3).

The first SSM learns from the whole corpus, each next one from the places where no SSM before it has the LLM's token
first. The loss is the Kullback-Leibler divergence from the LLM's law at the temperatures that will be served, over its
likeliest tokens within the draft vocabulary. Embeddings and head stay the LLM's own: they do not learn and need not be
stored. A run that was stopped goes on at its last checkpoint and ends with the same weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.propose.draft_vocab import check_ids
from specinfer_vllm.train.corpus import Corpus
from specinfer_vllm.train.curves import plot
from specinfer_vllm.train.cut import check_model, copy_texts, read_weights, weight_hashes
from specinfer_vllm.train.inputs import InputError, check_disk, check_memory, check_new, read_json

RANKS = 5
STATE = "tuning.json"
UNFINISHED = CHECKPOINT, DRAFT, RESULT = "tuning", "tuning.draft", "new"


@dataclass(frozen=True)
class Settings:
    """How an SSM is tuned.

    epochs          times over the corpus
    batch_tokens    tokens of one optimiser step
    learning_rate   highest, after warm-up; it falls to a tenth along a cosine
    temperatures    of the laws that are learnt, in turns: 1 keeps the law's shape, less sharpens it towards greedy
    held_out        share of the sequences that is never learnt from
    patience        epochs without a better held-out acceptance until it stops
    checkpoint      optimiser steps between checkpoints
    precision       accelerate's mixed precision: no, bf16, fp16
    """

    epochs: int = 4
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    temperatures: tuple[float, ...] = (1.0, 0.7)
    held_out: float = 0.05
    patience: int = 2
    checkpoint: int = 100
    precision: str = "no"
    seed: int = 0


@dataclass(frozen=True)
class Acceptance:
    """How often the LLM's likeliest token is among the SSM's k likeliest. hits [RANKS], at so many places."""

    hits: np.ndarray
    places: int

    @property
    def rates(self) -> list[float]:
        """Of k = 1..RANKS."""
        return [float(hit) / max(self.places, 1) for hit in self.hits]

    def __str__(self) -> str:
        return ", ".join(f"top-{k} {rate:.3f}" for k, rate in enumerate(self.rates, 1)) + f" of {self.places} places"


class Student(torch.nn.Module):
    """An SSM with its head narrowed to the draft vocabulary; embeddings and head do not learn."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        head = self.model.get_output_embeddings()
        for module in (head, self.model.get_input_embeddings()):
            module.requires_grad_(False)
        size = len(head.weight)
        file = folder / DRAFT_VOCAB
        ids = check_ids(file, size) if file.is_file() else np.arange(size)
        self.register_buffer("ids", torch.from_numpy(ids), persistent=False)
        self.register_buffer("narrow", head.weight.detach()[self.ids].clone(), persistent=False)
        place = torch.full((size,), -1, dtype=torch.int64)
        place[self.ids] = torch.arange(len(ids))
        self.register_buffer("place", place, persistent=False)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits [n, narrow] behind some of the tokens [sequences, longest]; at [n] int64 = their flat places."""
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        states = self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return states.flatten(0, 1)[at] @ self.narrow.T


def check_ssms(ssms: Sequence[Path], corpus: Corpus) -> None:
    """InputError unless every folder is a model that knows all of the corpus' tokens."""
    highest = int(max(corpus.tokens.max(initial=-1), corpus.best.max(initial=-1)))
    for folder in ssms:
        check_model(folder)
        size = read_json(folder / "config.json").get("vocab_size", 0)
        if highest >= size:
            raise InputError(f"{folder}: knows {size} tokens, the corpus holds token {highest}; use one of its own LLM")


@dataclass(frozen=True)
class Batch:
    """Some sequences, padded, and the places of their answers that count.

    tokens [sequences, longest], lengths [sequences], at [n] flat places whose next token's law is known,
    rows [n] rows of the corpus' `best`
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    at: torch.Tensor
    rows: np.ndarray


def batches(corpus: Corpus, chosen: np.ndarray, size: int, wanted: np.ndarray | None = None) -> list[Batch]:
    """Sequences of like lengths together, about `size` tokens a batch. wanted [answers] bool: places to keep."""
    lengths, rows = np.diff(corpus.offsets), corpus.answer_offsets
    ordered = chosen[np.argsort(lengths[chosen], kind="stable")]
    groups, group = [], []
    for sequence in ordered:
        group.append(sequence)
        if len(group) * lengths[sequence] >= size:
            groups.append(group)
            group = []
    groups += [group] if group else []
    return [each for each in (_batch(corpus, group, lengths, rows, wanted) for group in groups) if len(each.at)]


def _batch(corpus: Corpus, group: list, lengths: np.ndarray, rows: np.ndarray, wanted: np.ndarray | None) -> Batch:
    longest = int(lengths[group].max())
    tokens = np.zeros((len(group), longest), np.int64)
    at, known = [], []
    for i, sequence in enumerate(group):
        length, first = lengths[sequence], corpus.first[sequence]
        tokens[i, :length] = corpus.tokens[corpus.offsets[sequence] : corpus.offsets[sequence + 1]]
        row = np.arange(rows[sequence], rows[sequence + 1])
        # The law of the token at `first` is read at the token in front of it.
        place = i * longest + first - 1 + np.arange(length - first)
        keep = slice(None) if wanted is None else wanted[row]
        at.append(place[keep])
        known.append(row[keep])
    flat = torch.from_numpy(np.concatenate(at))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(lengths[group]), flat, np.concatenate(known))


def divergence(logits: torch.Tensor, student: Student, corpus: Corpus, rows: np.ndarray, temperature: float):
    """Mean KL(LLM || SSM) over the places, up to the LLM's entropy; laws over the LLM's tokens in the vocabulary."""
    best = torch.from_numpy(corpus.best[rows].astype(np.int64)).to(logits.device)
    place = torch.where(best >= 0, student.place[best.clamp(min=0)], -1)
    logprob = torch.from_numpy(corpus.logprob[rows]).to(logits.device)
    target = (logprob / temperature).masked_fill(place < 0, -torch.inf).softmax(dim=-1).nan_to_num()
    learnt = (logits.float() / temperature).log_softmax(dim=-1).gather(1, place.clamp(min=0))
    return -(target * learnt).sum(dim=-1).mean()


@torch.no_grad()
def ranks(student: Student, wanted: np.ndarray, batch: Batch, width: int) -> np.ndarray:
    """Place of the wanted token among the SSM's `width` likeliest at the batch's places [n] int64; width = not there.

    wanted [answers] int: a token for each row of the corpus
    """
    device = student.ids.device
    logits = student(batch.tokens.to(device), batch.lengths.to(device), batch.at.to(device))
    likeliest = student.ids[logits.topk(min(width, logits.shape[1]), dim=-1).indices].cpu().numpy()
    found = likeliest == wanted[batch.rows, None]
    return np.where(found.any(axis=1), found.argmax(axis=1), width)


def acceptance(student: Student, corpus: Corpus, some: Sequence[Batch]) -> tuple[Acceptance, np.ndarray]:
    """(how often the LLM's token is among the likeliest, rows of `best` where it is the first of all)."""
    student.eval()
    found = [ranks(student, corpus.best[:, 0], batch, RANKS) for batch in some]
    student.train()
    rank = np.concatenate([np.zeros(0, np.int64), *found])
    rows = np.concatenate([np.zeros(0, np.int64), *(batch.rows for batch in some)])
    hits = np.bincount(rank, minlength=RANKS + 1)[:RANKS].cumsum()
    return Acceptance(hits, len(rank)), rows[rank == 0]


def split(corpus: Corpus, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequences to learn from, sequences held out); both hold at least one."""
    order = np.random.default_rng(seed).permutation(corpus.num_sequences)
    count = int(np.clip(round(held_out * len(order)), 1, len(order) - 1))
    if len(order) < 2:
        raise InputError("the corpus has a single sequence: nothing could be held out; generate more")
    return np.sort(order[count:]), np.sort(order[:count])


def boost_tune(
    corpus: Corpus, ssms: Sequence[Path], outs: Sequence[Path], settings: Settings
) -> list[list[Acceptance]]:
    """Tune one SSM after the other; each learns where those before it miss. Returns each one's held-out acceptances."""
    check_ssms(ssms, corpus)
    if len({out.resolve() for out in outs}) != len(outs):
        raise InputError("--out: names a folder twice; give each SSM its own")
    for out in outs:
        if not (out / STATE).is_file():
            check_new(out)
    missed = np.ones(corpus.num_answers, bool)
    histories = []
    for ssm, out in zip(ssms, outs, strict=True):
        student, history = tune(corpus, ssm, out, settings, missed)
        histories.append(history)
        if len(histories) < len(ssms):
            every = batches(corpus, np.arange(corpus.num_sequences), settings.batch_tokens)
            _, agreed = acceptance(student, corpus, every)
            missed[agreed] = False
    return histories


def memory_needed(ssm: Path, batch_tokens: int) -> int:
    """Bytes that tuning an SSM takes, estimated: weights and their moments, and what a step keeps of a batch."""
    config = read_json(ssm / "config.json")
    weights = sum(weight.numel() for weight in read_weights(ssm).values())
    vocab = check_ids(ssm / DRAFT_VOCAB, config["vocab_size"]) if (ssm / DRAFT_VOCAB).is_file() else None
    narrow = config["vocab_size"] if vocab is None else len(vocab)
    layers, hidden, inner = (config.get(name, 0) for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    return 4 * (4 * weights + batch_tokens * (3 * narrow + layers * (16 * hidden + 4 * inner)))


def recipe_of(corpus: Corpus, ssm: Path, settings: Settings, wanted: np.ndarray | None) -> dict[str, Any]:
    """All that decides what comes out of `tune`, in plain JSON types."""
    digest = hashlib.sha256(corpus.tokens.tobytes() + corpus.best.tobytes())
    every = np.ones(corpus.num_answers, bool)
    places = hashlib.sha256(np.packbits(every if wanted is None else wanted).tobytes()).hexdigest()
    named = {"settings": asdict(settings), "corpus": digest.hexdigest(), "ssm": weight_hashes(ssm), "places": places}
    return json.loads(json.dumps(named))


def finished(out: Path, recipe: dict[str, Any]) -> list[Acceptance] | None:
    """The held-out acceptances of an SSM that was tuned by just this recipe; None when there is no `out` yet.

    InputError when there is another one.
    """
    file = out / STATE
    if file.is_file() and json.loads(file.read_text()).get("recipe") == recipe:
        return read_history(file)
    check_new(out)
    return None


def beside(out: Path, kind: str) -> Path:
    """Where the tuning of `out` keeps what is not finished; kind: one of UNFINISHED."""
    return out.with_name(f".{out.name}.{kind}")


def clear(out: Path) -> None:
    """Remove what a finished run leaves beside `out`."""
    for kind in UNFINISHED:
        shutil.rmtree(beside(out, kind), ignore_errors=True)


def read_history(file: Path) -> list[Acceptance]:
    """Acceptances of a STATE file."""
    return [Acceptance(np.array(each["hits"]), each["places"]) for each in json.loads(file.read_text())["history"]]


def write_state(file: Path, recipe: dict[str, Any], history: Sequence[Acceptance], step: int) -> None:
    """A STATE file; the last one of a folder to be written, so that a folder that has it is whole."""
    listed = [{"hits": each.hits.tolist(), "places": each.places, "rates": each.rates} for each in history]
    file.write_text(json.dumps({"step": step, "recipe": recipe, "history": listed}, indent=1))


def tune(
    corpus: Corpus, ssm: Path, out: Path, settings: Settings, wanted: np.ndarray | None = None
) -> tuple[Student, list[Acceptance]]:
    """Tune the SSM in folder `ssm` and write it to `out`; wanted [answers] bool: the places it learns from.

    Where the same run has finished already, its result. InputError for anything else in `out`.
    """
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    recipe = recipe_of(corpus, ssm, settings, wanted)
    history = finished(out, recipe)
    if history is not None:
        clear(out)
        return Student(out), history
    # The tuned weights, and two checkpoints with both moments of the optimiser while one replaces the other.
    check_disk(out, 7 * sum(file.stat().st_size for file in ssm.glob("*.safetensors")))
    set_seed(settings.seed)
    accelerator = Accelerator(mixed_precision=settings.precision)
    if accelerator.device.type == "cpu":
        remedy = "lower --batch-tokens, or narrow the SSM's head with `specinfer cut --vocab`"
        check_memory(f"--batch-tokens {settings.batch_tokens}", memory_needed(ssm, settings.batch_tokens), remedy)
    learning, held = split(corpus, settings.held_out, settings.seed)
    train = batches(corpus, learning, settings.batch_tokens, wanted)
    test = batches(corpus, held, settings.batch_tokens)
    if not train or not test:
        raise InputError(f"{out}: there are no places to learn from or to hold out; generate a larger corpus")
    check_ssms([ssm], corpus)
    student = Student(ssm)
    learnable = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        learnable, settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _Cosine(settings.epochs * len(train)))
    student, optimizer = accelerator.prepare(student, optimizer)
    accelerator.register_for_checkpointing(schedule)
    run = Run(accelerator, student, optimizer, schedule, corpus, settings, recipe, out)
    history = run.through(train, test, learnable)
    plain = accelerator.unwrap_model(student)
    draft = beside(out, RESULT)
    shutil.rmtree(draft, ignore_errors=True)
    save(plain, ssm, draft)
    curves = {f"top-{rank}": curve for rank, curve in enumerate(zip(*(each.rates for each in history), strict=True), 1)}
    plot(curves, range(len(history)), "epoch", "held-out acceptance", draft / "tuning.png")
    write_state(draft / STATE, recipe, history, run.step)
    if out.exists():
        out.rmdir()  # empty: check_new saw to it
    draft.rename(out)
    clear(out)
    return plain, history


@dataclass(frozen=True)
class _Cosine:
    steps: int
    warm_up: float = 0.03

    def __call__(self, step: int) -> float:
        begin = max(1, int(self.warm_up * self.steps))
        if step < begin:
            return (step + 1) / begin
        return 0.55 + 0.45 * float(np.cos(np.pi * (step - begin) / max(self.steps - begin, 1)))


@dataclass
class Run:
    """The tuning of SSM `out`, with its checkpoints beside it."""

    accelerator: Any
    student: Any
    optimizer: Any
    schedule: Any
    corpus: Corpus
    settings: Settings
    recipe: dict[str, Any]
    out: Path
    step: int = 0
    history: list | None = None

    def through(self, train: list[Batch], test: list[Batch], learnable: list) -> list[Acceptance]:
        """All epochs; returns the held-out acceptance before the first one and after each."""
        from tqdm import tqdm

        self.resume()
        student = self.accelerator.unwrap_model(self.student)
        if self.history is None:
            self.history = [acceptance(student, self.corpus, test)[0]]
            tqdm.write(f"untuned: {self.history[0]}")
        total = self.settings.epochs * len(train)
        with tqdm(total=total, initial=self.step, unit="step", desc=self.out.name) as bar:
            while self.step < total and not self.stale():
                self.one(train[self.order(len(train))], learnable, bar)
                if self.step % len(train) == 0:
                    self.history.append(acceptance(student, self.corpus, test)[0])
                    tqdm.write(f"epoch {self.step // len(train)}: {self.history[-1]}")
                if self.step % self.settings.checkpoint == 0 or self.step % len(train) == 0:
                    self.keep()
        return self.history

    def order(self, count: int) -> int:
        """Which batch comes now: every epoch has its own order."""
        epoch, place = divmod(self.step, count)
        return int(np.random.default_rng([self.settings.seed, epoch]).permutation(count)[place])

    def one(self, batch: Batch, learnable: list, bar: Any) -> None:
        """One optimiser step."""
        device = self.accelerator.device
        temperature = self.settings.temperatures[self.step % len(self.settings.temperatures)]
        with self.accelerator.autocast():
            logits = self.student(batch.tokens.to(device), batch.lengths.to(device), batch.at.to(device))
        plain = self.accelerator.unwrap_model(self.student)
        loss = divergence(logits, plain, self.corpus, batch.rows, temperature)
        if not bool(loss.isfinite()):
            raise InputError(f"--learning-rate {self.settings.learning_rate}: the loss is no number any more; lower it")
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(learnable, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        bar.set_postfix(loss=f"{loss.item():.3f}", tokens=int(batch.lengths.sum()))
        bar.update()

    def stale(self) -> bool:
        """Whether the held-out acceptance has not risen for `patience` epochs."""
        first = [each.rates[0] for each in self.history]
        return len(first) - 1 - int(np.argmax(first)) >= self.settings.patience

    def keep(self) -> None:
        """A checkpoint, under its name in one piece."""
        shutil.rmtree(self.draft, ignore_errors=True)
        self.accelerator.save_state(str(self.draft), safe_serialization=True)
        write_state(self.draft / STATE, self.recipe, self.history, self.step)
        (self.folder / STATE).unlink(missing_ok=True)  # from here on the draft is the checkpoint
        shutil.rmtree(self.folder, ignore_errors=True)
        self.draft.rename(self.folder)

    @property
    def folder(self) -> Path:
        """The last checkpoint."""
        return beside(self.out, CHECKPOINT)

    @property
    def draft(self) -> Path:
        """Where a checkpoint is written."""
        return beside(self.out, DRAFT)

    def resume(self) -> None:
        """Go on at the last checkpoint, if there is one. InputError when another recipe made it."""
        if not (self.folder / STATE).is_file() and (self.draft / STATE).is_file():  # stopped in the middle of `keep`
            shutil.rmtree(self.folder, ignore_errors=True)
            self.draft.rename(self.folder)
        file = self.folder / STATE
        if not file.is_file():
            return
        state = json.loads(file.read_text())
        if state["recipe"] != self.recipe:
            raise InputError(
                f"{self.folder}: an unfinished run with other settings, SSM or corpus; go on with these or remove it"
            )
        self.accelerator.load_state(str(self.folder))
        self.step, self.history = state["step"], read_history(file)


def save(student: Student, ssm: Path, out: Path) -> None:
    """The tuned SSM as a folder like `ssm`."""
    out.mkdir(parents=True, exist_ok=True)
    copy_texts(ssm, out)
    if (ssm / DRAFT_VOCAB).is_file():
        shutil.copy(ssm / DRAFT_VOCAB, out)
    student.model.save_pretrained(out, safe_serialization=True)


def lines(histories: Sequence[Sequence[Acceptance]]) -> Iterator[str]:
    """What came out, for the terminal."""
    for i, history in enumerate(histories):
        yield f"SSM {i}: {history[0]}  ->  {history[-1]}"
