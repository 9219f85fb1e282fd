# SPDX-License-Identifier: Apache-2.0
"""The best next tokens that proposers learn from are torch.topk's."""

import pytest
import torch

from specinfer_vllm.engine.successors import best_successors, top


@pytest.mark.parametrize("vocab", [9, 64, 1024, 1025, 1087, 49152, 50001])
@pytest.mark.parametrize("count", [1, 8])
def test_the_blocks_hold_the_best(vocab, count):
    generator = torch.Generator().manual_seed(vocab + count)
    values = torch.randn(5, vocab, generator=generator)
    values[1] = torch.arange(vocab)  # all in the last blocks
    values[2] = -torch.arange(vocab)  # all in the first
    values[3, ::2] = float("-inf")  # masked tokens
    indices, best = top(values, count)
    expected = values.topk(count, dim=-1)
    assert torch.equal(best, expected.values) and torch.equal(indices, expected.indices)


@pytest.mark.parametrize("rows", [[3], [0, 1, 2, 3, 4], [4, 2, 2, 0], []])
def test_probabilities_are_those_of_the_whole_row(rows):
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 4
    picked = torch.tensor(rows, dtype=torch.int64)
    tokens, probabilities = best_successors(logits, picked, 8)
    law = logits[picked].softmax(-1)
    torch.testing.assert_close(probabilities, law.topk(8, dim=-1).values)
    torch.testing.assert_close(law.gather(-1, tokens), probabilities)  # two tokens may be equally likely
