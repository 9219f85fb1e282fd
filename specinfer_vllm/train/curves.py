# SPDX-License-Identifier: Apache-2.0
"""Plots of acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot(curves: Mapping[str, Sequence[float]], x: Sequence[float], xlabel: str, ylabel: str, file: Path) -> None:
    """Shares between 0 and 1, a line for each name; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for name, curve in curves.items():
        axes.plot(x, curve, marker="o", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1))
    axes.legend()
    figure.savefig(file)
