# SPDX-License-Identifier: Apache-2.0
"""SSMs on different tensor-parallel ranks draft at the same time (SpecInfer, section 5): what they drew, to all ranks.

One collective a step carries token ids and draft probabilities, never hidden states. How much a rank sends follows from
the options alone, so that no rank asks another and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from vllm.distributed import parallel_state

from specinfer_vllm.config import TreeOptions, ssm_draws, ssm_slots
from specinfer_vllm.propose.device_ssm import DeviceSsm, Drafted
from specinfer_vllm.tree.device import DeviceDraws

# Fields of DeviceDraws in the order in which they travel, and the words of 32 bits that each takes.
WORDS = {each.name: 2 if each.name == "path" else 1 for each in fields(DeviceDraws)}


@dataclass(frozen=True)
class DraftShape:
    """How much one SSM drafts for a request: draws, and laws over so many tokens; none with a rule that weighs none."""

    draws: int
    laws: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, ssm: DeviceSsm, options: TreeOptions) -> DraftShape:
        """By the options alone; the SSM need not be loaded."""
        draws = ssm_draws(options, ssm.index)
        if not options.samples_drafts:
            return cls(draws)
        return cls(draws, 1 + ssm_slots(options, ssm.index), ssm.num_law_tokens)

    @property
    def sizes(self) -> list[int]:
        """Words of each part, in the order of `pack`."""
        sizes = [self.draws * words for words in WORDS.values()]
        return [*sizes, self.draws, self.laws * self.tokens] if self.laws else sizes

    def pack(self, drafts: Drafted) -> torch.Tensor:
        """[requests, words] int32. RuntimeError: drafts of another shape, which the other ranks would misread."""
        parts = [getattr(drafts.draws, name) for name in WORDS]
        if self.laws:
            parts += [drafts.law.int(), drafts.laws.flatten(1)]
        words = [each.contiguous().view(torch.int32) for each in parts]
        if [each.shape[1] for each in words] != self.sizes:
            raise RuntimeError(f"token trees: drafts of {[each.shape[1] for each in words]} words, not {self.sizes}")
        return torch.cat(words, dim=1)

    def unpack(self, words: torch.Tensor) -> Drafted:
        """The drafts in words [requests, words] int32."""
        parts = iter(words.split(self.sizes, dim=1))
        draws = {name: next(parts) for name in WORDS}
        draws["score"] = draws["score"].view(torch.float32)
        # A copy, since numbers of 64 bits may begin at any word.
        draws["path"] = draws["path"].clone(memory_format=torch.contiguous_format).view(torch.int64)
        if not self.laws:
            return Drafted(DeviceDraws(**draws))
        law, laws = next(parts), next(parts).view(torch.float32)
        return Drafted(DeviceDraws(**draws), law.long(), laws.unflatten(1, (self.laws, self.tokens)))


class DraftExchange:
    """Every rank's drafts on every rank, in the order of the SSMs.

    shapes  of each SSM; SSM i drafts on rank i modulo ranks, so that some ranks may have none, or several
    gather  [n] float32 of this rank to those of all ranks, rank after rank
    """

    def __init__(
        self, shapes: Sequence[DraftShape], rank: int, ranks: int, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.shapes, self.rank, self.ranks, self.gather = shapes, rank, ranks, gather
        self.mine = range(rank, len(shapes), ranks)
        sums = [sum(sum(shape.sizes) for shape in shapes[first::ranks]) for first in range(ranks)]
        self.width = max(sums)  # words of a request, as many on every rank

    @classmethod
    def of(cls, ssms: Sequence[DeviceSsm], options: TreeOptions) -> DraftExchange:
        """Over the LLM's tensor-parallel group."""
        group = parallel_state.get_tp_group()
        shapes = [DraftShape.of(ssm, options) for ssm in ssms]
        return cls(shapes, group.rank_in_group, group.world_size, lambda words: group.all_gather(words, dim=0))

    def share(self, drafts: Sequence[Drafted], requests: int, device: torch.device) -> list[Drafted]:
        """Drafted of all SSMs from those of this rank's own, for a batch of `requests`."""
        words = [self.shapes[index].pack(each) for index, each in zip(self.mine, drafts, strict=True)]
        rest = self.width - sum(each.shape[1] for each in words)
        words.append(torch.zeros(requests, rest, dtype=torch.int32, device=device))
        # vLLM's gather through a CPU's shared memory takes floats only; nobody computes with them.
        sent = torch.cat(words, dim=1).flatten().view(torch.float32)
        return self.read(self.gather(sent).view(torch.int32).view(self.ranks, requests, self.width))

    def read(self, words: torch.Tensor) -> list[Drafted]:
        """Drafted of all SSMs from the words [ranks, requests, width] int32 of all ranks."""
        found, first = [], [0] * self.ranks
        for index, shape in enumerate(self.shapes):
            rank, size = index % self.ranks, sum(shape.sizes)
            found.append(shape.unpack(words[rank].narrow(1, first[rank], size)))
            first[rank] += size
        return found

    def reserve(self, requests: int, device: torch.device) -> None:
        """Take the memory of one exchange, freed at once: what memory profiling sees is left for it."""
        torch.empty(self.ranks + 2, requests, self.width, dtype=torch.int32, device=device)
