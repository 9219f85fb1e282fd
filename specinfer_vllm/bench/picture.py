# SPDX-License-Identifier: Apache-2.0
"""Pictures of one verified token tree: text for the terminal, PNG for the disk."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from specinfer_vllm.metrics import Showcase

ACCEPTED, BONUS, REFUSED = "#2a7f3f", "#2070b0", "#bdbdbd"
LEGEND = ((ACCEPTED, "accepted"), (BONUS, "the LLM's own token"), (REFUSED, "refused"))


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
    """The same as a drawing, root left, the accepted path on the first line. Returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens, owners = [*tree.tokens, tree.bonus], [*tree.owners, []]
    bonus, on_path = len(tree.tokens), {0, *tree.accepted, len(tree.tokens)}
    parent = [*tree.parent, tree.accepted[-1] if tree.accepted else 0]
    depth, line = _layout(parent, on_path)
    figure, axes = pyplot.subplots(figsize=(1.5 * (max(depth) + 1) + 0.6, 0.75 * (max(line) + 1) + 0.9))
    for node in range(len(tokens)):
        color = BONUS if node == bonus else ACCEPTED if node in on_path else REFUSED
        if node:
            x, y = [depth[parent[node]], depth[node]], [-line[parent[node]], -line[node]]
            axes.plot(x, y, color=color, linewidth=2, linestyle=":" if node == bonus else "-", zorder=1)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": color, "linewidth": 1.8}
        shown = {"ha": "center", "zorder": 2, "color": "black" if node in on_path else "#707070"}
        axes.text(depth[node], -line[node], _quoted(decode, tokens[node], escape=False), va="center", bbox=box, **shown)
        names = "root" if node == 0 else "LLM" if node == bonus else ", ".join(owners[node])
        axes.text(depth[node], -line[node] - 0.36, names, va="center", fontsize=7, **(shown | {"color": "#909090"}))
    handles = [pyplot.Line2D([], [], color=color, linewidth=3, label=label) for color, label in LEGEND]
    axes.legend(handles=handles, ncols=len(LEGEND), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9)
    axes.set_axis_off()
    axes.set_xlim(-0.5, max(depth) + 0.5)
    axes.set_ylim(-max(line) - 0.6, 0.5)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _layout(parent: list[int], first: Collection[int]) -> tuple[list[int], list[int]]:
    """Column (depth) and line of each node: one child stays on its parent's line, every other opens a new one.

    first  nodes that go before their siblings
    """
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    depth, line, used = [0] * len(parent), [0] * len(parent), 0
    stack = [0]
    while stack:
        node = stack.pop()
        below = sorted(children[node], key=lambda child: child not in first)
        if node and node != _eldest(children[parent[node]], first):
            used += 1
            line[node] = used
        elif node:
            line[node] = line[parent[node]]
        for child in below:
            depth[child] = depth[node] + 1
        stack += reversed(below)
    return depth, line


def _eldest(siblings: list[int], first: Collection[int]) -> int:
    """The sibling that stays on its parent's line."""
    return min(siblings, key=lambda node: (node not in first, node))


def _quoted(decode: Callable[[list[int]], str], token: int, escape: bool = True) -> str:
    shown = repr(decode([token]))
    # rich reads brackets as markup, matplotlib dollars as formulas.
    return shown.replace("[", "\\[") if escape else shown.replace("$", r"\$")
