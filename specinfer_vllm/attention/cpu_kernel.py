# SPDX-License-Identifier: Apache-2.0
"""The compiled face of cpu_kernel.cpp: built once per machine with the compiler that vLLM's own torch.compile uses.

Without a compiler the torch path in cpu.py serves, several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from specinfer_vllm.cache_folder import cache_folder

logger = logging.getLogger("vllm.specinfer")

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
# Columns of the kernel's tiles: head_dim and block size must be multiples.
TILE_COLS = 16
POINTERS = (
    "query",
    "output",
    "cache",
    "table",
    "rows",
    "prefix",
    "tree_len",
    "ancestors",
    "position",
    "depth",
    "partial",
)
SIZES = (
    "requests",
    "width",
    "tree",
    "words",
    "heads",
    "kv_heads",
    "head_dim",
    "block",
    "table_stride",
    "query_stride",
    "output_stride",
    "splits",
    "window",
)


class Problem(ctypes.Structure):
    """`struct Problem` of cpu_kernel.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


@functools.cache
def kernel() -> ctypes._CFuncPtr | None:
    """The compiled function, None where it cannot be built; tried once per process."""
    try:
        function = ctypes.CDLL(str(build())).specinfer_tree_attention
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("tree attention runs in torch, several times slower: cpu_kernel.cpp did not compile (%s)", error)
        return None
    function.argtypes, function.restype = [ctypes.POINTER(Problem)], None
    return function


def build() -> Path:
    """Compile into the user's cache unless it is there. Returns the library's path.

    The name carries source, flags, compiler and CPU, since -march=native code must not travel between machines.
    Raises OSError without a compiler, subprocess.CalledProcessError when it fails.
    """
    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    identity = b"\0".join([SOURCE.read_bytes(), repr(FLAGS).encode(), version, cpu_identity()])
    root = cache_folder() / "kernels"
    library = root / f"tree_attention_{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed: other workers may compile at the same time.
        with tempfile.TemporaryDirectory(dir=root) as aside:
            built = Path(aside) / library.name
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, check=True)
            built.rename(library)
    return library


def cpu_identity() -> bytes:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor().encode()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(wanted)})).encode()
