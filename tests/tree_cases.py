# SPDX-License-Identifier: Apache-2.0
"""Token trees for tests: random ones from hypothesis, and the slow, obvious form that the fast one is compared with.

The obvious form of one request's tree is a dict {sequence of tokens: score} in the order of the rows, and a list of
draws (sequence, owner).
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from specinfer_vllm.tree.topology import TokenTrees, from_arrays

# A shared machine may stop for longer than any sensible deadline.
settings.register_profile("trees", deadline=None)
settings.load_profile("trees")

Path = tuple[int, ...]
Tree = tuple[dict[Path, float], list[tuple[Path, int]]]

DROPS = [0.0, 0.0, 0.5, 1.0, 1.5, float("inf")]  # exact in float32, with ties and impossible paths


@st.composite
def plain_trees(draw: st.DrawFn, max_nodes: int = 12, vocabulary: int = 3) -> Tree:
    """One request's tree in the obvious form: parents before children, otherwise any order, some draws repeated."""
    nodes: dict[Path, float] = {(): 0.0}
    growth = st.tuples(st.integers(0, 10**6), st.integers(0, vocabulary - 1), st.sampled_from(DROPS))
    for where, token, drop in draw(st.lists(growth, max_size=max_nodes)):
        parent = list(nodes)[where % len(nodes)]
        nodes.setdefault((*parent, token), nodes[parent] - drop)
    drawn = [path for path in nodes if path for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    return nodes, [(path, draw(st.integers(0, 3))) for path in draw(st.permutations(drawn))]


@st.composite
def batches(draw: st.DrawFn, inputs: int = 1, max_requests: int = 4, max_nodes: int = 12) -> list[TokenTrees]:
    """`inputs` batches of trees over the same requests with the same roots."""
    roots = draw(st.lists(st.integers(0, 5), max_size=max_requests))
    return [from_plain(roots, [draw(plain_trees(max_nodes)) for _ in roots]) for _ in range(inputs)]


def grown(rng: np.random.Generator, nodes: list[int], vocabulary: int = 1000, owner: int = 0) -> TokenTrees:
    """A batch with exactly `nodes` nodes per request, for sizes that hypothesis would not reach."""
    plain = []
    for count in nodes:
        tree: dict[Path, float] = {(): 0.0}
        paths: list[Path] = [()]
        while len(paths) <= count:
            parent = paths[rng.integers(max(0, len(paths) - 20), len(paths))]
            path = (*parent, int(rng.integers(vocabulary)))
            if path not in tree:
                tree[path] = tree[parent] - float(rng.integers(1, 9)) / 8
                paths.append(path)
        plain.append((tree, [(path, owner) for path in paths[1:]]))
    return from_plain([7] * len(nodes), plain)


def from_plain(roots: list[int], plain: list[Tree]) -> TokenTrees:
    """The arrays of trees in the obvious form."""
    tokens, parent, score, node, owner = [], [], [], [], []
    offsets, draw_offsets = [0], [0]
    for root, (nodes, draws) in zip(roots, plain, strict=True):
        place = {path: i for i, path in enumerate(nodes)}
        tokens += [path[-1] if path else root for path in nodes]
        parent += [place[path[:-1]] if path else -1 for path in nodes]
        score += list(nodes.values())
        node += [place[path] for path, _ in draws]
        owner += [by for _, by in draws]
        offsets.append(len(tokens))
        draw_offsets.append(len(node))
    laws = law_of(np.array(owner, np.int64))
    return from_arrays(offsets, tokens, parent, np.array(score, np.float32), draw_offsets, node, owner, laws)


def law_of(owner: np.ndarray) -> np.ndarray:
    """The law that draws of an owner carry here, so that whoever keeps the one must keep the other."""
    return 10 * owner - 1


def to_plain(trees: TokenTrees) -> list[Tree]:
    """The obvious form of every tree, by walking each node's parents up to the root."""
    assert np.array_equal(trees.draw_law, law_of(trees.draw_owner.astype(np.int64)))
    return [_plain_request(trees, request) for request in range(trees.num_requests)]


def _plain_request(trees: TokenTrees, request: int) -> Tree:
    start, end = trees.offsets[request], trees.offsets[request + 1]
    tokens, parent = trees.tokens[start:end].tolist(), trees.parent[start:end].tolist()

    def path(node: int) -> Path:
        return () if node == 0 else (*path(parent[node]), tokens[node])

    paths = [path(node) for node in range(end - start)]
    draws = slice(trees.draw_offsets[request], trees.draw_offsets[request + 1])
    carried = [
        (paths[node], by) for node, by in zip(trees.draw_node[draws], trees.draw_owner[draws].tolist(), strict=True)
    ]
    return dict(zip(paths, trees.score[start:end].tolist(), strict=True)), carried


def walked(nodes: dict[Path, float], path: Path = ()) -> list[Path]:
    """The tree's sequences depth first, highest score first, ties in the order of the dict."""
    children = [child for child in nodes if len(child) == len(path) + 1 and child[:-1] == path]
    children.sort(key=lambda child: -nodes[child])
    return [path, *(below for child in children for below in walked(nodes, child))]


def same_arrays(left: TokenTrees, right: TokenTrees) -> bool:
    """Whether two batches agree in every array, types included."""
    return all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and np.array_equal(getattr(left, name), getattr(right, name))
        for name in TokenTrees.__dataclass_fields__
    )
