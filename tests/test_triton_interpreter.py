# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' cases in Triton's interpreter, in their own process: the mode is fixed when triton is imported.

They take minutes and one core, so they start when the test run does (see conftest.py) and go on beside the other tests.
"""

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton_cpu  # noqa: E402

KERNELS = [
    "tree_attention",
    "mla_attention",
    "kv_compact",
    "tree_build",
    "tree_verify",
    "tree_traversal",
    "tree_walk",
    "tree_counts",
    "recycle",
    "device_trees",
    "backend",
    # Asked for late: they take longer than all fast tests.
    pytest.param("runner_v2", marks=pytest.mark.engine),
    pytest.param("runner_v2_cost", marks=pytest.mark.engine),
]
# The whole V2 runner of vLLM, with its own kernels interpreted too.
RUNNER_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", **triton_cpu.environment()}
ENVIRONMENT = {"runner_v2": RUNNER_V2, "runner_v2_cost": RUNNER_V2}
HERE = Path(__file__).parent


class Interpreter(threading.Thread):
    """One kernel after the other: `done[kernel]` is set once `result[kernel]` = (exit status, output) is there."""

    def __init__(self, kernels: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self.done = {kernel: threading.Event() for kernel in kernels}
        self.result: dict[str, tuple[int, str]] = {}
        self.process: subprocess.Popen | None = None
        atexit.register(self.stop)

    def run(self) -> None:
        for kernel, done in self.done.items():
            environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | ENVIRONMENT.get(kernel, {})
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_triton_{kernel}.py"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.process = subprocess.Popen(command, cwd=HERE, env=environment, **pipes)
            output, _ = self.process.communicate()
            self.result[kernel] = self.process.returncode, output
            done.set()

    def stop(self) -> None:
        """A test run that ends early leaves nothing behind."""
        if self.process is not None:
            self.process.kill()


RUNNING: list[Interpreter] = []


def start(kernels: Iterable[str]) -> None:
    """Begin with the kernels that the test run will ask for."""
    RUNNING.append(Interpreter(kernels))
    RUNNING[-1].start()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the files run by themselves in this mode")
@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_pass_in_the_interpreter(kernel):
    assert RUNNING[-1].done[kernel].wait(timeout=1800), f"{kernel} takes longer than half an hour"
    status, output = RUNNING[-1].result[kernel]
    assert status == 0, output
