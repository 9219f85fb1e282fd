# SPDX-License-Identifier: Apache-2.0
"""examples/gpu_check.py, on tiny inputs in Triton's interpreter: without vLLM, without the installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {"mla_attention", "tree_attention", "kv_compact", "tree_build", "tree_verify", "tree_walk", "recycle"}
KERNELS |= {"tree_libraries"}
# What the script does with sys.argv, where neither vLLM nor an installation of this package can be imported.
BARE = """
import importlib.abc, importlib.util, runpy, sys
from pathlib import Path

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise AssertionError(f"{name} was imported")
        if name == "specinfer_vllm":
            raise ModuleNotFoundError("not installed here")

sys.meta_path[:] = [Refuse(), *(each for each in sys.meta_path if "editable" not in getattr(each, "__module__", ""))]
script = sys.argv[0] = sys.argv.pop(1)
"""
RUN = BARE + "runpy.run_path(script, run_name='__main__')"
# Tree attention takes every tree for a chain.
WITHOUT_BITS = f"""{BARE}
gpu_check = runpy.run_path(script)
gpu_check["use_this_checkout"]()
from specinfer_vllm.bench.kernels import tree_attention as bench
whole = bench.tree_attention
bench.tree_attention = lambda *given, ancestors=None, **named: whole(*given, **named)
sys.exit(gpu_check["main"]())
"""


def run(code: str, *arguments: str, folder: Path, interpret: bool = True) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-c", code, str(ROOT / "examples/gpu_check.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_every_kernel_is_checked_and_timed_with_torch_and_triton_alone(tmp_path):
    done = run(RUN, "--tiny", "--json", str(tmp_path / "found.json"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "PASS  torch, trees" in done.stdout and "SKIP  flashinfer: " in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["checks"]) == set(found["times"]) == KERNELS
    assert all(row["passed"] for rows in found["checks"].values() for row in rows)
    assert all(row["us"] > 0 for rows in found["times"].values() for row in rows)
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]


def test_a_kernel_that_ignores_the_ancestors_fails(tmp_path):
    """Negative control; and without time left, every row says that it was skipped."""
    done = run(WITHOUT_BITS, "--tiny", "--seconds", "0", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    passed = {kernel: [row["passed"] for row in rows] for kernel, rows in found["checks"].items()}
    assert not all(passed.pop("tree_attention"))
    assert all(all(rows) for rows in passed.values())
    assert all(row["us"] == "skipped: out of time" for rows in found["times"].values() for row in rows)


def test_a_machine_without_a_gpu_is_told_what_to_do(tmp_path):
    done = run("import torch; torch.cuda.is_available = lambda: False" + RUN, folder=tmp_path, interpret=False)
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1" in done.stderr and "--tiny" in done.stderr
    assert not list(tmp_path.iterdir())
