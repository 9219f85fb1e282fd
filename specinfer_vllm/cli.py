# SPDX-License-Identifier: Apache-2.0
"""The console command `specinfer`. Each sub-command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from specinfer_vllm import __version__
from specinfer_vllm.config import METHOD, SsmOptions, TreeOptions
from specinfer_vllm.printing import print_json, print_table
from specinfer_vllm.train.commands import ALL as WORKSHOP

if TYPE_CHECKING:
    from specinfer_vllm.doctor import Report
    from specinfer_vllm.engine.outlook import Outlook

TYPES = {
    "bool": "true or false",
    "float": "number",
    "int": "whole number",
    "str": "text",
    "tuple[SsmOptions, ...]": "list",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[tuple[int, ...], ...]": "list of paths",
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
    """`specinfer doctor`: exit code 0 when trees, or the command line, can be served here, 1 otherwise."""
    parser = commands.add_parser(
        "doctor",
        help="say whether trees work with the vLLM that is installed, and what a command line of vllm serve gets",
        usage="specinfer doctor [-h] [--json] [-- vllm serve MODEL --speculative-config tree ...]",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        help="behind --: a command line of vllm serve, of which runner, attention, CUDA graphs and trees are said "
        "without reading weights; without one, what --speculative-config tree gets here",
    )
    parser.set_defaults(run=doctor)


def doctor(given: argparse.Namespace) -> int:
    """Print what `specinfer_vllm.doctor` finds out."""
    words = given.command_line[given.command_line[:1] == ["--"] :]
    if words and "vllm" not in sys.modules:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # a configuration logs a page
    from specinfer_vllm.doctor import examine

    with redirect_stdout(sys.stderr):  # vLLM's log goes to stdout, where only the findings belong
        report = examine(words or None)
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
    hooks = [(each.state, each.use, each.runner, each.target, each.versions, each.reason) for each in report.hooks]
    print_table("hooks in vLLM", ("state", "use", "runner", "target", "versions", "reason"), hooks)
    outlook = report.outlook
    if outlook:
        line = "--speculative-config tree" if outlook.command_line is None else shlex.join(outlook.command_line)
        print_table(line, ("what", "it gets"), outlook_rows(outlook))
    for note in outlook.notes if outlook else ():
        print(f"note: {note}")
    for problem in report.problems:
        print(f"problem: {problem}")
    refusals = outlook.refusals if outlook else ()
    for refusal in refusals:
        if refusal not in report.problems:
            print(f"refused: {refusal}")
    print(verdict(report))


def verdict(report: Report) -> str:
    """All of it in one line."""
    outlook = report.outlook
    if report.problems:
        return "trees cannot be served here"
    if outlook is None or outlook.command_line is None:
        return "trees can be served here" if report.is_healthy else "trees cannot be served here"
    if outlook.refusals:
        return "this command line is refused"
    return "this command line serves token trees" if outlook.is_tree else "this command line is plain vLLM's"


def outlook_rows(outlook: Outlook) -> list[tuple[str, str]]:
    """What is known of a command line, a line each."""
    meant = {True: "token trees", False: "plain vLLM: it asks for no tree", None: "unknown: vLLM cannot read it"}
    graphs = outlook.graph_mode
    if outlook.tree_graphs not in (None, outlook.graph_mode):
        graphs = f"{graphs}: {outlook.tree_graphs} where every request has a tree, else {outlook.other_graphs}"
    plan = {None: "", True: ", asynchronous", False: ", not asynchronous"}[outlook.is_async]
    rows = {
        "serves": meant[outlook.is_tree],
        "model": outlook.model,
        "device": outlook.device,
        "runner": outlook.runner and f"{outlook.runner} ({outlook.runner_reason})",
        "worker": outlook.worker,
        "scheduler": outlook.scheduler and f"{outlook.scheduler}{plan}",
        "attention of tree rows": outlook.tree_attention,
        "attention of other rows" if outlook.is_tree else "attention": outlook.attention,
        "CUDA graphs": graphs,
        "nodes per tree": outlook.nodes and f"{outlook.nodes}, at most {outlook.depth} levels",
        "lookahead slots": None if outlook.lookahead_slots is None else str(outlook.lookahead_slots),
        "proposers": ", ".join(outlook.proposers),
        "SSMs": outlook.placement,
        "primer": outlook.primer,
        "verifier": outlook.verifier,
    }
    return [(name, said) for name, said in rows.items() if said]


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


# One function per sub-command; each adds its parser and sets `run`.
COMMANDS: tuple[Callable[[Any], None], ...] = (add_doctor, add_options, add_primer, *WORKSHOP)

if __name__ == "__main__":
    sys.exit(main())
