# SPDX-License-Identifier: Apache-2.0
"""What each rank's SSMs drew is the same on all ranks, bit for bit, however SSMs are spread and of whatever shape."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")

from specinfer_vllm.engine.draft_exchange import DraftExchange, DraftShape  # noqa: E402
from specinfer_vllm.propose.device_ssm import Drafted  # noqa: E402
from specinfer_vllm.tree.device import DeviceDraws  # noqa: E402

CPU = torch.device("cpu")


def any_bits(*shape: int, dtype=torch.int32) -> torch.Tensor:
    """Numbers of any bits, such as are no numbers when they travel as floats."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def drafts_of(shape: DraftShape, requests: int) -> Drafted:
    size = requests, shape.draws
    names = ("token", "parent", "depth", "owner")
    score = torch.randn(size).masked_fill(torch.rand(size) < 0.2, -torch.inf)
    draws = DeviceDraws(
        score=score, path=any_bits(*size, dtype=torch.int64), **{name: any_bits(*size) for name in names}
    )
    if not shape.laws:
        return Drafted(draws)
    laws = torch.rand(requests, shape.laws, shape.tokens)
    return Drafted(draws, torch.randint(-1, shape.laws, size), laws)


def shared(shapes: list[DraftShape], drafts: list[Drafted], ranks: int, requests: int) -> list[list[Drafted]]:
    """What each rank ends with."""
    sent: list[torch.Tensor] = []

    def gather(words):
        sent.append(words)
        return words.repeat(ranks)

    exchanges = [DraftExchange(shapes, rank, ranks, gather) for rank in range(ranks)]
    for each in exchanges:
        each.share([drafts[index] for index in each.mine], requests, CPU)
    words = torch.cat(sent).view(torch.int32)
    return [each.read(words.view(ranks, requests, each.width)) for each in exchanges]


def tensors(drafts: Drafted) -> list[torch.Tensor]:
    found = [*(getattr(drafts.draws, name) for name in sorted(vars(drafts.draws))), drafts.law, drafts.laws]
    return [each for each in found if each is not None]


def equal(found: Drafted, made: Drafted) -> bool:
    pairs = list(zip(tensors(found), tensors(made), strict=True))
    return all(mine.dtype == other.dtype and mine.equal(other) for mine, other in pairs)


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_ends_with_the_drafts_of_all(seed):
    torch.manual_seed(seed)
    choice = random.Random(seed)
    ranks, requests = choice.randint(1, 5), choice.randint(1, 4)
    weighed = choice.random() < 0.5
    laws = [(choice.randint(1, 4), choice.randint(2, 9)) if weighed else () for _ in range(choice.randint(1, 8))]
    shapes = [DraftShape(choice.randint(1, 7), *each) for each in laws]
    drafts = [drafts_of(shape, requests) for shape in shapes]
    for found in shared(shapes, drafts, ranks, requests):
        assert len(found) == len(drafts)
        assert all(equal(mine, made) for mine, made in zip(found, drafts, strict=True))


def test_all_ranks_send_as_much_even_one_that_has_no_ssm():
    shapes = [DraftShape(3), DraftShape(5), DraftShape(2)]
    exchanges = [DraftExchange(shapes, rank, 2, lambda words: words.repeat(2)) for rank in range(2)]
    assert [list(each.mine) for each in exchanges] == [[0, 2], [1]]
    assert [each.width for each in exchanges] == [35, 35]  # 7 words a draw, of five draws each
    nobody = DraftExchange(shapes[:1], 1, 2, lambda words: words.repeat(2))
    assert nobody.share([], 3, CPU)[0].draws.token.equal(torch.zeros(3, 3, dtype=torch.int32))


def test_drafts_of_another_shape_than_the_options_say_are_refused():
    shape = DraftShape(3, 2, 4)
    drafts = drafts_of(shape, 2)
    for other in (replace(shape, draws=4), replace(shape, laws=3), replace(shape, tokens=5), DraftShape(3 + 3)):
        with pytest.raises(RuntimeError, match=r"drafts of \[.*\] words, not \["):
            other.pack(drafts)


def test_a_rank_that_hears_itself_alone_is_seen():
    shape = DraftShape(3, 2, 4)
    drafts = [drafts_of(shape, 2), drafts_of(shape, 2)]
    alone = DraftExchange([shape, shape], 0, 2, lambda words: words.repeat(2))
    found = alone.share(drafts[:1], 2, CPU)
    assert [equal(mine, made) for mine, made in zip(found, drafts, strict=True)] == [True, False]
