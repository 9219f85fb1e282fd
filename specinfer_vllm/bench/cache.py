# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: what is built once, checked on every later use and rebuilt where it was damaged."""

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from specinfer_vllm.cache_folder import cache_folder

MANIFEST = "manifest.json"


def folder() -> Path:
    """The cache folder, created where missing: $SPECINFER_CACHE, else specinfer-vllm in the user's own cache folder."""
    path = cache_folder()
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def say(message: str) -> None:
    """One line of progress. On stderr, so that stdout stays free for results."""
    print(f"specinfer: {message}", file=sys.stderr, flush=True)


def built(target: Path, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return folder `target`, made by `build(empty folder)` unless it already lies there whole.

    `recipe` says what the content is made of; another recipe or a file that changed since means that it is built again.
    The new folder appears under its name in one piece. Processes that ask at the same time wait for the first one.
    """
    with _lock(target):
        flaw = _flaw(target, recipe)
        if flaw is None:
            return target
        if target.exists():
            say(f"{target.name}: {flaw}; building it again")
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            build(draft)
            _write_manifest(draft, recipe)
            draft.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{target.name}: another process is at it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def _files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)


def _write_manifest(path: Path, recipe: str) -> None:
    files = {name: {"size": (path / name).stat().st_size, "sha256": sha256(path / name)} for name in _files(path)}
    (path / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1))


def _flaw(path: Path, recipe: str) -> str | None:
    """What is wrong with a built folder, None for nothing. Sizes first, so that only a whole folder is hashed."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["recipe"] != recipe:
            return "made by another recipe"
        files = manifest["files"]
        sizes = {name: (path / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"incomplete ({error})"
    wrong = [name for name in files if sizes[name] != files[name]["size"]]
    wrong = wrong or [name for name in files if sha256(path / name) != files[name]["sha256"]]
    return f"{wrong[0]} is damaged" if wrong else None
