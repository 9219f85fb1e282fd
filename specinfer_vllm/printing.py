# SPDX-License-Identifier: Apache-2.0
"""How the commands speak: tables, JSON, and what is wrong with an input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


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


def failed(what: str) -> int:
    """Say it on stderr; the exit code for wrong input."""
    print(f"specinfer: {what}", file=sys.stderr)
    return 2
