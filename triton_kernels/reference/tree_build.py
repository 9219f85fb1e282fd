# SPDX-License-Identifier: Apache-2.0
"""The arrays of token trees in Python integers: a row's path is its parent's path and one more bit."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from specinfer_vllm.triton_kernels.tree_build import WORD_BITS, OrderedTrees, TreeArrays, words_for


def build(
    parent: torch.Tensor,
    start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    out: TreeArrays | None = None,
) -> TreeArrays:
    """Tensors as in the kernel's contract. What is allocated here ends at row start[-1]."""
    words = words_for(max_rows) if out is None else out.ancestors.shape[1]
    depth, position, ancestors, slot = [], [], [], []
    for request, ((first, end), prefix) in enumerate(zip(pairwise(start.tolist()), prefix_len.tolist(), strict=True)):
        blocks = block_table[request].tolist() if block_table is not None else []
        paths, levels = [], []
        for node, above in enumerate(parent[first:end].tolist()):
            below = 0 <= above < node  # else a root
            paths.append((paths[above] if below else 0) | 1 << node)
            levels.append(levels[above] + 1 if below else 0)
            if blocks:
                index = prefix + node
                slot.append(blocks[index // block_size] * block_size + index % block_size)
        depth += levels
        position += [prefix + level for level in levels]
        ancestors += [_words(path, words) for path in paths]
    device = parent.device
    made = TreeArrays(
        depth=torch.tensor(depth, dtype=torch.int32, device=device),
        position=torch.tensor(position, dtype=torch.int64, device=device),
        ancestors=torch.tensor(ancestors, dtype=torch.int64, device=device).view(-1, words),
        slot=torch.tensor(slot, dtype=torch.int64, device=device) if block_table is not None else None,
    )
    return made if out is None else _written(made, out)


def depth_first(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    score: torch.Tensor,
    start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    out: OrderedTrees | None = None,
) -> OrderedTrees:
    """Tensors as in the kernel's contract; scratch is not needed. What is allocated here ends at row start[-1]."""
    source, moved = [], []
    for first, end in pairwise(start.tolist()):
        above = [p if 0 <= p < node else -1 for node, p in enumerate(parent[first:end].tolist())]
        order = _preorder(above, score[first:end].tolist())
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        source += [first + node for node in order]
        moved += [place[above[node]] for node in order]
    source = torch.tensor(source, dtype=torch.int32, device=parent.device)
    moved = torch.tensor(moved, dtype=torch.int32, device=parent.device)
    arrays = build(moved, start, prefix_len, max_rows=max_rows, block_table=block_table, block_size=block_size)
    made = OrderedTrees(tokens[source.long()], moved, source, arrays, scratch=torch.empty_like(source).expand(2, -1))
    if out is None:
        return made
    for name in ("tokens", "parent", "source"):
        getattr(out, name)[: len(source)] = getattr(made, name)
    _written(arrays, out.arrays)
    return out


def _preorder(parent: list[int], score: list[float]) -> list[int]:
    """Nodes in depth-first order: of siblings the highest score first, of equal ones the earlier; NaN last."""
    ranked = [-math.inf if math.isnan(x) else x for x in score]
    children: dict[int, list[int]] = {}
    for node in sorted(range(len(parent)), key=lambda node: (-ranked[node], node)):
        children.setdefault(parent[node], []).append(node)
    stack, order = children.get(-1, [])[::-1], []
    while stack:
        order.append(stack.pop())
        stack += children.get(order[-1], [])[::-1]
    return order


def _words(bits: int, words: int) -> tuple[int, ...]:
    """The bits as that many signed 64-bit numbers, lowest first."""
    raw = bits.to_bytes(words * WORD_BITS // 8, "little")
    return tuple(int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8))


def _written(made: TreeArrays, out: TreeArrays) -> TreeArrays:
    """`out` with its first rows overwritten; all words of a row's bits are."""
    out.ancestors[: len(made.depth)] = 0
    out.ancestors[: len(made.depth), : made.ancestors.shape[1]] = made.ancestors
    for name in ("depth", "position", "slot"):
        if getattr(made, name) is not None:
            getattr(out, name)[: len(made.depth)] = getattr(made, name)
    return out
