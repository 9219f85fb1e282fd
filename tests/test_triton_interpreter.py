# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' cases in Triton's interpreter, in their own process: the mode is fixed when triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = ["tree_attention", "kv_compact", "tree_build", "tree_verify"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the files run by themselves in this mode")
@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_pass_in_the_interpreter(kernel):
    file = f"test_triton_{kernel}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / file)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
