# SPDX-License-Identifier: Apache-2.0
"""The children of an SSM's nodes on the V2 runner: as propose/children.py, all requests alike and none looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specinfer_vllm.propose.children import NODES, SHARPNESS, Children, repeats
from specinfer_vllm.verify import draft


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

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        """What is sampled from [requests, nodes, vocab]: each request's temperature, top-k and top-p."""
        temperature = torch.where(self.sampled, self.temperature, 1.0)[:, None, None]
        laws = (logits / temperature).softmax(dim=-1)
        if not self.bounded:
            return laws
        sorted_laws, order = laws.sort(dim=-1, descending=True)
        before = sorted_laws.cumsum(dim=-1) - sorted_laws
        rank = torch.arange(laws.shape[-1], device=laws.device)
        kept = (rank < self.top_k[:, None, None]) & (before < self.top_p[:, None, None])
        kept |= rank == 0
        laws = torch.zeros_like(laws).scatter(-1, order, sorted_laws * kept)
        return laws / laws.sum(dim=-1, keepdim=True)


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
        score, token = (logits / SHARPNESS).log_softmax(dim=-1).topk(width, dim=-1)
        nothing = torch.zeros_like(token)
        children = Children(token, score, nothing, nothing - 1)
        if self.sampling is not None:
            children = self._sampled(children, logits, parent)
        if self.ids is None:
            return children
        named = torch.where(children.token >= 0, self.ids[children.token.clamp(min=0)], -1)
        return Children(named, children.score, children.back, children.law)

    def _sampled(self, children: Children, logits: torch.Tensor, parent: torch.Tensor) -> Children:
        """The children with those of sampled requests replaced by draws, as ChildSampler._sampled makes them."""
        requests, nodes = parent.shape
        shape = children.token.shape
        width = shape[-1]
        laws = self.sampling.laws(logits).flatten(0, 1)
        first = sum(each.shape[1] for each in self.kept)
        key = (
            self.sampling.seed.repeat_interleave(nodes),
            self.position.repeat_interleave(nodes),
            (self.ssm * NODES + parent).flatten(),
        )
        number = torch.arange(first, first + nodes, device=laws.device)
        law = number.repeat(requests)[:, None].expand(-1, width)
        ranked = laws.topk(width, dim=-1).values.clamp(max=1).log()
        if self.sampling.drafting == "top_k_plus_one":
            best, token, laws = draft.top_k_plus_one(laws, width, *key)
            token = torch.cat([best, token[:, None]], dim=1)
            law = torch.where(torch.arange(width, device=laws.device) == width - 1, law, -1)
            # The draw stands for all tokens that are not fixed, and must not tell which of them it is.
            rest = (1 - ranked[:, :-1].exp().sum(dim=-1)).clamp(min=0)
            ranked = torch.cat([ranked[:, :-1], torch.minimum(ranked[:, 0], rest.log())[:, None]], dim=1)
        elif self.sampling.drafting == "iid":
            token = draft.iid(laws, width, *key)
        else:
            token = draft.without_replacement(laws, width, *key)
        self.kept.append(laws.view(requests, nodes, -1))
        drawn = (token, ranked, repeats(token), law)
        likeliest = (children.token, children.score, children.back, children.law)
        return Children(
            *(
                torch.where(self.sampling.sampled[:, None, None], mine.reshape(shape).to(other.dtype), other)
                for mine, other in zip(drawn, likeliest, strict=True)
            )
        )

    def laws(self, vocab_size: int) -> torch.Tensor | None:
        """All laws drawn from, [requests, laws, vocab_size] float32; None when nothing was sampled."""
        if not self.kept:
            return None
        laws = torch.cat(self.kept, dim=1)
        if self.ids is not None:
            return laws.new_zeros(*laws.shape[:2], vocab_size).index_copy_(2, self.ids, laws)
        return torch.nn.functional.pad(laws, (0, vocab_size - laws.shape[2]))
