# SPDX-License-Identifier: Apache-2.0
"""The lower rooms of the house stand without vLLM and without the rooms above them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "tree": ROOT / "specinfer_vllm/tree",
    "verify": ROOT / "specinfer_vllm/verify",
    "triton_kernels": ROOT / "triton_kernels",
}
# What each room may import of the package beside itself.
BELOW = {"tree": set(), "verify": {"tree", "triton_kernels"}, "triton_kernels": set()}


def imported(source: str, package: str = "") -> set[str]:
    """Every module that a source names in an import, at whatever depth of its code.

    `package` is the dotted name of the package the source stands in, for relative imports.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def modules(room: str) -> list[str]:
    """Dotted names of all modules of a room, as they are called once installed."""
    files = sorted(ROOMS[room].rglob("*.py"))
    parts = [(room, *file.relative_to(ROOMS[room]).with_suffix("").parts) for file in files]
    return [".".join(("specinfer_vllm", *part)).removesuffix(".__init__") for part in parts]


def package_of(room: str, file: Path) -> str:
    return ".".join(("specinfer_vllm", room, *file.relative_to(ROOMS[room]).parent.parts))


def upward(names: set[str], room: str) -> list[str]:
    """Imported names that a room may not use: vLLM's, and those of the package's other rooms unless below it."""
    allowed = {f"specinfer_vllm.{other}" for other in {room} | BELOW[room]}
    return sorted(
        name
        for name in names
        if name.split(".")[0] == "vllm"
        or (name.startswith("specinfer_vllm.") and ".".join(name.split(".")[:2]) not in allowed)
    )


@pytest.mark.parametrize("room", ROOMS)
def test_lower_rooms_import_neither_vllm_nor_the_rooms_above(room):
    assert modules(room)
    for file in ROOMS[room].rglob("*.py"):
        names = imported(file.read_text(encoding="utf-8"), package_of(room, file))
        assert not upward(names, room), file


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import vllm", ["vllm"]),
        ("def late():\n    from vllm.v1 import outputs", ["vllm.v1", "vllm.v1.outputs"]),
        ("import vllm.config as c", ["vllm.config"]),
        ("from specinfer_vllm import engine", ["specinfer_vllm.engine"]),
        ("from ..engine.step import x", ["specinfer_vllm.engine.step", "specinfer_vllm.engine.step.x"]),
        ("from .. import plugin", ["specinfer_vllm.plugin"]),
        ("from specinfer_vllm.tree import merge\nfrom . import walk\nimport numpy, vllm_tools", []),
    ],
)
def test_the_scan_sees_every_form_of_import(line, names):
    assert upward(imported(line, "specinfer_vllm.verify"), "verify") == names


# Triton itself may be missing on a machine without a GPU; a kernel's module is then left to the scan above.
IMPORT_WITHOUT_VLLM = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if not (missing.name or "").split(".")[0] == "triton":
            raise
assert "vllm" not in sys.modules
"""


def run_without_vllm(*names: str) -> subprocess.CompletedProcess:
    # Through the test run's own sys.path, and not from the repository's root: there `triton_kernels` has another name.
    path = [entry or str(ROOT) for entry in sys.path] + [str(ROOT)]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{IMPORT_WITHOUT_VLLM}", *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", timeout=300, check=False)


@pytest.mark.parametrize("room", ROOMS)
def test_lower_rooms_import_where_vllm_is_refused(room):
    names = modules(room)
    if room == "triton_kernels" and run_without_vllm("specinfer_vllm.triton_kernels").returncode:
        pytest.skip("the package is not installed: only an installation puts triton_kernels into it")
    done = run_without_vllm(*names)
    assert done.returncode == 0, done.stderr


def test_the_refusal_refuses():
    done = run_without_vllm("vllm.sampling_params")
    assert done.returncode != 0
    assert "vllm was imported" in done.stderr
