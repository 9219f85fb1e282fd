# SPDX-License-Identifier: Apache-2.0
"""Pictures of one verified token tree: text for the terminal, PNG for the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specinfer_vllm.metrics import Showcase


def text(tree: Showcase, decode: Callable[[list[int]], str]):
    """A rich renderable: accepted nodes bold, the LLM's own token behind them, refused nodes dim."""
    from rich.tree import Tree

    accepted = set(tree.accepted)
    root = Tree(f"[bold]{_quoted(decode, tree.tokens[0])}[/]  [dim]root: the last committed token[/]")
    branches = {0: root}
    for node in range(1, len(tree.tokens)):
        style = "bold green" if node in accepted else "dim"
        label = f"[{style}]{_quoted(decode, tree.tokens[node])}[/]  [dim]{', '.join(tree.owners[node])}[/]"
        branches[node] = branches[tree.parent[node]].add(label)
    last = tree.accepted[-1] if tree.accepted else 0
    branches[last].add(f"[bold cyan]{_quoted(decode, tree.bonus)}[/]  [dim]the LLM's own token[/]")
    return root


def png(tree: Showcase, decode: Callable[[list[int]], str], path: Path) -> Path:
    """The same as a drawing, roots left. Returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    depth, place = _layout(tree.parent)
    accepted = {0, *tree.accepted}
    figure, axes = pyplot.subplots(figsize=(2.2 * (max(depth) + 2), 0.55 * (max(place) + 1) + 1.2))
    for node in range(1, len(tree.parent)):
        parent = tree.parent[node]
        color = "#2a7f3f" if node in accepted and parent in accepted else "#c8c8c8"
        axes.plot([depth[parent], depth[node]], [-place[parent], -place[node]], color=color, linewidth=2, zorder=1)
    last = tree.accepted[-1] if tree.accepted else 0
    axes.plot([depth[last], depth[last] + 1], [-place[last]] * 2, color="#2070b0", linewidth=2, linestyle=":", zorder=1)
    labels = [(depth[n], place[n], tree.tokens[n], n in accepted, False) for n in range(len(tree.parent))]
    for x, y, token, on_path, is_bonus in [*labels, (depth[last] + 1, place[last], tree.bonus, True, True)]:
        edge = "#2070b0" if is_bonus else "#2a7f3f" if on_path else "#b0b0b0"
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": edge, "linewidth": 1.6}
        name = _quoted(decode, token, escape=False)
        axes.text(x, -y, name, ha="center", va="center", color="black" if on_path else "#808080", bbox=box, zorder=2)
    axes.set_axis_off()
    axes.set_title("One step: green is accepted, blue the LLM's own token, grey refused", fontsize=10)
    axes.set_xlim(-0.6, max(depth) + 1.6)
    axes.set_ylim(-max(place) - 0.7, 0.7)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _layout(parent: list[int]) -> tuple[list[int], list[int]]:
    """Column (depth) and line of each node: a first child stays on its parent's line, every other opens a new one."""
    depth, place, used, lines = [0], [0], set(), 0
    for node in range(1, len(parent)):
        depth.append(depth[parent[node]] + 1)
        if parent[node] in used:
            lines += 1
        place.append(lines if parent[node] in used else place[parent[node]])
        used.add(parent[node])
    return depth, place


def _quoted(decode: Callable[[list[int]], str], token: int, escape: bool = True) -> str:
    shown = repr(decode([token]))
    # rich reads brackets as markup, matplotlib dollars as formulas.
    return shown.replace("[", "\\[") if escape else shown.replace("$", r"\$")
