# SPDX-License-Identifier: Apache-2.0
"""Token trees of a fixed size, whatever was drafted: expanding and merging where the host reads nothing.

Proposers write draws of a fixed number per request; `merged` unites those of several proposers, `best_nodes` keeps the
likeliest. The number of launches depends on neither depth nor nodes nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MIX = -7046029254386353131  # splitmix64's increment, as in triton_kernels/recycle.py


@dataclass(frozen=True)
class DeviceDraws:
    """Draws of a batch, all [requests, draws]; a parent stands before its children and is at least as likely.

    token   int32      -1 = none
    parent  int32      0 = the root, draw i counts as i + 1
    score   float32    log of the estimated chance that the path is accepted; -inf = none
    depth   int32      1 below the root
    path    int64      a number made of the tokens from the root to the draw: equal paths have equal numbers
    owner   int32      bits of the proposers that drew it
    """

    token: torch.Tensor
    parent: torch.Tensor
    score: torch.Tensor
    depth: torch.Tensor
    path: torch.Tensor
    owner: torch.Tensor

    @property
    def num_draws(self) -> int:
        """Draws of each request."""
        return self.token.shape[1]


def child_path(above: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """A child's path number [any shape] int64 from its parent's, 0 at the root, and its token; wraps."""
    mixed = (above ^ (token.long() + 1)) * _MIX
    return mixed ^ (mixed >> 29)


def merged(parts: Sequence[DeviceDraws]) -> DeviceDraws:
    """The union of several proposers' trees (SpecInfer, definition 3.2): of equal paths the first stays.

    It gets the best score of them, so that a parent stays at least as likely as its children. Two paths whose numbers
    collide become one, which costs a draft and changes no output: what is verified is the tree as it stands.
    """
    if len(parts) == 1:
        return parts[0]
    first = [0]
    for part in parts[:-1]:
        first.append(first[-1] + part.num_draws)
    token, score, depth, path, owner = (
        torch.cat([getattr(part, name) for part in parts], dim=1)
        for name in ("token", "score", "depth", "path", "owner")
    )
    parent = torch.cat(
        [torch.where(part.parent > 0, part.parent + at, 0) for part, at in zip(parts, first, strict=True)], dim=1
    )
    exists = score > -torch.inf
    same = (path[:, :, None] == path[:, None, :]) & exists[:, :, None] & exists[:, None, :]
    best = torch.where(same, score[:, None, :], -torch.inf).amax(dim=2)
    # A proposer draws a path once, so that its bit is there once.
    owner = torch.where(same, owner[:, None, :], 0).sum(dim=2, dtype=torch.int32)
    canonical = same.int().argmax(dim=2)  # the first of equal ones; 0 for a draw that does not exist
    index = torch.arange(token.shape[1], device=token.device)
    is_first = exists & (canonical == index)
    above = canonical.gather(1, (parent.long() - 1).clamp(min=0))
    parent = torch.where(parent > 0, above.int() + 1, 0)
    return DeviceDraws(token, parent, torch.where(is_first, best, -torch.inf), depth, path, owner)


@dataclass(frozen=True)
class DeviceNodes:
    """Nodes of a batch, [requests, nodes]: token, parent, score and owner as of DeviceDraws.

    Those that do not exist stand last, as children of the root without a token: token -1, score -inf.
    """

    token: torch.Tensor
    parent: torch.Tensor
    score: torch.Tensor
    owner: torch.Tensor


def best_nodes(draws: DeviceDraws, nodes: int, max_depth: torch.Tensor) -> DeviceNodes:
    """The likeliest draws of each request, down to max_depth [requests]; of equal ones the earlier.

    A child is never likelier than its parent and stands behind it, so that what is kept is a tree.
    """
    requests, count = draws.token.shape
    score = draws.score.masked_fill(draws.depth > max_depth[:, None], -torch.inf)
    if count < nodes:
        missing = score.new_full((requests, nodes - count), -torch.inf)
        score = torch.cat([score, missing], dim=1)
    best = score.sort(dim=1, descending=True, stable=True)
    alive = best.values[:, :nodes] > -torch.inf
    kept = torch.where(alive, best.indices[:, :nodes], count).sort(dim=1).values  # in the order of drawing again
    alive = kept < count
    place = torch.zeros(requests, count + 2, dtype=torch.int32, device=kept.device)
    number = torch.arange(1, nodes + 1, dtype=torch.int32, device=kept.device)
    place.scatter_(1, kept + 1, number.expand(requests, nodes))
    kept = kept.clamp(max=count - 1)
    parent = place.gather(1, draws.parent.gather(1, kept).long())
    return DeviceNodes(
        token=torch.where(alive, draws.token.gather(1, kept), -1),
        parent=torch.where(alive, parent, 0),
        score=torch.where(alive, draws.score.gather(1, kept), -torch.inf),
        owner=torch.where(alive, draws.owner.gather(1, kept), 0),
    )
