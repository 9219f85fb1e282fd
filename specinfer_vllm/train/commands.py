# SPDX-License-Identifier: Apache-2.0
"""The workshop's sub-commands of `specinfer`; each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from specinfer_vllm.config import DEFAULT_DRAFT_COST, DEFAULT_ROW_COST, MAX_DEPTH, MAX_NODES, SsmOptions
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
    parser.add_argument("--batch", type=int, default=384, help="answers of one part (default 384)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.5, 0.9], help="default 0 0.5 0.9")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default 256)")
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
        dtype=given.dtype,
    )
    writer = CorpusWriter(given.out, recipe.as_dict())  # says what is wrong with the folder before an engine starts
    corpus = generate(serving(recipe, given.max_model_len), recipe, writer, prompts)
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
    from specinfer_vllm.train.inputs import check_new_file, check_new_json

    check_new_json(given.out)
    for suffix in (".npz", ".png"):
        check_new_file(given.out.with_suffix(suffix))
    found = profiling.profile(Corpus.load(given.corpus), given.ssms)
    found.save(given.out)
    shown = (1, 2, 3, 5, 8, profiling.WIDEST)
    for temperature in found.temperatures:
        part = found.at(temperature)
        rows = [
            (label, *(f"{part.coverage(group, width):.3f}" for width in shown))
            for label, group in found.groups().items()
        ]
        title = f"temperature {temperature:g}: {len(part.temperature)} texts, {part.rank.shape[1]} places"
        print_table(title, ("SSM", *(f"top-{width}" for width in shown)), rows)
    profiling.plot(found, given.out.with_suffix(".png"))
    return 0


def add_cost(commands: Any) -> None:
    """`specinfer cost LLM SSM.. -o FILE`: the cost curve that `specinfer shape` weighs nodes by."""
    parser = commands.add_parser("cost", help="measure what LLM passes take by nodes, and drafting by levels")
    parser.add_argument("llm", help="folder or hub id of the LLM")
    parser.add_argument("ssms", nargs="+", help="folders or hub ids of the SSMs")
    parser.add_argument("-o", "--out", type=Path, default=Path("costs.json"), help="default costs.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests side by side (default 1)")
    parser.add_argument("--nodes", type=int, default=32, help="most nodes of a request's tree (default 32)")
    parser.add_argument("--steps", type=int, default=24, help="passes for each median (default 24)")
    parser.add_argument("--dtype", default="auto", help="vLLM's dtype (default auto)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, as --enforce-eager serves")
    parser.set_defaults(run=guarded(cost))


def cost(given: argparse.Namespace) -> int:
    """Measure, print, and write the curves."""
    from specinfer_vllm.bench.engines import hardware
    from specinfer_vllm.train import cost as costing
    from specinfer_vllm.train.inputs import check_new_json

    if min(given.batch) < 1 or not 1 <= given.steps <= costing.MOST_STEPS or not 4 <= given.nodes <= costing.MOST_NODES:
        most = f"--steps: 1 to {costing.MOST_STEPS}; --nodes: 4 to {costing.MOST_NODES}, beyond which the curve goes on"
        return failed(f"--batch: give at least 1; {most}")
    check_new_json(given.out)
    running = costing.engine(given.llm, given.ssms, max(given.batch), given.nodes, given.dtype, not given.eager)
    measured = [costing.measure(running, batch, given.nodes, given.steps) for batch in given.batch]
    found = costing.Costs(given.llm, tuple(given.ssms), hardware(), tuple(measured))
    found.save(given.out)
    for each in measured:
        levels = ", ".join(f"{1e3 * seconds:.2f} ms" for seconds in each.level)
        rows = [
            (str(nodes), f"{1e3 * seconds:.1f} ms", f"{seconds / each.llm[0]:.2f}")
            for nodes, seconds in zip(each.nodes, each.llm, strict=True)
        ]
        print_table(
            f"{each.batch} side by side; a level of drafting: {levels}", ("nodes", "LLM pass", "of a plain one"), rows
        )
    print(found.machine)
    return 0


def add_shape(commands: Any) -> None:
    """`specinfer shape PROFILE -o FILE`: the best static trees, or the settings of best-first ones."""
    parser = commands.add_parser("shape", help="find the trees that decode fastest, from a profile and costs")
    parser.add_argument("profile", type=Path, help="what `specinfer profile` wrote")
    parser.add_argument("-o", "--out", type=Path, default=Path("shape.json"), help="for --speculative-config")
    parser.add_argument("--costs", type=Path, help="what `specinfer cost` wrote (default: the two costs below)")
    parser.add_argument("--batch", type=int, help="requests side by side it is for (default: the first of the costs)")
    parser.add_argument("--nodes", type=int, default=16, help="most nodes of a request's tree (default 16)")
    parser.add_argument("--depth", type=int, default=8, help="most levels (default 8)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the texts it is for (default 0, greedy)")
    parser.add_argument("--row-cost", type=float, default=DEFAULT_ROW_COST, help="of a node, in passes over one row")
    parser.add_argument("--draft-cost", type=float, default=DEFAULT_DRAFT_COST, help="of a level of drafting, likewise")
    parser.add_argument(
        "--best-first", action="store_true", help="write the settings of trees grown best-first, not static ones"
    )
    parser.add_argument("--measure", type=Path, help="corpus whose prompts are served with what was found")
    parser.add_argument("--texts", type=int, default=16, help="prompts that --measure serves (default 16)")
    parser.add_argument("--llm", help="folder or hub id of the LLM for --measure (default: that of --costs)")
    parser.add_argument("--dtype", default="auto", help="vLLM's dtype for --measure (default auto)")
    parser.add_argument("--eager", action="store_true", help="--measure without torch.compile")
    parser.set_defaults(run=guarded(shape))


def shape(given: argparse.Namespace) -> int:
    """Search, print, write a configuration, and measure it if wanted."""
    from specinfer_vllm.train import shapes
    from specinfer_vllm.train.inputs import check_new_json
    from specinfer_vllm.train.profile import Profile
    from specinfer_vllm.whole_file import whole_file

    if not (1 <= given.nodes <= MAX_NODES and 1 <= given.depth <= MAX_DEPTH):
        return failed(f"--nodes: give 1 to {MAX_NODES}; --depth: 1 to {MAX_DEPTH}")
    if min(given.texts, given.batch or 1) < 1:
        return failed("--texts, --batch: give at least 1")
    check_new_json(given.out)
    profile = Profile.load(given.profile).at(given.temperature)
    costs, llm = costs_of(given, profile.ssms)
    questions = questions_of(given, llm)
    found = list(shapes.choices(profile, list(costs.values()), given.nodes, given.depth))
    print_table("best static trees", shapes.COLUMNS, [each.row for each in found])
    batch = given.batch or next(iter(costs))
    if given.best_first:
        configuration, expected = shapes.best_first(profile, costs[batch], given.nodes, given.depth), "-"
    else:
        best = shapes.fastest(found, batch)
        configuration, expected = best.configuration(), f"{best.forest.tokens_per_step:.3f}"
    with whole_file(given.out) as draft:
        draft.write_text(json.dumps(configuration))
    print(f"--speculative-config {given.out}")
    if questions:
        from specinfer_vllm.train.measure import serve

        served = serve(llm, configuration, questions, batch, given.dtype, not given.eager)
        row = (expected, f"{served.tokens_per_step:.3f}", f"{served.rate:.1f}")
        print_table(str(given.out), ("tokens per step, expected", "measured", "tokens per second"), [row])
    return 0


def costs_of(given: argparse.Namespace, ssms: Sequence[str]) -> tuple[dict[int, Any], str | None]:
    """(Cost by requests side by side, the LLM if one is named), from the file or from the two numbers."""
    from specinfer_vllm.train.cost import Cost, Costs
    from specinfer_vllm.train.inputs import InputError

    if given.costs is None:
        if not all(math.isfinite(each) and each >= 0 for each in (given.row_cost, given.draft_cost)):
            raise InputError("--row-cost, --draft-cost: give 0 or more")
        batch = given.batch or 1
        waiting = 1 + given.row_cost * (batch - 1)  # a pass over the batch, in passes over one row
        llm = (waiting, waiting + given.row_cost * batch)
        level = given.draft_cost * (1 + given.row_cost * (batch * SsmOptions.width - 1))
        return {batch: Cost(batch, (0, 1), llm, (level,) * len(ssms))}, given.llm
    found = Costs.load(given.costs)
    if [str(Path(ssm).resolve()) for ssm in found.ssms] != list(ssms):
        raise InputError(f"--costs {given.costs}: of {list(found.ssms)}, the profile of {list(ssms)}; measure these")
    costs = {each.batch: each for each in found.batches}
    if given.batch is not None and given.batch not in costs:
        raise InputError(f"--batch {given.batch}: the costs are of {list(costs)} side by side; name one of these")
    return costs, given.llm or found.llm


def questions_of(given: argparse.Namespace, llm: str | None) -> Any:
    """What --measure serves, None without it."""
    from specinfer_vllm.train.corpus import Corpus
    from specinfer_vllm.train.inputs import InputError
    from specinfer_vllm.train.measure import Questions

    if given.measure is None:
        return None
    if not llm:
        raise InputError("--llm: name the LLM that --measure serves")
    return Questions.of(Corpus.load(given.measure), given.temperature, given.texts)


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
    add_cost,
    add_shape,
    add_pack,
    add_assemble,
)
