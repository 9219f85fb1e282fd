# SPDX-License-Identifier: Apache-2.0
"""Token trees of a fixed size, whatever was drafted: expanding and merging where the host reads nothing.

Proposers write draws of a fixed number per request; `merged` unites those of several proposers, `first_of` leaves each
request those of one, `best_nodes` keeps the likeliest. The number of launches depends on neither depth nor nodes nor
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def first_of(parts: Sequence[DeviceDraws]) -> list[DeviceDraws]:
    """The parts, each with the draws of those requests only for which no part in front of it has any."""
    chosen, taken = [], None
    for part in parts:
        has_any = (part.score > -torch.inf).any(dim=1, keepdim=True)
        chosen.append(part if taken is None else replace(part, score=part.score.masked_fill(taken, -torch.inf)))
        taken = has_any if taken is None else taken | has_any
    return chosen


def merged(parts: Sequence[DeviceDraws]) -> DeviceDraws:
    """The union of several proposers' trees (SpecInfer, definition 3.2): of equal paths the first stays."""
    return parts[0] if len(parts) == 1 else united(parts)[0]


def united(parts: Sequence[DeviceDraws]) -> tuple[DeviceDraws, torch.Tensor]:
    """As `merged`, with repeated draws within a part too, and each draw's place [requests, draws] int64.

    place: the draw that stands for all of its path, the first. It gets the best score of them, so that a parent stays
    at least as likely as its children. Two paths whose numbers collide become one, which costs a draft and changes no
    output: what is verified is the tree as it stands.
    """
    first = [0]
    for part in parts[:-1]:
        first.append(first[-1] + part.num_draws)
    token, score, depth, path, owner = (
        torch.cat([getattr(part, name) for part in parts], dim=1)
        for name in ("token", "score", "depth", "path", "owner")
    )
    index = torch.arange(token.shape[1], device=token.device).expand_as(path)
    # Equal paths stand beside each other once they are sorted, the first in front; what is missing stands alone.
    beside = torch.where(score == -torch.inf, ~index, path).sort(dim=1, stable=True)
    begins = torch.nn.functional.pad(beside.values[:, 1:] != beside.values[:, :-1], (1, 0), value=True)
    leader = (index * begins).cummax(dim=1).values
    canonical = torch.empty_like(index).scatter_(1, beside.indices, beside.indices.gather(1, leader))
    best = torch.full_like(score, -torch.inf).scatter_reduce_(1, canonical, score, "amax")
    # A proposer draws a path once, so that its bit is there once.
    owner = torch.zeros_like(owner).scatter_add_(1, canonical, owner)
    # Numbers of the root and a part's draws, part after part: where a part's parents are looked up.
    root = torch.zeros_like(token[:, :1])
    numbers = (canonical + 1).int().split([part.num_draws for part in parts], dim=1)
    number = torch.cat([each for part in numbers for each in (root, part)], dim=1)
    behind = [part.parent + (at + i) for i, (part, at) in enumerate(zip(parts[1:], first[1:], strict=True), 1)]
    parent = number.gather(1, torch.cat([parts[0].parent, *behind], dim=1).long())
    return DeviceDraws(token, parent, best.masked_fill(canonical != index, -torch.inf), depth, path, owner), canonical


@dataclass(frozen=True)
class DeviceNodes:
    """Nodes of a batch, [requests, nodes]: token, parent, score and owner as of DeviceDraws.

    Those that do not exist stand last, as children of the root without a token: token -1, score -inf.
    draw  int64, rising: the draw that each node is, and a number past all draws where there is none
    """

    token: torch.Tensor
    parent: torch.Tensor
    score: torch.Tensor
    owner: torch.Tensor
    draw: torch.Tensor

    def numbers(self, draw: torch.Tensor) -> torch.Tensor:
        """Number of the node that each draw [requests, n] int64 is, int64: node i counts as i + 1; 0 = none is."""
        at = torch.searchsorted(self.draw, draw)
        found = self.draw.gather(1, at.clamp(max=self.draw.shape[1] - 1)) == draw
        return (at + 1) * found


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
    kept = best.indices[:, :nodes].masked_fill(best.values[:, :nodes] == -torch.inf, count)
    kept = kept.sort(dim=1).values  # in the order of drawing again
    missing, at = kept == count, kept.clamp(max=count - 1)
    # A parent is kept, and its number is how many of the kept do not stand behind it.
    parent = torch.searchsorted(kept, draws.parent.gather(1, at).long(), out_int32=True)
    return DeviceNodes(
        token=draws.token.gather(1, at).masked_fill_(missing, -1),
        parent=parent.masked_fill_(missing, 0),
        score=draws.score.gather(1, at).masked_fill_(missing, -torch.inf),
        owner=draws.owner.gather(1, at).masked_fill_(missing, 0),
        draw=kept,
    )
