# SPDX-License-Identifier: Apache-2.0
"""The workshop's sub-commands of `specinfer`; each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from specinfer_vllm.config import DEFAULT_ROW_COST, METHOD
from specinfer_vllm.printing import failed, print_table


def guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The command, which says in one line what is wrong with its input and exits with 2."""

    @wraps(run)
    def command(given: argparse.Namespace) -> int:
        try:
            return run(given)
        except (ValueError, OSError) as error:  # InputError, and what the system says of a file
            return failed(str(error))

    return command


def add_cut(commands: Any) -> None:
    """`specinfer cut LLM -o SSM`: a starting model out of the LLM."""
    parser = commands.add_parser("cut", help="cut a small model out of an LLM: some of its layers, its embeddings")
    parser.add_argument("llm", type=Path, help="folder of the LLM")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="layers to keep, from 0 (default: the first and the last)"
    )
    parser.add_argument("--vocab", type=int, help="narrow the head to so many tokens, the corpus' most frequent ones")
    parser.add_argument("--corpus", type=Path, help="corpus that --vocab counts in")
    parser.set_defaults(run=guarded(cut))


def cut(given: argparse.Namespace) -> int:
    """Write the model and say where it lies."""
    from specinfer_vllm.train import cut as cutting
    from specinfer_vllm.train.corpus import Corpus, frequent_tokens

    if (given.vocab is None) != (given.corpus is None):
        return failed("--vocab and --corpus: give both, or neither")
    if given.vocab is not None and given.vocab < 64:
        return failed(f"--vocab {given.vocab}: give at least 64 tokens")
    vocab = None if given.vocab is None else frequent_tokens(Corpus.load(given.corpus), given.vocab)
    if vocab is not None and len(vocab) < given.vocab:
        return failed(
            f"--vocab {given.vocab}: the corpus holds {len(vocab)} different tokens only; generate more of it"
        )
    layers = given.layers or sorted({0, cutting.num_layers(given.llm) - 1})
    cutting.cut(given.llm, layers, given.out, vocab)
    print(given.out)
    return 0


def add_generate(commands: Any) -> None:
    """`specinfer generate LLM --out CORPUS`: what SSMs learn from."""
    parser = commands.add_parser("generate", help="let an LLM write the corpus that its SSMs are tuned on")
    parser.add_argument("llm", help="folder or hub id of the LLM")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the corpus; an unfinished one is gone on with"
    )
    parser.add_argument("--prompts", type=Path, help="text or .jsonl file of prompts (default: the LLM asks itself)")
    parser.add_argument("--samples", type=int, default=2048, help="answers in all (default 2048)")
    parser.add_argument("--batch", type=int, default=64, help="answers at a time (default 64)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="default 0 0.7 1")
    parser.add_argument("--max-tokens", type=int, default=192, help="longest answer (default 192)")
    parser.add_argument("--max-model-len", type=int, default=1024, help="longest prompt and answer (default 1024)")
    parser.add_argument("--dtype", default="auto", help="vLLM's dtype (default auto)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.set_defaults(run=guarded(generate))


def generate(given: argparse.Namespace) -> int:
    """Write the corpus and say what is in it."""
    from specinfer_vllm.train.corpus import CorpusWriter
    from specinfer_vllm.train.generate import Recipe, generate, read_prompts, serving

    if min(given.samples, given.batch, given.max_tokens) < 1 or given.batch > 4096:
        return failed("--samples, --max-tokens: give at least 1; --batch: 1 to 4096")
    if not all(math.isfinite(each) and each >= 0 for each in given.temperatures):
        return failed("--temperatures: give 0 or more")
    if given.max_model_len <= given.max_tokens:
        return failed(f"--max-model-len {given.max_model_len}: leaves no prompt beside --max-tokens {given.max_tokens}")
    prompts = read_prompts(given.prompts) if given.prompts else []
    recipe = Recipe(
        model=given.llm,
        samples=given.samples,
        batch=given.batch,
        temperatures=tuple(given.temperatures),
        max_tokens=given.max_tokens,
        seed=given.seed,
        prompts=hashlib.sha256(given.prompts.read_bytes()).hexdigest() if given.prompts else "",
    )
    writer = CorpusWriter(given.out, recipe.as_dict())  # says what is wrong with the folder before an engine starts
    corpus = generate(serving(given.llm, given.batch, given.max_model_len, given.dtype), recipe, writer, prompts)
    print(f"{given.out}: {corpus.num_sequences} answers, {corpus.num_answers} tokens")
    return 0


def add_tune(commands: Any) -> None:
    """`specinfer tune CORPUS SSM.. -o DIR..`: boost-tuning."""
    parser = commands.add_parser("tune", help="tune SSMs on a corpus, each where those before it miss (boost-tuning)")
    parser.add_argument("corpus", type=Path, help="folder that `specinfer generate` wrote")
    parser.add_argument("ssms", type=Path, nargs="+", help="folders of the SSMs, as `specinfer cut` writes them")
    parser.add_argument("-o", "--out", type=Path, nargs="+", required=True, help="folders to write, one for each SSM")
    parser.add_argument("--epochs", type=int, default=4, help="times over the corpus (default 4)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default 0.001")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one step (default 4096)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[1.0, 0.7], help="laws to learn (default 1 0.7)"
    )
    parser.add_argument(
        "--precision", choices=("no", "bf16", "fp16"), default="no", help="mixed precision (default no)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.set_defaults(run=guarded(tune))


def tune(given: argparse.Namespace) -> int:
    """Tune the SSMs and say what they reach on what was held out."""
    from specinfer_vllm.train.corpus import Corpus
    from specinfer_vllm.train.tune import Settings, boost_tune, lines

    if len(given.ssms) != len(given.out):
        return failed(f"--out: {len(given.ssms)} SSMs need {len(given.ssms)} folders, {len(given.out)} are given")
    if min(given.epochs, given.batch_tokens) < 1 or given.seed < 0:
        return failed("--epochs, --batch-tokens: give at least 1; --seed: 0 or more")
    if not all(math.isfinite(each) and each > 0 for each in (*given.temperatures, given.learning_rate)):
        return failed("--temperatures, --learning-rate: give more than 0")
    settings = Settings(
        epochs=given.epochs,
        learning_rate=given.learning_rate,
        batch_tokens=given.batch_tokens,
        temperatures=tuple(given.temperatures),
        precision=given.precision,
        seed=given.seed,
    )
    histories = boost_tune(Corpus.load(given.corpus), given.ssms, given.out, settings)
    print(*lines(histories), sep="\n")
    return 0


def add_profile(commands: Any) -> None:
    """`specinfer profile CORPUS SSM.. -o FILE`: how good SSMs are, alone and merged."""
    parser = commands.add_parser("profile", help="count how often SSMs have the LLM's token, by child, depth and SSM")
    parser.add_argument("corpus", type=Path, help="folder that `specinfer generate` wrote, of prompts not tuned on")
    parser.add_argument("ssms", type=Path, nargs="+", help="folders of the SSMs")
    parser.add_argument("-o", "--out", type=Path, default=Path("profile.json"), help="default profile.json")
    parser.set_defaults(run=guarded(profile))


def profile(given: argparse.Namespace) -> int:
    """Write the profile with its plot and print the acceptances."""
    from specinfer_vllm.train import profile as profiling
    from specinfer_vllm.train.corpus import Corpus
    from specinfer_vllm.train.inputs import check_new_file

    if given.out.suffix != ".json":
        return failed(f"--out {given.out}: give a name that ends in .json")
    for suffix in (".json", ".npz", ".png"):
        check_new_file(given.out.with_suffix(suffix))
    found = profiling.profile(Corpus.load(given.corpus), given.ssms)
    found.save(given.out)
    shown = (1, 2, 3, 5, 8, profiling.WIDEST)
    alone = [(i,) for i in range(len(given.ssms))]
    groups = [*alone, tuple(range(len(alone)))] if len(alone) > 1 else alone
    rows = [
        (" + ".join(given.ssms[i].name for i in group), *(f"{found.coverage(group, width):.3f}" for width in shown))
        for group in groups
    ]
    print_table(f"{found.rank.shape[1]} places", ("SSM", *(f"top-{width}" for width in shown)), rows)
    profiling.plot(found, given.out.with_suffix(".png"))
    return 0


def add_shape(commands: Any) -> None:
    """`specinfer shape PROFILE -o FILE`: the best static tree."""
    parser = commands.add_parser("shape", help="find the static tree of each SSM that decodes fastest")
    parser.add_argument("profile", type=Path, help="what `specinfer profile` wrote")
    parser.add_argument("-o", "--out", type=Path, default=Path("shape.json"), help="for --speculative-config")
    parser.add_argument("--nodes", type=int, default=16, help="most nodes of each SSM's tree (default 16)")
    parser.add_argument("--depth", type=int, default=8, help="most levels (default 8)")
    parser.add_argument("--row-cost", type=float, default=DEFAULT_ROW_COST, help="of a node, in passes over one row")
    parser.add_argument("--draft-cost", type=float, default=0.08, help="of a level of drafting (default 0.08)")
    parser.set_defaults(run=guarded(shape))


def shape(given: argparse.Namespace) -> int:
    """Search, print, and write a configuration."""
    from specinfer_vllm.train.inputs import check_new_file
    from specinfer_vllm.train.profile import Profile
    from specinfer_vllm.tree.shape import best_expansion

    if min(given.nodes, given.depth) < 1:
        return failed("--nodes, --depth: give at least 1")
    if not all(math.isfinite(each) and each >= 0 for each in (given.row_cost, given.draft_cost)):
        return failed("--row-cost, --draft-cost: give 0 or more")
    check_new_file(given.out)
    found = Profile.load(given.profile)
    cost = [1 + given.row_cost * nodes for nodes in range(given.nodes + 1)]
    ssms, rows = [], []
    for i, model in enumerate(found.ssms):
        best = best_expansion(found.ranks(i), given.nodes, given.depth, cost, given.draft_cost)
        rows.append((model, json.dumps(best.expansion), f"{best.tokens_per_step:.3f}", f"{best.speed * cost[0]:.2f}x"))
        if best.expansion:
            ssms.append({"model": str(Path(model).resolve()), "expansion": list(best.expansion)})
    print_table("best static trees", ("SSM", "expansion", "tokens per step", "expected speed"), rows)
    if not ssms:
        return failed("no tree pays at these costs; nothing is written")
    given.out.write_text(json.dumps({"method": METHOD, "ssms": ssms}, indent=1))
    print(f"--speculative-config {given.out}")
    return 0


def add_pack(commands: Any) -> None:
    """`specinfer pack SSM --llm LLM -o FILE`: a small file to keep or send."""
    parser = commands.add_parser("pack", help="write an SSM as one small file, without what its LLM has already")
    parser.add_argument("ssm", type=Path, help="folder of the SSM")
    parser.add_argument("--llm", type=Path, required=True, help="folder of the LLM it was cut from")
    parser.add_argument("-o", "--out", type=Path, required=True, help="file to write")
    parser.set_defaults(run=guarded(pack))


def pack(given: argparse.Namespace) -> int:
    """Write the file and say how large it is."""
    from specinfer_vllm.train import pack as packing

    packing.pack(given.ssm, given.llm, given.out)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")
    return 0


def add_assemble(commands: Any) -> None:
    """`specinfer assemble FILE --llm LLM -o SSM`: the folder of a packed SSM."""
    parser = commands.add_parser("assemble", help="make the folder of a packed SSM, with its LLM's embeddings")
    parser.add_argument("file", type=Path, help="what `specinfer pack` wrote")
    parser.add_argument("--llm", type=Path, required=True, help="folder of the LLM")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    parser.set_defaults(run=guarded(assemble))


def assemble(given: argparse.Namespace) -> int:
    """Write the folder and say where it lies."""
    from specinfer_vllm.train import pack as packing

    packing.assemble(given.file, given.llm, given.out)
    print(given.out)
    return 0


ALL: tuple[Callable[[Any], None], ...] = (
    add_cut,
    add_generate,
    add_tune,
    add_profile,
    add_shape,
    add_pack,
    add_assemble,
)
