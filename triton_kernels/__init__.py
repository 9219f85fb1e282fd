# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one per file. Installed as `specinfer_vllm.triton_kernels`, never as a top-level package.

This folder shares its name with the Triton project's package, which vLLM imports where it finds one. When a checkout's
root is on sys.path, vLLM finds this folder instead: then the package it meant is put in its place, or, where there is
none, the import fails and vLLM carries on as if nothing had been found.
"""


def _meant_package():
    """The package that an import of plain `triton_kernels` is after: an installed one, else the copy inside vLLM."""
    import importlib
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    here = Path(__file__).resolve().parent.parent
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("triton_kernels", elsewhere)
    if spec is not None and spec.loader is not None:
        package = sys.modules["triton_kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    elif "vllm" in sys.modules and importlib.util.find_spec("vllm.third_party.triton_kernels"):
        package = sys.modules["triton_kernels"] = importlib.import_module("vllm.third_party.triton_kernels")
    else:
        raise ImportError(
            f"the Triton project's package triton_kernels is not installed; {here / 'triton_kernels'}, found because"
            f" {here} is on sys.path, is specinfer_vllm.triton_kernels. This is harmless; PYTHONSAFEPATH=1 avoids it."
        )
    return package


if __name__ == "triton_kernels":
    _meant_package()
