# SPDX-License-Identifier: Apache-2.0
"""The examples run from any folder, on the default model."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.engine
@pytest.mark.parametrize("name", ["offline.py", "draft_free.py"])
def test_an_example_that_needs_no_ssm_runs(name, model_path, tmp_path):
    assert "tokens per LLM step" in run(name, "--tokens", "24", cwd=tmp_path)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_every_example_starts_engines_only_as_a_main_program(script):
    assert 'if __name__ == "__main__":' in script.read_text()
