# SPDX-License-Identifier: Apache-2.0
"""Lets a vLLM of the CPU wheel run Triton kernels in Triton's interpreter.

vLLM switches Triton off on a CPU unless Triton has a backend named `cpu` (vllm/triton_utils/importing.py). With
TRITON_INTERPRET=1 nothing is compiled and no driver is asked for more than its name, so one that does nothing will do.

`register()` is for the process that calls it, before it imports vLLM; `environment()` for those that it spawns.
"""

import os
from pathlib import Path

# Python imports this folder's sitecustomize in every process that has it on PYTHONPATH.
SITE = Path(__file__).parent / "triton_cpu_site"
SWITCH = "SPECINFER_TRITON_CPU"


def register() -> None:
    """Give Triton a backend named `cpu`, once per process."""
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """Answers what is asked before a kernel runs; kernels themselves run in the interpreter."""

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_benchmarker(self):
            raise NotImplementedError("the interpreter's times mean nothing")

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

    if "cpu" not in backends:
        compiler = next(iter(backends.values())).compiler
        backends["cpu"] = Backend(compiler, InterpreterDriver)


def environment() -> dict[str, str]:
    """Variables under which a Python process, and all that it starts, calls `register` and interprets its kernels."""
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TRITON_INTERPRET": "1", SWITCH: "1", "PYTHONPATH": os.pathsep.join(path)}
