# SPDX-License-Identifier: Apache-2.0
"""Draft-free proposers and the ensemble: bounds, isolation, determinism, failures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specinfer_vllm.propose.draft_vocab import NarrowHead, read_draft_vocab
from specinfer_vllm.propose.ensemble import Ensemble
from specinfer_vllm.propose.ngram import NgramProposer
from specinfer_vllm.propose.proposer import DraftBatch, Observation, Proposer
from specinfer_vllm.propose.recycling import RecyclingProposer
from specinfer_vllm.propose.successors import SuccessorRows
from specinfer_vllm.tree.topology import from_arrays, roots

VOCAB = 100


def batch(texts, depth=4, nodes=8, slots=None) -> DraftBatch:
    history = np.zeros((len(texts), 64), np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    count = len(texts)
    return DraftBatch(
        slots=np.arange(count) if slots is None else np.array(slots),
        history=history,
        rows=np.arange(count),
        lengths=np.array([len(text) for text in texts], np.int64),
        max_depth=np.full(count, depth, np.int32),
        max_nodes=np.full(count, nodes, np.int32),
    )


def saw(slot: int, token: int, successors: list[int]) -> Observation:
    best = np.zeros((1, 8), np.int32)
    best[0, : len(successors)] = successors
    chances = np.zeros((1, 8), np.float32)
    chances[0, : len(successors)] = 0.9 / len(successors)
    return Observation(np.array([slot]), np.array([token], np.int32), best, chances)


def recycling(**options) -> RecyclingProposer:
    return RecyclingProposer(vocab_size=VOCAB, num_slots=4, **options)


def first_tokens(trees, request=0) -> set[int]:
    start = trees.offsets[request]
    return {int(trees.tokens[start + node]) for node in trees.children(request, 0)}


def test_the_matcher_proposes_what_followed_the_same_words():
    trees = NgramProposer(VOCAB).propose(batch([[1, 2, 3, 4, 5, 9, 1, 2, 3]]))
    trees.validate()
    path = trees.path(0, int(np.flatnonzero(trees.depth == trees.depth.max())[0]))
    assert [int(trees.tokens[node]) for node in path][:3] == [4, 5, 9]


@pytest.mark.parametrize("make", [lambda: NgramProposer(VOCAB), recycling], ids=["ngram", "recycling"])
def test_limits_and_empty_inputs_hold(make):
    text = [7, 8] * 30
    for depth, nodes in ((0, 8), (4, 0), (1, 3), (4, 2)):
        trees = make().propose(batch([text, [5]], depth, nodes))
        trees.validate()
        assert trees.max_depth <= depth and (trees.num_nodes <= nodes).all()
        assert trees.num_nodes[1] == 0
    assert make().propose(batch([])).num_requests == 0
    full = make().propose(batch([[1, 2] * 32]))
    assert full.num_requests == 1


def test_tokens_outside_the_vocabulary_are_never_proposed():
    text = [1, VOCAB + 5, 1, VOCAB + 5, 1]
    assert VOCAB + 5 not in NgramProposer(VOCAB).propose(batch([text])).tokens[1:]
    proposer = recycling()
    proposer.observe(saw(0, 1, [VOCAB, 3]))
    assert (proposer.propose(batch([[1]])).tokens < VOCAB).all()


def test_recycled_successors_come_back_and_no_other_request_sees_them():
    proposer = recycling()
    proposer.start(0)
    proposer.start(1)
    proposer.observe(saw(0, 7, [42]))
    trees = proposer.propose(batch([[7], [7]]))
    assert first_tokens(trees, 0) == {42} and first_tokens(trees, 1) == set()
    proposer.finish(0)
    proposer.start(0)
    assert first_tokens(proposer.propose(batch([[7]]))) == set()


def test_a_shared_table_serves_all():
    proposer = recycling(shared=True)
    proposer.observe(saw(0, 7, [42]))
    assert first_tokens(proposer.propose(batch([[3, 7]], slots=[1]))) == {42}


def test_memory_is_bounded():
    proposer = RecyclingProposer(vocab_size=49152, num_slots=8)
    for i in range(300):
        count = 256
        tokens = np.arange(count, dtype=np.int32) * 7 % 49152 + i
        best = np.tile(np.arange(8, dtype=np.int32), (count, 1))
        proposer.observe(Observation(np.full(count, i % 8), tokens, best, np.full((count, 8), 0.1, np.float32)))
    assert proposer.num_bytes <= 0.01 * 538e6


class Fixed(Proposer):
    """Proposes one chain, or raises."""

    def __init__(self, name, tokens, fails=(), score=-0.1):
        self.name, self.tokens, self.fails, self.score = name, tokens, fails, score

    def propose(self, batch):
        if "propose" in self.fails:
            raise RuntimeError("out of luck")
        count = len(self.tokens)
        if batch.num_requests != 1:
            return roots(batch.root_tokens())
        return from_arrays(
            offsets=np.array([0, count + 1]),
            tokens=np.array([batch.root_tokens()[0], *self.tokens]),
            parent=np.arange(-1, count),
            score=(np.arange(count + 1) * self.score).astype(np.float32),
        )

    def finish(self, slot):
        if "finish" in self.fails:
            raise RuntimeError("cannot forget")


def test_a_proposer_that_raises_costs_its_trees_only():
    ensemble = Ensemble([Fixed("bad", [1], fails=("propose",)), Fixed("good", [2, 3])])
    for _ in range(3):
        assert ensemble.propose(batch([[9]])).tokens[1:].tolist() == [2, 3]
    assert ensemble.take_failures() == {"bad": 3} and not ensemble.take_failures()


def test_with_several_ranks_a_proposer_must_not_fail_alone():
    ensemble = Ensemble([Fixed("bad", [1], fails=("propose",)), Fixed("good", [2, 3])], may_fail=False)
    with pytest.raises(RuntimeError):
        ensemble.propose(batch([[9]]))


def test_a_proposer_that_cannot_forget_is_retired():
    ensemble = Ensemble([Fixed("bad", [1], fails=("finish",)), Fixed("good", [2])])
    ensemble.finish(0)
    assert ensemble.propose(batch([[9]])).tokens[1:].tolist() == [2]


def test_owners_budgets_and_shapes():
    two = [Fixed("a", [1, 2]), Fixed("b", [1, 3, 4])]
    merged = Ensemble(two).propose(batch([[9]]))
    assert merged.num_nodes[0] == 4
    assert sorted(merged.draw_owner[merged.draw_node == 1].tolist()) == [0, 1]
    assert Ensemble(two, batch_nodes=2).propose(batch([[9]])).num_nodes[0] == 2
    chain = Ensemble(two, branches=1).propose(batch([[9]]))
    assert chain.num_nodes[0] == chain.max_depth
    assert Ensemble(two, merge="first").propose(batch([[9]])).tokens[1:].tolist() == [1, 2]
    assert Ensemble([Fixed("a", [1], score=-5.0)], row_cost=0.1).propose(batch([[9]])).num_nodes[0] == 0


def test_those_whose_drafts_cost_time_are_told_what_the_others_have():
    told = {}

    class Costly(Fixed):
        last = True

        def propose(self, batch):
            told[self.name] = batch.covered
            return super().propose(batch)

    ensemble = Ensemble([Costly("a", [5]), Fixed("free", [1, 2], score=-1.0), Costly("b", [6])])
    trees = ensemble.propose(replace(batch([[9]]), max_depth=np.full(1, 4, np.int32)))
    np.testing.assert_allclose(told["a"], [[np.exp(-1), np.exp(-2), 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(told["b"], [[np.exp(-0.1), np.exp(-2), 0, 0]], rtol=1e-6)  # the best at each depth
    assert set(trees.draw_owner.tolist()) == {0, 1, 2}
    assert trees.tokens[trees.draw_row[trees.draw_owner == 0]].tolist() == [5]


@pytest.mark.parametrize("option", [{"merge": "none"}, {"batch_nodes": -1}, {"row_cost": 2}])
def test_bad_options_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Ensemble([], **option)


def test_the_same_requests_give_the_same_trees():
    def run():
        proposer, trees = recycling(), []
        for token in (3, 5, 3, 5, 7):
            proposer.observe(saw(0, token, [token + 1, token + 2]))
            trees.append(proposer.propose(batch([[3, 5, token]])).tokens.tolist())
        return trees

    assert run() == run()


@pytest.mark.parametrize(
    "content",
    [
        b"no array",
        np.array([3, 2]),
        np.array([1, 1]),
        np.array([-1, 2]),
        np.array([1, 99]),
        np.array([0.5]),
        np.array([]),
    ],
    ids="damaged falling twice negative too-large fractions empty".split(),
)
def test_a_draft_vocabulary_that_makes_no_sense_is_refused(tmp_path, content):
    file = tmp_path / "draft_vocab.npy"
    file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content)
    with pytest.raises(ValueError, match="remove the file to use its whole head"):
        read_draft_vocab(str(tmp_path), None, 99)


def test_an_ssm_without_a_draft_vocabulary_has_its_whole_head(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_draft_vocab(str(tmp_path), None, 99) is None


def test_a_narrow_head_gives_the_models_own_logits_of_its_tokens():
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(8, 20, bias=False)
    model.logits_processor = SimpleNamespace(scale=0.5, soft_cap=3.0)
    states = torch.randn(4, 8)
    whole = torch.tanh(model.lm_head(states) / 3.0) * 3.0 * 0.5
    head = NarrowHead.of(model, np.array([2, 3, 11]))
    torch.testing.assert_close(head.logits(states), whole[:, [2, 3, 11]])
    with pytest.raises(ValueError, match="remove draft_vocab.npy"):
        NarrowHead.of(torch.nn.Module(), np.array([1]))


def test_a_primer_lies_under_the_name_that_was_given(tmp_path):
    """numpy would have added .npz; and what was there stays until the new one is whole."""
    rows = SuccessorRows(4, 2, VOCAB)
    rows.save(tmp_path / "mine")
    rows.save(tmp_path / "mine")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    assert SuccessorRows.load(tmp_path / "mine", VOCAB).vocab_size == VOCAB
