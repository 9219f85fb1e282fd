# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH: gives every Python process a Triton backend named `cpu` while SPECINFER_TRITON_CPU=1 is set."""

import os
import runpy
from pathlib import Path

if os.environ.get("SPECINFER_TRITON_CPU") == "1":
    runpy.run_path(str(Path(__file__).parent.parent / "triton_cpu.py"))["register"]()
