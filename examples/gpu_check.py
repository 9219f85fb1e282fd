# SPDX-License-Identifier: Apache-2.0
"""Checks the Triton kernels on this machine's GPU against their torch references, then times them.

    python examples/gpu_check.py                                  all checks, then times for up to seven minutes
    python examples/gpu_check.py tree_attention --seconds 120     one kernel
    TRITON_INTERPRET=1 python examples/gpu_check.py --tiny        without a GPU: tiny inputs, times without meaning

Needs torch, triton and this checkout; neither vLLM nor an installation. Results go to gpu_check.json as they come, so
that an interrupted run keeps what it has. Ends with status 1 if a check failed.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
# The longest last. tree_libraries: our tree attention against that of torch and of libraries that are installed.
KERNELS = ("tree_build", "tree_walk", "recycle", "kv_compact", "tree_verify", "tree_libraries")
KERNELS += ("mla_attention", "tree_attention")


def use_this_checkout() -> None:
    """Import specinfer_vllm from here, installed or not, with the folder triton_kernels inside it; once.

    The root stays off sys.path: there, triton_kernels has the name of a package of the Triton project.
    """
    if "specinfer_vllm" in sys.modules:
        return
    package = ROOT / "specinfer_vllm"
    spec = importlib.util.spec_from_file_location(
        "specinfer_vllm", package / "__init__.py", submodule_search_locations=[str(package), str(ROOT)]
    )
    module = sys.modules["specinfer_vllm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Results:
    """What is known so far, in memory and in a JSON file that is complete at any time."""

    def __init__(self, path: Path, environment: dict) -> None:
        self.path, self.started = path, time.monotonic()
        self.found = {"environment": environment, "seconds": 0.0, "checks": {}, "times": {}}

    def add(self, section: str, kernel: str, row: dict) -> None:
        """Append a row to a kernel's section and save all."""
        self.found[section].setdefault(kernel, []).append(row)
        self.save()

    def save(self) -> None:
        """Replace the file at once, so that it is never half written."""
        self.found["seconds"] = round(time.monotonic() - self.started, 1)
        half = self.path.with_name(f"{self.path.name}.part")
        half.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(half, self.path)


def run_checks(kernels: dict[str, ModuleType], results: Results, device: torch.device, tiny: bool) -> int:
    """Run every kernel's checks. Returns how many failed."""
    from specinfer_vllm.bench.kernels import measure

    failed = 0
    for name, kernel in kernels.items():
        measure.say(f"{name}: kernel against reference")
        try:
            for check in measure.reported(kernel.check(device, tiny)):
                failed += not check.passed
                results.add("checks", name, check.row())
        except Exception as error:  # of this kernel; the others still have their turn
            failed += 1
            check = measure.Check("making the inputs", measure.first_line(error), 0)
            measure.say(str(check))
            results.add("checks", name, check.row())
    return failed


def run_times(
    kernels: dict[str, ModuleType], results: Results, device: torch.device, tiny: bool, deadline: float
) -> None:
    """Time every kernel and print its table."""
    from specinfer_vllm.bench.kernels import measure

    for name, kernel in kernels.items():
        measure.say(f"{name}: times")
        try:
            for row in kernel.times(device, tiny, deadline):
                results.add("times", name, row)
        except Exception as error:
            results.add("times", name, {"us": measure.first_line(error)})
        print(f"\n{measure.table(results.found['times'].get(name, []))}\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Check, time, save. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="kernels: " + ", ".join(KERNELS))
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="only these (default: all)")
    parser.add_argument("--tiny", action="store_true", help="few tiny cases")
    parser.add_argument("--seconds", type=float, default=420, help="no new time is taken after so long (default 420)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="file to write (gpu_check.json)")
    options = parser.parse_args(argv)
    if unknown := set(options.kernels) - set(KERNELS):
        parser.error(f"{', '.join(sorted(unknown))}: the kernels are {', '.join(KERNELS)}")

    use_this_checkout()
    from specinfer_vllm.bench.kernels import measure

    deadline = time.monotonic() + options.seconds
    device = measure.default_device()
    if device.type == "cpu" and not options.tiny:
        measure.say("Triton's interpreter is too slow for more than the tiny cases: continuing as with --tiny")
        options.tiny = True
    results = Results(options.json, measure.environment())
    results.save()
    for name, value in results.found["environment"].items():
        measure.say(f"{name}: {value}")

    names = options.kernels or KERNELS
    kernels = {name: importlib.import_module(f"specinfer_vllm.bench.kernels.{name}") for name in names}
    failed = run_checks(kernels, results, device, options.tiny)
    measure.say(f"{failed} checks failed" if failed else "all checks passed")
    try:
        results.found["environment"]["copy GB/s"] = round(measure.copy_bandwidth(device), 1)
        measure.say(f"a large copy in torch: {results.found['environment']['copy GB/s']} GB/s, read and written")
    except Exception as error:
        measure.say(f"a large copy in torch: {measure.first_line(error)}")
    run_times(kernels, results, device, options.tiny, deadline)
    results.save()
    measure.say(f"{'FAILED' if failed else 'passed'}; results in {options.json}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
