# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = """
import vllm.model_executor.layers.fused_moe.config as config
import specinfer_vllm.triton_kernels, specinfer_vllm.patches
print("version", config._triton_kernels_version)
"""


def python(code: str, cwd: Path, **environment: str) -> str:
    # PYTHONSAFEPATH would keep the working directory off sys.path, which is what these tests are about.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_vllm_imports_from_the_repository_root_and_from_elsewhere(place: str, tmp_path: Path):
    pytest.importorskip("vllm")
    # "None": vLLM sees no Triton package of that name, from the root no more than from elsewhere.
    assert python(IMPORTS, ROOT if place == "root" else tmp_path).splitlines()[-1] == "version None"


def test_an_installed_triton_kernels_is_found_in_spite_of_the_folder(tmp_path: Path):
    package = tmp_path / "triton_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "matmul.py").write_text("from triton_kernels import __file__ as origin")
    code = "import triton_kernels.matmul as m; print(m.origin)"
    assert python(code, ROOT, PYTHONPATH=str(tmp_path)) == str(package / "__init__.py")


def test_only_one_package_is_installed_at_the_top_level(tmp_path: Path):
    for name in ("specinfer_vllm", "triton_kernels", "patches"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, tmp_path / "source"], check=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {name.split("/")[0] for name in names} == {"specinfer_vllm", "specinfer_vllm-0.1.0.dist-info"}
    for folder in ("triton_kernels", "patches"):
        sources = {f"specinfer_vllm/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
        assert sources <= set(names)


def test_vllm_and_the_shell_find_the_entry_points():
    points = {(point.group, point.name): point.value for point in distribution("specinfer-vllm").entry_points}
    assert points == {
        ("vllm.general_plugins", "specinfer"): "specinfer_vllm.plugin:register",
        ("console_scripts", "specinfer"): "specinfer_vllm.cli:main",
    }


def test_installing_the_package_asks_for_no_torch_and_no_vllm_by_itself():
    needed = [line for line in distribution("specinfer-vllm").requires if "extra ==" not in line]
    assert sorted(needed) == ["numpy", "packaging"]


def test_make_bench_runs_every_benchmark():
    """It once collected tests/ alone, which holds none, and passed."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    # -o: the set-up counts as done
    said = subprocess.run([make, "-n", "-o", ".venv/ready", "bench"], cwd=ROOT, capture_output=True, text=True).stdout
    for file in (ROOT / "specinfer_vllm/bench").glob("bench_*.py"):
        assert str(file.relative_to(ROOT)) in said
