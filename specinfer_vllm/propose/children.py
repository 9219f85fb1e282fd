# SPDX-License-Identifier: Apache-2.0
"""The children of an SSM's nodes: its likeliest tokens, or draws made as the acceptance rule needs them.

In    logits [requests, nodes, vocab] of the SSM at nodes of one level
Out   `width` children of each node; for sampled requests the laws they were drawn from, kept until the walk

A sampled child's score is rank-based: the j-th draw counts like the j-th most probable token, whichever it drew. A
score that knew the token would let the budget choose among draws, and the rules are biased then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specinfer_vllm.propose.proposer import DraftSampling
from specinfer_vllm.verify import draft

# The LLM's likeliest token is the SSM's more often than the SSM's own law says. At 0.75 the chances of boost-tuned SSMs
# fit on 7,000 held-out places of greedy answers: 0.60 expected of the first child, 0.61 found (0.46 at 1).
SHARPNESS = 0.75
# Nodes of one SSM's tree, in units of which the SSMs' draws are told apart.
NODES = 1 << 20


@dataclass(frozen=True)
class Children:
    """Children of nodes, each [requests, nodes, width], in the order of drawing.

    token  int64, -1 where the law had no further token
    score  float32, log of the estimated chance that the child is accepted once its parent is
    back   int64, how many draws before it the same token was drawn first under this parent, 0 = not yet
    law    int64, row of the laws that it was sampled from, -1 = not sampled
    """

    token: torch.Tensor
    score: torch.Tensor
    back: torch.Tensor
    law: torch.Tensor


@dataclass
class ChildSampler:
    """Draws the children of one SSM's trees in one step, level after level.

    sampling  of the requests that draw, None when none is sampled
    position  [requests] int64    of the step's first token
    ssm       index of the SSM: two SSMs' draws are independent
    ids       [vocab] int64       tokens that the logits stand for, None = 0, 1, ..
    """

    sampling: DraftSampling | None
    position: torch.Tensor
    ssm: int
    ids: torch.Tensor | None = None
    kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        sampling: DraftSampling | None,
        requests: np.ndarray,
        lengths: np.ndarray,
        ssm: int,
        ids: torch.Tensor | None = None,
    ) -> ChildSampler:
        """For the given requests [k] int64 of a batch; lengths [batch] int64 of committed tokens."""
        if sampling is not None:
            picked = {
                name: getattr(sampling, name)[requests] for name in ("sampled", "temperature", "top_k", "top_p", "seed")
            }
            sampling = DraftSampling(sampling.drafting, **picked) if picked["sampled"].any() else None
        return cls(sampling, torch.from_numpy(lengths[requests]), ssm, ids)

    def children(self, logits: torch.Tensor, width: int, parent: torch.Tensor) -> Children:
        """Children of each node; parent [requests, nodes] int64 = local indices of the nodes themselves."""
        children = likeliest(logits, width)
        if self.sampling is not None:
            children = self._sampled(children, logits, parent)
        return named(children, self.ids)

    def _sampled(self, children: Children, logits: torch.Tensor, parent: torch.Tensor) -> Children:
        """The children with those of sampled requests replaced by draws."""
        width = children.token.shape[-1]
        chosen = torch.from_numpy(np.flatnonzero(self.sampling.sampled))
        nodes = parent.shape[1]
        laws = self._laws(logits[chosen], chosen).flatten(0, 1)
        first = sum(len(each) for each in self.kept)
        key = (
            torch.from_numpy(self.sampling.seed)[chosen].repeat_interleave(nodes),
            self.position[chosen].repeat_interleave(nodes),
            (self.ssm * NODES + parent[chosen]).flatten(),
        )
        number = torch.arange(first, first + len(laws))
        drawn, laws = draw(self.sampling.drafting, laws, width, key, number)
        self.kept.append(laws)
        shape = (len(chosen), nodes, width)
        result = [each.clone() for each in (children.token, children.score, children.back, children.law)]
        for target, values in zip(result, drawn, strict=True):
            target[chosen] = values.reshape(shape).to(target.dtype)
        return Children(*result)

    def _laws(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the SSM samples from [requests, nodes, vocab]: the requests' temperature, top-k and top-p."""
        temperature, top_k, top_p = (
            torch.from_numpy(getattr(self.sampling, name))[chosen] for name in ("temperature", "top_k", "top_p")
        )
        laws = (logits / temperature[:, None, None]).softmax(dim=-1)
        vocab = laws.shape[-1]
        if bool((top_k >= vocab).all()) and bool((top_p >= 1).all()):
            return laws
        return bounded(laws, top_k, top_p)

    def laws(self, vocab_size: int) -> torch.Tensor | None:
        """All laws drawn from since the start, [laws, vocab_size] float32; None when nothing was sampled."""
        if not self.kept:
            return None
        return over_vocabulary(torch.cat(self.kept), self.ids, vocab_size)


def likeliest(logits: torch.Tensor, width: int) -> Children:
    """The `width` likeliest children of each node of logits [requests, nodes, vocab]; none of them is sampled."""
    score, token = (logits / SHARPNESS).log_softmax(dim=-1).topk(width, dim=-1)
    nothing = torch.zeros_like(token)
    return Children(token, score, nothing, nothing - 1)


def named(children: Children, ids: torch.Tensor | None) -> Children:
    """The children by the tokens that the logits stand for, ids [vocab] int64; None = 0, 1, .."""
    if ids is None:
        return children
    return replace(children, token=torch.where(children.token >= 0, ids[children.token.clamp(min=0)], -1))


def bounded(laws: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """laws [requests, nodes, vocab] after each request's top-k [requests] and top-p [requests], normalised."""
    sorted_laws, order = laws.sort(dim=-1, descending=True)
    before = sorted_laws.cumsum(dim=-1) - sorted_laws
    kept = torch.arange(laws.shape[-1], device=laws.device) < top_k[:, None, None]
    kept = kept & (before < top_p[:, None, None])
    kept[..., 0] = True
    laws = torch.zeros_like(laws).scatter(-1, order, sorted_laws * kept)
    return laws / laws.sum(dim=-1, keepdim=True)


def draw(
    drafting: str, laws: torch.Tensor, width: int, key: tuple[torch.Tensor, ...], number: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Children of nodes as a rule needs them drawn: (token, score, back, law), [n, width] each, and the laws to keep.

    laws [n, vocab]; key: of the coins, as verify/draft.py takes it; number [n] int64: what each law is called
    """
    law = number[:, None].expand(-1, width)
    ranked = laws.topk(width, dim=-1).values.clamp(max=1).log()
    if drafting == "top_k_plus_one":
        best, token, laws = draft.top_k_plus_one(laws, width, *key)
        token = torch.cat([best, token[:, None]], dim=1)
        law = torch.where(torch.arange(width, device=laws.device) == width - 1, law, -1)
        # The draw stands for all tokens that are not fixed, and must not tell which of them it is.
        rest = (1 - ranked[:, :-1].exp().sum(dim=-1)).clamp(min=0)
        ranked[:, -1] = torch.minimum(ranked[:, 0], rest.log())
    elif drafting == "iid":
        token = draft.iid(laws, width, *key)
    else:
        token = draft.without_replacement(laws, width, *key)
    return (token, ranked, repeats(token), law), laws


def over_vocabulary(laws: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """laws [.., tokens] over the whole vocabulary [.., vocab_size]; ids [tokens] int64, None = 0, 1, .."""
    if ids is not None:
        return laws.new_zeros(*laws.shape[:-1], vocab_size).index_copy_(-1, ids, laws)
    return torch.nn.functional.pad(laws, (0, vocab_size - laws.shape[-1]))


def repeats(token: torch.Tensor) -> torch.Tensor:
    """How many draws before each the same token was drawn first, 0 where it is new. token [n, width]."""
    width = token.shape[1]
    same = (token[:, :, None] == token[:, None, :]) & (token[:, :, None] >= 0)
    place = torch.arange(width, device=token.device)
    first = torch.where(same, place, width).amin(dim=-1)
    return torch.where(first < width, place - first, 0)
