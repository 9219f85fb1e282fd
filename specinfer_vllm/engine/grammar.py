# SPDX-License-Identifier: Apache-2.0
"""Grammar masks of token trees: row i allows what may follow the path from the root to node i.

Upstream's manager advances the grammar along the list of drafts (vllm/v1/structured_output/__init__.py), which is right
for chains only. Here the grammar walks the tree depth first, going back one token at every return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def fill_tree(
    grammar: Any,
    request_id: str,
    tokens: Sequence[int],
    parents: Sequence[int],
    fill: Callable[[int], None],
    copy: Callable[[int, int], None],
) -> None:
    """Fill the masks of one request's root and nodes.

    grammar   a StructuredOutputGrammar that stands at the root; it stands there again afterwards
    tokens    [nodes]; node i + 1 carries tokens[i]
    parents   [nodes] local indices, 0 = root, parents[i] <= i
    fill(i)   writes row i's mask from the grammar's present state
    copy(i, j)  copies row j's mask to row i

    A node that the grammar forbids gets its parent's mask: its token has probability 0 in the parent's row, so it is
    never accepted and nobody reads its own. A node's depth never passes the rollback vLLM's grammars are built for,
    num_speculative_tokens, because a tree has at least as many nodes as levels.
    """
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    fill(0)
    allowed = {0}
    # Depth-first with an explicit stack: (node, is_return). Trees may be deeper than Python's recursion likes.
    stack = [(child, False) for child in reversed(children[0])]
    while stack:
        node, is_return = stack.pop()
        if is_return:
            grammar.rollback(1)
            continue
        parent = parents[node - 1]
        stands = parent in allowed and not grammar.is_terminated()
        if stands and tokens[node - 1] >= 0 and grammar.validate_tokens([tokens[node - 1]]):
            grammar.accept_tokens(request_id, [tokens[node - 1]])
            allowed.add(node)
            fill(node)
            stack.append((node, True))
        else:
            copy(node, parent)
        stack.extend((child, False) for child in reversed(children[node]))
