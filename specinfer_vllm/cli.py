# SPDX-License-Identifier: Apache-2.0
"""The console command `specinfer`. Each sub-command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer_vllm import __version__
from specinfer_vllm.config import METHOD, SsmOptions, TreeOptions

if TYPE_CHECKING:
    from specinfer_vllm.doctor import Report

TYPES = {
    "bool": "true or false",
    "float": "number",
    "int": "whole number",
    "str": "text",
    "tuple[SsmOptions, ...]": "list",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[str, ...]": "list of text",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="specinfer", description="Token-tree speculative decoding for stock vLLM.")
    parser.add_argument("--version", action="version", version=f"specinfer-vllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    given = parser.parse_args(arguments)
    return given.run(given)


# -- doctor ------------------------------------------------------------------------------------------------------------


def add_doctor(commands: Any) -> None:
    """`specinfer doctor`: exit code 0 when trees can be served here, 1 otherwise."""
    parser = commands.add_parser(
        "doctor", help="say whether trees work with the vLLM that is installed, and if not, why"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=doctor)


def doctor(given: argparse.Namespace) -> int:
    """Print what `specinfer_vllm.doctor` finds out."""
    from specinfer_vllm.doctor import examine

    with redirect_stdout(sys.stderr):  # vLLM's log goes to stdout, where only the findings belong
        report = examine()
    if given.json:
        print_json(report.as_dict())
    else:
        print_report(report)
    return 0 if report.is_healthy else 1


def print_report(report: Report) -> None:
    """The findings as text."""
    entry = report.plugin
    listed = "not set" if entry["VLLM_PLUGINS"] is None else entry["VLLM_PLUGINS"]
    rows = [(name, each or "not installed") for name, each in report.versions.items()]
    rows += [
        ("device", report.device or "unknown"),
        ("vllm supported", report.supported),
        ("entry point", entry["entry_point"] or "not found"),
        ("allowed", f"{'yes' if entry['allowed'] else 'no'} (VLLM_PLUGINS {listed})"),
    ]
    print_table("environment", ("what", "found"), rows)
    hooks = [(each.state, each.use, each.target, each.versions, each.reason) for each in report.hooks]
    print_table("hooks in vLLM", ("state", "use", "target", "versions", "reason"), hooks)
    for problem in report.problems:
        print(f"problem: {problem}")
    print("trees can be served here" if report.is_healthy else "trees cannot be served here")


# -- options -----------------------------------------------------------------------------------------------------------


def add_options(commands: Any) -> None:
    """`specinfer options`: every option of a tree, and of each of its SSMs."""
    parser = commands.add_parser("options", help="list what --speculative-config may carry with method 'tree'")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=options)


def options(given: argparse.Namespace) -> int:
    """Print the fields of TreeOptions and SsmOptions."""
    tree, ssm = ([describe(each) for each in fields(kind)] for kind in (TreeOptions, SsmOptions))
    if given.json:
        print_json({"method": METHOD, "options": tree, "ssm_options": ssm})
        return 0
    columns = ("option", "type", "range", "default", "what it does")
    print_table("--speculative-config tree", columns, map(as_row, tree))
    print_table("each of ssms", columns, map(as_row, ssm))
    print(f'example: --speculative-config \'{{"method": "{METHOD}", "num_nodes": 16, "proposers": ["ngram"]}}\'')
    return 0


def describe(option: Field) -> dict[str, Any]:
    """One option in plain JSON types."""
    rule = option.metadata
    return {
        "name": option.name,
        "type": TYPES[option.type.removesuffix(" | None")],
        "unit": rule["unit"],
        "low": rule["low"],
        "high": rule["high"],
        "choices": list(rule["choices"]),
        "default": option.default_factory() if option.default is MISSING else option.default,
        "help": rule["help"],
    }


def as_row(option: dict[str, Any]) -> tuple[str, ...]:
    """One option as a line of the table."""
    span = ", ".join(option["choices"])
    if option["low"] is not None:
        span = f"{option['low']} to {option['high']} {option['unit']}".rstrip()
    default = option["default"]
    shown = "" if default in (None, (), "") else json.dumps(default).strip('"')
    return option["name"], option["type"], span, shown, option["help"]


# -- primer ------------------------------------------------------------------------------------------------------------


def add_primer(commands: Any) -> None:
    """`specinfer primer MODEL`: what bench.primer does, under the name that users meet."""
    parser = commands.add_parser(
        "primer", help="record once what an LLM writes to harmless prompts, for recycling from a request's first step"
    )
    parser.add_argument("model", nargs="?", help="folder or hub id (default: SmolLM2-135M-Instruct, as in the demo)")
    parser.add_argument("--out", help="file to write; default: where the engine looks for it")
    parser.set_defaults(run=primer)


def primer(given: argparse.Namespace) -> int:
    """Make a primer and print where it lies."""
    from specinfer_vllm.bench import primer as maker

    return maker.main([*([given.model] if given.model else []), *(["--out", given.out] if given.out else [])])


# -- the SSM workshop --------------------------------------------------------------------------------------------------


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
    parser.set_defaults(run=cut)


def cut(given: argparse.Namespace) -> int:
    """Write the model and say where it lies."""
    from specinfer_vllm.train import cut as cutting
    from specinfer_vllm.train.corpus import Corpus, frequent_tokens

    if (given.vocab is None) != (given.corpus is None):
        return failed("--vocab and --corpus: give both, or neither")
    if given.vocab is not None and given.vocab < 64:
        return failed(f"--vocab {given.vocab}: give at least 64 tokens")
    try:
        vocab = None if given.vocab is None else frequent_tokens(Corpus.load(given.corpus), given.vocab)
        layers = given.layers or [0, cutting.num_layers(given.llm) - 1]
        cutting.cut(given.llm, layers, given.out, vocab)
    except ValueError as error:
        return failed(str(error))
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
    parser.set_defaults(run=generate)


def generate(given: argparse.Namespace) -> int:
    """Write the corpus and say what is in it."""
    from specinfer_vllm.train.corpus import CorpusError
    from specinfer_vllm.train.generate import Recipe, generate, read_prompts, serving

    if min(given.samples, given.batch, given.max_tokens) < 1 or min(given.temperatures) < 0:
        return failed("--samples, --batch, --max-tokens: give at least 1; --temperatures: 0 or more")
    try:
        prompts = read_prompts(given.prompts) if given.prompts else []
        recipe = Recipe(
            model=given.llm,
            samples=given.samples,
            batch=given.batch,
            temperatures=tuple(given.temperatures),
            max_tokens=given.max_tokens,
            seed=given.seed,
            prompts=digest(given.prompts) if given.prompts else "",
        )
        llm = serving(given.llm, given.batch, given.max_model_len, given.dtype)
        corpus = generate(llm, recipe, given.out, prompts)
    except CorpusError as error:
        return failed(str(error))
    print(f"{given.out}: {corpus.num_sequences} answers, {corpus.num_answers} tokens")
    return 0


def digest(file: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
    parser.set_defaults(run=tune)


def tune(given: argparse.Namespace) -> int:
    """Tune the SSMs and say what they reach on what was held out."""
    from specinfer_vllm.train.corpus import Corpus
    from specinfer_vllm.train.tune import Settings, boost_tune, lines

    if len(given.ssms) != len(given.out):
        return failed(f"--out: {len(given.ssms)} SSMs need {len(given.ssms)} folders, {len(given.out)} are given")
    if min(given.epochs, given.batch_tokens) < 1 or min(*given.temperatures, given.learning_rate) <= 0:
        return failed("--epochs, --batch-tokens: give at least 1; --temperatures, --learning-rate: more than 0")
    settings = Settings(
        epochs=given.epochs,
        learning_rate=given.learning_rate,
        batch_tokens=given.batch_tokens,
        temperatures=tuple(given.temperatures),
        precision=given.precision,
        seed=given.seed,
    )
    try:
        histories = boost_tune(Corpus.load(given.corpus), given.ssms, given.out, settings)
    except (ValueError, OSError) as error:
        return failed(str(error))
    print(*lines(histories), sep="\n")
    return 0


def failed(what: str) -> int:
    """Say it on stderr; the exit code for wrong input."""
    print(f"specinfer: {what}", file=sys.stderr)
    return 2


# -- printing ----------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table: drawn by rich on a terminal, plain columns in a pipe or without rich."""
    rows = [tuple(row) for row in rows]
    if not sys.stdout.isatty() or not print_rich(title, columns, rows):
        print_plain(title, columns, rows)


def print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Fitted to the terminal's width. False when rich, which vLLM brings along, is not there."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
    return True


def print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As wide as its cells; the last column is not filled up."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


# One function per sub-command; each adds its parser and sets `run`.
COMMANDS: tuple[Callable[[Any], None], ...] = (
    add_doctor,
    add_options,
    add_primer,
    add_cut,
    add_generate,
    add_tune,
)

if __name__ == "__main__":
    sys.exit(main())
