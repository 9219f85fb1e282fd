# SPDX-License-Identifier: Apache-2.0
"""What the workshop's commands are given, checked before any work: files, folders, room on the disk and in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A file, folder or option that cannot be used; the message names it and says what to do."""


def read_json(file: Path) -> dict[str, Any]:
    """An object in a JSON file. InputError when it is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{file}: is no JSON object")
    return value


def check_new(folder: Path) -> None:
    """InputError when a folder to be written is there already, but for an empty one or unfinished drafts in it."""
    if folder.exists() and (not folder.is_dir() or any(not each.name.startswith(".") for each in folder.iterdir())):
        raise InputError(f"{folder}: holds files already; name a new folder")


def check_new_file(file: Path) -> None:
    """InputError when a file to be written is there already, or the folder it is to lie in is not."""
    if file.exists():
        raise InputError(f"{file}: is there already; name a new file")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.absolute().parent}; make it first")


def check_new_json(file: Path) -> None:
    """As check_new_file, of a file whose name says that it holds JSON: others do not read it otherwise."""
    if file.suffix != ".json":
        raise InputError(f"--out {file}: give a name that ends in .json")
    check_new_file(file)


def check_disk(folder: Path, needed: int) -> None:
    """InputError when the disk that `folder` is to lie on has less than `needed` bytes left."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InputError(f"{folder}: needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free; choose another")


def check_memory(what: str, needed: int, remedy: str) -> None:
    """InputError when the machine has less than `needed` bytes of memory left for `what`."""
    import psutil

    free = psutil.virtual_memory().available
    if free < needed:
        raise InputError(f"{what}: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; {remedy}")
