# SPDX-License-Identifier: Apache-2.0
"""The children of an SSM's nodes on the V2 runner: as propose/children.py, all requests alike and none looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from specinfer_vllm.propose.children import NODES, Children, bounded, draw, likeliest, named


@dataclass(frozen=True)
class DeviceDraftSampling:
    """How the children of sampled requests are drawn, as DraftSampling, on the device.

    drafting  what the rule needs (verify/draft.py)
    sampled   [requests] bool
    temperature [requests] float32, top_k [requests] int, top_p [requests] float32, seed [requests] int64
    bounded   whether some request has a top-k or a top-p; the host knows it
    """

    drafting: str
    sampled: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    bounded: bool

    def part(self, requests: slice) -> DeviceDraftSampling:
        """Of some of the requests."""
        names = ("sampled", "temperature", "top_k", "top_p", "seed")
        return replace(self, **{name: getattr(self, name)[requests] for name in names})

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        """What is sampled from [requests, nodes, vocab]: each request's temperature, top-k and top-p."""
        temperature = torch.where(self.sampled, self.temperature, 1.0)[:, None, None]
        laws = (logits / temperature).softmax(dim=-1)
        return bounded(laws, self.top_k, self.top_p) if self.bounded else laws


@dataclass
class DeviceChildSampler:
    """Draws the children of one SSM's trees in one step, level after level.

    sampling  None when the rule samples no children
    position  [requests] int64    of the step's first token
    ssm       index of the SSM: two SSMs' draws are independent
    ids       [vocab] int64       tokens that the logits stand for, None = 0, 1, ..
    kept      the laws drawn from, per level [requests, nodes, vocab]
    """

    sampling: DeviceDraftSampling | None
    position: torch.Tensor
    ssm: int
    ids: torch.Tensor | None = None
    kept: list[torch.Tensor] = field(default_factory=list)

    def children(self, logits: torch.Tensor, width: int, parent: torch.Tensor) -> Children:
        """Children of each node of logits [requests, nodes, vocab]; parent [requests, nodes] int64: of the nodes.

        A child's law counts the laws of its request, level after level.
        """
        children = likeliest(logits, width)
        if self.sampling is not None:
            children = self._sampled(children, logits, parent)
        return named(children, self.ids)

    def _sampled(self, children: Children, logits: torch.Tensor, parent: torch.Tensor) -> Children:
        """The children with those of sampled requests replaced by draws, as ChildSampler._sampled makes them."""
        requests, nodes = parent.shape
        shape = children.token.shape
        laws = self.sampling.laws(logits).flatten(0, 1)
        first = sum(each.shape[1] for each in self.kept)
        key = (
            self.sampling.seed.repeat_interleave(nodes),
            self.position.repeat_interleave(nodes),
            (self.ssm * NODES + parent).flatten(),
        )
        number = torch.arange(first, first + nodes, device=laws.device).repeat(requests)
        drawn, laws = draw(self.sampling.drafting, laws, shape[-1], key, number)
        self.kept.append(laws.view(requests, nodes, -1))
        others = (children.token, children.score, children.back, children.law)
        return Children(
            *(
                torch.where(self.sampling.sampled[:, None, None], mine.reshape(shape).to(other.dtype), other)
                for mine, other in zip(drawn, others, strict=True)
            )
        )
