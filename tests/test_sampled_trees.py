# SPDX-License-Identifier: Apache-2.0
"""From the SSM's draws through merging and pruning to the walk: the LLM's law comes out, at a size that shows errors.

SSM and LLM are tables over a vocabulary of 6: the next token's law depends on the last token. Thousands of requests
draft and verify side by side, and the first two tokens they emit are compared with the LLM's law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("vllm")

from specinfer_vllm.engine.step import DraftedTrees  # noqa: E402
from specinfer_vllm.propose import children as drawing  # noqa: E402
from specinfer_vllm.propose.ensemble import Ensemble  # noqa: E402
from specinfer_vllm.propose.proposer import DraftBatch, DraftSampling, Proposer  # noqa: E402
from specinfer_vllm.propose.ssm import LevelShape, SsmProposer  # noqa: E402
from specinfer_vllm.tree.static import StaticTree  # noqa: E402
from specinfer_vllm.tree.topology import TokenTrees, from_arrays, roots  # noqa: E402
from specinfer_vllm.verify.draws import Draws  # noqa: E402
from specinfer_vllm.verify.rules import RULES  # noqa: E402
from specinfer_vllm.verify.walk import TreeRows  # noqa: E402

VOCAB, REQUESTS, ROOT = 6, 40_000, 2
FALSE_ALARM = 1e-4  # per test, fixed beforehand
SAMPLED = [name for name, rule in RULES.items() if rule.drafting != "any"]


def table(seed: int, sharpness: float) -> torch.Tensor:
    """Logits [vocab, vocab] of the token behind each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness


LLM_LOGITS = table(0, 1.2)
LLM = LLM_LOGITS.softmax(dim=-1)


class Narrow(NamedTuple):
    """Stands for NarrowHead."""

    ids: torch.Tensor
    table: torch.Tensor

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.table[states[:, 0].long()][:, self.ids]


class TableSsm(SsmProposer):
    """An SSM whose hidden state is its last token. ids: its draft vocabulary, None = all tokens.

    shape: an expansion or a StaticTree, None = best-first.
    """

    def __init__(self, index: int, shape=None, width: int = 3, depth: int = 2, ssms: int = 1, row_cost=0.0, ids=None):
        self.index, self.name, self.max_depth, self.num_read = index, f"ssm{index}", depth, 0
        self.device = torch.device("cpu")
        tree = StaticTree.of_expansion(shape) if isinstance(shape, tuple) else shape
        self.static = LevelShape.of_tree(tree, self.device)
        self.options = type("Options", (), {"width": width})
        self.row_cost, self.num_ssms, self.num_slots, self.max_len = row_cost, ssms, 0, 1 << 20
        self.level_cost, self.step = 0.0 if self.static else 0.08, type("Step", (), {"slots": np.arange(REQUESTS)})
        self.num_tokens, self.lost = VOCAB, np.zeros(REQUESTS, bool)
        logits = LLM_LOGITS + table(10 + index, 0.8)
        self.model = type("Model", (), {"compute_logits": staticmethod(lambda states: logits[states[:, 0].long()])})
        self.head = None if ids is None else Narrow(torch.tensor(ids), logits)
        self.llm_config = type(
            "C", (), {"model_config": type("M", (), {"get_vocab_size": staticmethod(lambda: VOCAB)})}
        )

    def catch_up(self) -> torch.Tensor:
        return torch.full((REQUESTS, 1), float(ROOT))

    def read_level(self, token, ancestors, depth, root, requests) -> torch.Tensor:
        self.num_read = token.shape[1] + (self.num_read if depth > 1 else 0)
        assert ancestors.shape == (*token.shape, self.num_read)
        assert (ancestors.sum(dim=2) == depth).all()
        assert (self.read_depths(self.num_read, depth, token.shape[1])[-token.shape[1] :] == depth).all()
        return token[:, :, None].float()


class Fixed(Proposer):
    """A draft-free proposer that always says the same: two tokens and one behind the first."""

    name = "fixed"

    def propose(self, batch: DraftBatch) -> TokenTrees:
        count = batch.num_requests
        score = np.log(np.array([1.0, 0.5, 0.4, 0.3], np.float32))
        return from_arrays(
            offsets=np.arange(count + 1) * 4,
            tokens=np.tile([ROOT, 0, 1, 3], count),
            parent=np.tile([-1, 0, 1, 0], count),
            score=np.tile(score, count),
        )


UNEVEN = StaticTree.of_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)])


def draft_batch(drafting: str, max_nodes: int, seed: int) -> DraftBatch:
    sampling = DraftSampling(
        drafting,
        sampled=np.ones(REQUESTS, bool),
        temperature=np.full(REQUESTS, 0.8, np.float32),
        top_k=np.full(REQUESTS, VOCAB, np.int32),
        top_p=np.full(REQUESTS, 0.8, np.float32),
        seed=np.arange(REQUESTS) + seed * REQUESTS,
    )
    return DraftBatch(
        slots=np.arange(REQUESTS),
        history=np.full((REQUESTS, 1), ROOT, np.int32),
        rows=np.arange(REQUESTS),
        lengths=np.ones(REQUESTS, np.int64),
        max_depth=np.full(REQUESTS, 4, np.int32),
        max_nodes=np.full(REQUESTS, max_nodes, np.int32),
        sampling=sampling,
    )


def p_value(
    rule: str,
    proposers: list[Proposer],
    max_nodes: int = 8,
    row_cost: float = 0.0,
    seed: int = 1,
    cut: Callable[[TokenTrees], TokenTrees] = lambda trees: trees,
) -> float:
    """Chi-square of the first two tokens against the LLM's law. cut: what the scheduler does to the trees."""
    batch = draft_batch(RULES[rule].drafting, max_nodes, seed)
    ensemble = Ensemble(proposers, row_cost=row_cost)
    trees = ensemble.propose(batch)
    assert not ensemble.take_failures()
    trees.validate()
    trees = cut(trees)
    rows = TreeRows.of(trees)
    draws = Draws.of(trees, ensemble.laws, VOCAB)
    assert len(draws.row) > REQUESTS / 20 or cut is cut_by_bound
    law = LLM[torch.where(rows.depth == 0, ROOT, rows.tokens)]
    seeds = torch.from_numpy(batch.sampling.seed)[rows.request]
    accepted = RULES[rule].verify(rows, draws, law, seeds, 1 + rows.depth)
    first = accepted.tokens[:, 0]
    generator = torch.Generator().manual_seed(seed)
    second = LLM[first].multinomial(1, generator=generator).view(-1)
    if accepted.tokens.shape[1] > 1:
        second = torch.where(accepted.num_tokens > 1, accepted.tokens[:, 1], second)
    counts = np.bincount((first * VOCAB + second).numpy(), minlength=VOCAB * VOCAB)
    expected = (LLM[ROOT][:, None] * LLM).flatten().double().numpy()
    assert accepted.num_tokens.double().mean() > 1.2
    return float(stats.chisquare(counts, REQUESTS * expected / expected.sum()).pvalue)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("expansion", [(2, 2), (1, 1, 1), None], ids=["fork", "chain", "best-first"])
def test_the_llms_law_comes_out(rule, expansion):
    assert p_value(rule, [TableSsm(0, expansion, depth=3)]) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["mss", "without_replacement", "traversal"])
def test_the_llms_law_comes_out_of_any_static_tree(rule):
    """A node keeps the first of its level's draws, whichever tokens they are."""
    assert p_value(rule, [TableSsm(0, UNEVEN)], max_nodes=9) > FALSE_ALARM
    assert p_value(rule, [TableSsm(0, UNEVEN, ssms=2), TableSsm(1, (2, 1), ssms=2)], max_nodes=8) > FALSE_ALARM


def unsampled(requests: int) -> DraftBatch:
    batch = draft_batch("iid", 64, seed=1)
    arrays = {name: getattr(batch, name)[:requests] for name in ("slots", "rows", "lengths", "max_depth", "max_nodes")}
    return DraftBatch(**arrays, history=batch.history, sampling=None)


@st.composite
def trees_within(draw) -> StaticTree:
    """Of at most 10 nodes, 4 levels and all tokens as children."""
    nodes = [()]
    for _ in range(draw(st.integers(1, 10))):
        parent = draw(st.sampled_from([node for node in nodes if len(node) < 4]))
        if (rank := sum(node[:-1] == parent for node in nodes[1:])) < VOCAB:
            nodes.append((*parent, rank))
    return StaticTree.of_paths(nodes[1:])


@given(trees_within())
@settings(max_examples=20, deadline=None)
def test_exactly_the_nodes_of_a_static_tree_are_drafted(tree):
    ssm = TableSsm(0, tree)
    trees = ssm.propose(unsampled(2))
    trees.validate()
    assert trees.num_nodes.tolist() == [tree.num_nodes] * 2
    assert ssm.num_read == tree.num_read
    likeliest = ssm.model.compute_logits(torch.arange(VOCAB)[:, None]).argsort(dim=1, descending=True).tolist()
    for request in range(2):
        found = set()
        tokens = trees.tokens[trees.offsets[request] :].tolist()
        for node in range(1, tree.num_nodes + 1):
            path = [ROOT, *(tokens[each] for each in trees.path(request, node))]
            found.add(tuple(likeliest[above].index(token) for above, token in itertools.pairwise(path)))
        assert found == set(tree.paths)


def test_a_static_tree_is_cut_to_the_depth_there_is_room_for():
    batch = replace(unsampled(3), max_depth=np.array([3, 1, 0], np.int32))
    trees = TableSsm(0, UNEVEN).propose(batch)
    assert trees.num_nodes.tolist() == [9, 3, 0]


def test_an_expansion_as_paths_drafts_the_same():
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    batch = draft_batch("without_replacement", 6, seed=2)
    as_paths, drawn = (TableSsm(0, shape).propose(batch) for shape in (StaticTree.of_paths(paths), (2, 2)))
    for name in ("offsets", "tokens", "parent", "score", "draw_node", "draw_law"):
        assert (getattr(as_paths, name) == getattr(drawn, name)).all()


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_draft_vocabulary_leaves_the_law_as_it_is(rule):
    """Laws over some tokens only, beside an SSM that knows all; draws carry the LLM's ids."""
    narrow = TableSsm(0, (2, 1), ssms=2, ids=[0, 2, 3, 5])
    drawn = narrow.propose(draft_batch(RULES[rule].drafting, 8, seed=1))
    assert set(np.unique(drawn.tokens)) <= {0, 2, 3, 5}
    assert (narrow.laws[:, [1, 4]] == 0).all() and narrow.laws.shape[1] == VOCAB
    assert p_value(rule, [narrow, TableSsm(1, (1, 1), ssms=2)]) > FALSE_ALARM


def test_a_law_under_the_wrong_ids_is_caught(monkeypatch):
    """Negative control: the narrow law kept under its own indices instead of the tokens' ids."""
    original = drawing.ChildSampler.laws
    careless = lambda self, vocab: original(replace(self, ids=None), vocab)  # noqa: E731
    monkeypatch.setattr(drawing.ChildSampler, "laws", careless)
    assert p_value("mss", [TableSsm(0, (2, 1), ids=[0, 2, 3, 5])]) < 1e-6


@pytest.mark.parametrize("rule", SAMPLED)
def test_pruned_trees_of_two_ssms_and_a_draft_free_proposer(rule):
    """Shared tokens, a budget that cuts all three, and children that another proposer holds likely."""
    proposers = [TableSsm(i, width=2, ssms=2, row_cost=0.05) for i in (0, 1)] + [Fixed()]
    assert p_value(rule, proposers, max_nodes=6, row_cost=0.05) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["mss", "without_replacement"])
def test_a_score_that_knows_the_token_is_caught(rule, monkeypatch):
    """Negative control: with each draw scored by its own probability the budget keeps likely draws, and biases."""
    original = drawing.ChildSampler._sampled

    def telling(self, children, logits, parent):
        drawn = original(self, children, logits, parent)
        law = (logits / 0.8).softmax(dim=-1)
        return drawing.Children(drawn.token, law.gather(-1, drawn.token.clamp(min=0)).log(), drawn.back, drawn.law)

    monkeypatch.setattr(drawing.ChildSampler, "_sampled", telling)
    assert p_value(rule, [TableSsm(0, depth=3)], max_nodes=3) < FALSE_ALARM


def test_draws_saved_by_another_proposer_are_caught(monkeypatch):
    """Negative control: without protection a draw survives when someone else holds its token likely."""
    from specinfer_vllm.propose import ensemble

    monkeypatch.setattr(ensemble, "_sampled_rows", lambda trees: np.zeros(trees.num_rows, bool))
    assert p_value("without_replacement", [TableSsm(0, depth=2), Fixed()], max_nodes=3) < FALSE_ALARM


def test_laws_stored_before_top_p_are_caught(monkeypatch):
    """Negative control: the rule is told another law than the one the draws come from."""
    original = drawing.ChildSampler._sampled

    def careless(self, children, logits, parent):
        drawn = original(self, children, logits, parent)
        self.kept[-1] = (logits / 0.8).softmax(dim=-1).flatten(0, 1)
        return drawn

    monkeypatch.setattr(drawing.ChildSampler, "_sampled", careless)
    assert p_value("mss", [TableSsm(0, (2, 2))]) < FALSE_ALARM


ROOM = 6  # nodes that the scheduler has room for


def cut_by_bound(trees: TokenTrees) -> TokenTrees:
    drafted = DraftedTrees()
    names = [str(i) for i in range(REQUESTS)]
    drafted.replace(names, trees, None, np.full(REQUESTS, 8))
    return trees.head(ROOM).unsampled(drafted.may_be_cut(names, np.full(REQUESTS, 1 + ROOM)))


def cut_by_size(trees: TokenTrees) -> TokenTrees:
    return trees.unsampled(trees.num_nodes > ROOM).head(ROOM)


def test_trees_that_the_scheduler_cuts():
    """A tree's size depends on what it drew: whether its draws count may rest on the bound alone."""
    arguments = {"max_nodes": 8, "row_cost": 0.05}
    for cut, right in ((cut_by_bound, True), (cut_by_size, False)):
        found = p_value("mss", [TableSsm(0, depth=4, row_cost=0.05)], cut=cut, **arguments)
        assert (found > FALSE_ALARM) == right, cut


def test_room_enough_leaves_the_draws():
    drafted = DraftedTrees()
    drafted.replace(["a", "b"], roots(np.zeros(2, np.int32)), None, np.array([4, 9]))
    assert drafted.may_be_cut(["b", "x", "a"], np.array([9, 1, 5])).tolist() == [True, False, False]


def test_a_request_draws_the_same_alone_and_in_a_batch():
    ssm = TableSsm(0, row_cost=0.05)
    batch = draft_batch("without_replacement", 6, seed=3)
    trees = Ensemble([ssm], row_cost=0.05).propose(batch)
    some = np.array([5, 17, 4000])
    arrays = {name: getattr(batch, name)[some] for name in ("slots", "rows", "lengths", "max_depth", "max_nodes")}
    drawn = {name: getattr(batch.sampling, name)[some] for name in ("sampled", "temperature", "top_k", "top_p", "seed")}
    few = DraftBatch(**arrays, history=batch.history, sampling=DraftSampling("without_replacement", **drawn))
    alone = Ensemble([ssm], row_cost=0.05).propose(few)
    expected = trees.select(some)
    assert alone.tokens.tolist() == expected.tokens.tolist() and alone.parent.tolist() == expected.parent.tolist()
    assert alone.draw_node.tolist() == expected.draw_node.tolist()


def test_a_single_child_of_top_k_plus_one_is_a_plain_draw():
    """Nothing is fixed, so the draw counts like the likeliest token, however sure the SSM is."""
    sampling = draft_batch("top_k_plus_one", 4, seed=6).sampling
    sampler = drawing.ChildSampler.of(sampling, np.arange(3), np.ones(REQUESTS, np.int64), 0)
    logits = torch.tensor([[[0.0, 50.0, 0.0, 0.0, 0.0, 0.0]]]).expand(3, 1, -1)
    drawn = sampler.children(logits, 1, torch.zeros(3, 1, dtype=torch.int64))
    assert drawn.token.tolist() == [[[1]]] * 3 and float(drawn.score.min()) == 0.0
    assert drawn.law.flatten().tolist() == [0, 1, 2]


def test_two_ssms_draw_independently():
    trees = [TableSsm(i, (1,), depth=1).propose(draft_batch("iid", 4, seed=5)) for i in (0, 0)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()  # the same SSM and seed
    other = TableSsm(1, (1,), depth=1)
    other.model = TableSsm(0, (1,)).model
    assert other.propose(draft_batch("iid", 4, seed=5)).tokens.tolist() != trees[0].tokens.tolist()


def test_doubtful_levels_are_left_out_of_greedy_trees_only():
    batch = draft_batch("without_replacement", 40, seed=9)
    ssm = TableSsm(0, depth=4)
    ssm.level_cost = 1.0
    assert ssm.propose(batch).max_depth == 4
    assert ssm.propose(replace(batch, sampling=None)).max_depth < 4
    ssm.level_cost = 0.0
    assert ssm.propose(replace(batch, sampling=None)).max_depth == 4


def test_requests_whose_pass_failed_are_not_drafted_until_they_end():
    ssm, batch = TableSsm(0), replace(draft_batch("any", 8, seed=9), sampling=None)
    ssm.step = type("Step", (), {"slots": np.array([2, -1, 5])})
    ssm.draw = None
    with pytest.raises(TypeError):
        ssm.propose(batch)
    del ssm.draw
    assert np.flatnonzero(ssm.lost).tolist() == np.flatnonzero(ssm.propose(batch).num_nodes == 0).tolist() == [2, 5]
    ssm.finish(2)
    assert np.flatnonzero(ssm.propose(batch).num_nodes == 0).tolist() == [5]
