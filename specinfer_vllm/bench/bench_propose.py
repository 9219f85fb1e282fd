# SPDX-License-Identifier: Apache-2.0
"""Host time of the draft-free proposers for one request with 4,096 tokens of history; goal 0.2 ms each.

pytest specinfer_vllm/bench/bench_propose.py --benchmark-enable --benchmark-only
"""

import numpy as np
import pytest

from specinfer_vllm.propose.ngram import NgramProposer
from specinfer_vllm.propose.proposer import DraftBatch, Observation
from specinfer_vllm.propose.recycling import RecyclingProposer

VOCAB, LENGTH = 49152, 4096


@pytest.fixture
def batch() -> DraftBatch:
    """Text of a few hundred different words, so that the end matches many places."""
    text = np.random.default_rng(0).zipf(1.3, (1, LENGTH)).clip(max=VOCAB - 1).astype(np.int32)
    one = np.zeros(1, np.int64)
    return DraftBatch(one, text, one, one + LENGTH, np.full(1, 8, np.int32), np.full(1, 8, np.int32))


def test_ngram(benchmark, batch):
    """The matcher."""
    benchmark(NgramProposer(VOCAB).propose, batch)


def test_recycling(benchmark, batch):
    """With a row for every token of the text."""
    proposer = RecyclingProposer(vocab_size=VOCAB, num_slots=8)
    best = np.random.default_rng(1).integers(0, VOCAB, (LENGTH, 8)).astype(np.int32)
    chances = np.tile(0.5 ** np.arange(1, 9), (LENGTH, 1)).astype(np.float32)
    proposer.observe(Observation(np.zeros(LENGTH, np.int64), batch.history[0], best, chances))
    benchmark(proposer.propose, batch)
