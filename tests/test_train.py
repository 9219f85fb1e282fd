# SPDX-License-Identifier: Apache-2.0
"""The SSM workshop on tiny models: cutting, corpora, tuning that can be repeated and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer_vllm import cli
from specinfer_vllm.config import TreeOptions
from specinfer_vllm.propose.draft_vocab import FILE as DRAFT_VOCAB
from specinfer_vllm.train import tune as tuning
from specinfer_vllm.train.corpus import Corpus, CorpusWriter, frequent_tokens, part_files
from specinfer_vllm.train.cost import Cost, points
from specinfer_vllm.train.cut import cut
from specinfer_vllm.train.generate import read_prompts
from specinfer_vllm.train.inputs import InputError
from specinfer_vllm.train.pack import assemble, pack
from specinfer_vllm.train.profile import Profile
from specinfer_vllm.train.tune import Acceptance, Run, Settings, Student, batches, boost_tune, divergence, split, tune

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, WIDTH = 96, 4
QUICK = Settings(epochs=2, batch_tokens=256, learning_rate=3e-3, held_out=0.2, checkpoint=3, patience=9)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A folder with four random layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("llm")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def corpus_of(seed: int, sequences: int = 60, rule=lambda token: (3 * token + 1) % VOCAB) -> Corpus:
    """Answers in which every token follows from the one before it, with some doubt."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(sequences):
        first, count = int(rng.integers(1, 5)), int(rng.integers(3, 20))
        tokens = rng.integers(0, VOCAB, first).tolist()
        for _ in range(count):
            tokens.append(rule(tokens[-1]))
        best = np.array([[token, *((token + np.arange(1, WIDTH)) % VOCAB)] for token in tokens[first:]])
        made.append((tokens, first, 0.0, best, np.tile(np.log([0.7, 0.1, 0.1, 0.05]), (count, 1))))
    return Corpus.of(made, WIDTH)


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(1)


@pytest.fixture(scope="module")
def ssm(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "ssm"
    cut(llm, [0, 3], folder)
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


# -- cutting -----------------------------------------------------------------------------------------------------------


def test_a_cut_model_has_the_layers_named(llm, tmp_path):
    from transformers import AutoModelForCausalLM

    cut(llm, [3, 1, 1], tmp_path / "ssm", np.array([2, 5, 9]))
    small, large = weights(tmp_path / "ssm"), weights(llm)
    for place, layer in enumerate([3, 1, 1]):
        name = "layers.{}.mlp.up_proj.weight"
        assert torch.equal(small["model." + name.format(place)], large["model." + name.format(layer)])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ssm").config.num_hidden_layers == 3
    assert np.load(tmp_path / "ssm" / DRAFT_VOCAB).tolist() == [2, 5, 9]


def test_too_little_disk_is_said_before_anything_is_written(llm, ssm, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="GB of disk"):
        cut(llm, [0], tmp_path / "a")
    with pytest.raises(InputError, match="GB of disk"):
        tune(corpus, ssm, tmp_path / "b", QUICK)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_by_a_cut(llm, tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ValueError, match="holds files already"):
        cut(llm, [0], tmp_path)
    with pytest.raises(ValueError, match="layers 0..3"):
        cut(llm, [4], tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_the_command_cuts_and_narrows(llm, tmp_path, capsys):
    corpus = corpus_of(3, 100, rule=lambda token: (token + 1) % VOCAB)
    CorpusWriter(tmp_path / "corpus", {"seed": 0}).write(0, corpus)
    command = ["cut", str(llm), "-o", str(tmp_path / "ssm"), "--layers", "0"]
    assert cli.main([*command, "--vocab", "64", "--corpus", str(tmp_path / "corpus")]) == 0
    assert np.load(tmp_path / "ssm" / DRAFT_VOCAB).tolist() == frequent_tokens(corpus, 64).tolist()
    assert cli.main(command) == 2 and "holds files already" in capsys.readouterr().err
    assert cli.main([*command[:3], str(tmp_path / "b"), "--vocab", "64"]) == 2
    assert cli.main(["cut", str(tmp_path / "nothing"), "-o", str(tmp_path / "c")]) == 2


# -- corpora -----------------------------------------------------------------------------------------------------------


def test_a_corpus_is_read_as_it_was_written(tmp_path):
    parts = [corpus_of(seed, 5) for seed in range(3)]
    writer = CorpusWriter(tmp_path / "c", {"seed": 0})
    for number in (0, 2):
        writer.write(number, parts[number])
    again = CorpusWriter(tmp_path / "c", {"seed": 0})
    assert again.missing(4) == [1, 3]
    again.write(1, parts[1])
    read, joined = Corpus.load(tmp_path / "c"), Corpus.joined(parts)
    for name in ("offsets", "tokens", "first", "best", "logprob"):
        assert np.array_equal(getattr(read, name), getattr(joined, name))


def test_a_corpus_of_another_recipe_is_left_alone(tmp_path):
    CorpusWriter(tmp_path / "c", {"seed": 0, "model": "a"})
    with pytest.raises(InputError, match="another model, seed"):
        CorpusWriter(tmp_path / "c", {"seed": 1, "model": "b"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("keep")
    with pytest.raises(InputError, match="holds files already"):
        CorpusWriter(tmp_path / "full", {})


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"x" * 40])
def test_a_damaged_part_is_named(tmp_path, damage):
    CorpusWriter(tmp_path, {}).write(0, corpus_of(0, 4))
    (file,) = part_files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=f"{file.name}: damaged"):
        Corpus.load(tmp_path)


def test_an_empty_folder_is_no_corpus(tmp_path):
    with pytest.raises(InputError, match="specinfer generate"):
        Corpus.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "\n \n", "is empty"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2: is no JSON"),
        ("a.jsonl", '"x"\n\n{"question": "x"}', "line 3: must be"),
        (None, "", "no such file"),
    ],
)
def test_a_malformed_prompt_file_is_named(tmp_path, name, text, said):
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said):
        read_prompts(tmp_path / (name or "missing"))


def test_prompts_are_read_from_text_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    (tmp_path / "a.jsonl").write_text('"one"\n{"prompt": "two"}\n{"text": "three\\nlines"}\n')
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]
    assert read_prompts(tmp_path / "a.jsonl") == ["one", "two", "three\nlines"]


# -- tuning ------------------------------------------------------------------------------------------------------------


def test_places_stand_in_front_of_the_tokens_whose_law_they_give(corpus):
    for batch in batches(corpus, np.arange(corpus.num_sequences), 200):
        tokens = batch.tokens.flatten()[batch.at].numpy()
        assert np.array_equal((3 * tokens + 1) % VOCAB, corpus.best[batch.rows, 0])


def test_the_divergence_is_least_where_the_laws_are_equal(ssm, corpus):
    student, rows = Student(ssm), np.arange(6)
    logits = torch.full((6, VOCAB), -30.0)
    best = torch.from_numpy(corpus.best[rows].astype(np.int64))
    logits.scatter_(1, best, torch.from_numpy(corpus.logprob[rows]))
    own = divergence(logits, student, corpus, rows, 1.0)
    assert own < divergence(logits * 1.1, student, corpus, rows, 1.0)
    assert own < divergence(logits * 0.9, student, corpus, rows, 1.0)
    assert divergence(logits, student, corpus, rows, 0.5) < divergence(logits * 1.1, student, corpus, rows, 0.5)


def test_tuning_raises_what_is_held_out(ssm, corpus, tmp_path):
    _, history = tune(corpus, ssm, tmp_path / "tuned", Settings(**{**vars(QUICK), "epochs": 12}))
    assert history[-1].rates[0] > history[0].rates[0] + 0.3
    assert history[-1].rates == sorted(history[-1].rates)
    before, after = weights(ssm), weights(tmp_path / "tuned")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"model.embed_tokens.weight"}
    report = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert report["history"][-1]["rates"] == history[-1].rates
    with pytest.raises(InputError, match="holds files already"):
        tune(corpus, ssm, tmp_path / "tuned", QUICK)


def test_the_same_seed_gives_the_same_ssm(ssm, corpus, tmp_path):
    for name in ("a", "b"):
        tune(corpus, ssm, tmp_path / name, QUICK)
    tune(corpus, ssm, tmp_path / "c", Settings(**{**vars(QUICK), "seed": 1}))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_stopped_run_goes_on_to_the_same_ssm(ssm, corpus, tmp_path, monkeypatch, stop):
    tune(corpus, ssm, tmp_path / "whole", QUICK)
    original = Run.one

    def stops(self, batch, learnable, bar):
        if self.step == stop:
            raise KeyboardInterrupt
        original(self, batch, learnable, bar)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "one", stops)
        with pytest.raises(KeyboardInterrupt):
            tune(corpus, ssm, tmp_path / "stopped", QUICK)
    assert not (tmp_path / "stopped").exists()
    if stop > QUICK.checkpoint:
        with pytest.raises(InputError, match="other settings"):
            tune(corpus, ssm, tmp_path / "stopped", Settings(**{**vars(QUICK), "epochs": 3}))
    _, history = tune(corpus, ssm, tmp_path / "stopped", QUICK)
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert len(history) == QUICK.epochs + 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["stopped", "whole"]


def test_the_second_ssm_learns_where_the_first_one_misses(ssm, tmp_path, monkeypatch):
    corpus = corpus_of(2, 40)
    seen, original = [], tuning.tune

    def noted(corpus, ssm, out, settings, wanted=None):
        seen.append(wanted.copy())
        return original(corpus, ssm, out, settings, wanted)

    monkeypatch.setattr(tuning, "tune", noted)
    settings = Settings(**{**vars(QUICK), "epochs": 8})
    boost_tune(corpus, [ssm, ssm], [tmp_path / "a", tmp_path / "b"], settings)
    first, second = seen
    assert first.all() and 0 < second.sum() < len(second)
    student = Student(tmp_path / "a")
    every = batches(corpus, np.arange(corpus.num_sequences), 256)
    _, agreed = tuning.acceptance(student, corpus, every)
    assert set(np.flatnonzero(~second)) == set(agreed)


def test_a_boost_that_was_stopped_goes_on_with_the_ssm_it_was_at(ssm, corpus, tmp_path, monkeypatch):
    whole, stopped = ([tmp_path / f"{name}{i}" for i in range(2)] for name in ("whole", "stopped"))
    boost_tune(corpus, [ssm, ssm], whole, QUICK)
    original = Run.one

    def stops(self, batch, learnable, bar):
        if self.out.name == "stopped1" and self.step == 4:
            raise KeyboardInterrupt
        original(self, batch, learnable, bar)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "one", stops)
        with pytest.raises(KeyboardInterrupt):
            boost_tune(corpus, [ssm, ssm], stopped, QUICK)
    before = (stopped[0] / "model.safetensors").stat().st_mtime_ns
    boost_tune(corpus, [ssm, ssm], stopped, QUICK)
    assert (stopped[0] / "model.safetensors").stat().st_mtime_ns == before
    for one, other in zip(whole, stopped, strict=True):
        assert all(torch.equal(weights(one)[name], weights(other)[name]) for name in weights(one))
    with pytest.raises(InputError, match="holds files already"):
        boost_tune(corpus_of(7), [ssm], stopped[:1], QUICK)


def test_a_checkpoint_survives_being_replaced(ssm, corpus, tmp_path, monkeypatch):
    """Stopped after the old one was taken away, before the new one had its name."""
    original = Path.rename

    def stops(self, target):
        if self.name.endswith(f".{tuning.DRAFT}"):
            raise KeyboardInterrupt
        return original(self, target)

    tune(corpus, ssm, tmp_path / "whole", QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stops)
        with pytest.raises(KeyboardInterrupt):
            tune(corpus, ssm, tmp_path / "stopped", QUICK)
    steps, one = [], Run.one
    monkeypatch.setattr(Run, "one", lambda self, *rest: (steps.append(self.step), one(self, *rest)))
    tune(corpus, ssm, tmp_path / "stopped", QUICK)
    assert steps[0] > 0
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["stopped", "whole"]


def test_tokens_outside_the_draft_vocabulary_count_as_missed(llm, corpus, tmp_path):
    vocab = frequent_tokens(corpus, 20)
    cut(llm, [0], tmp_path / "narrow", vocab)
    student = Student(tmp_path / "narrow")
    every = batches(corpus, np.arange(corpus.num_sequences), 256)
    reached, _ = tuning.acceptance(student, corpus, every)
    assert reached.places == corpus.num_answers
    assert reached.hits[-1] <= np.isin(corpus.best[:, 0], vocab).sum()


def test_held_out_sequences_are_never_learnt_from(corpus):
    learning, held = split(corpus, 0.1, 0)
    assert len(held) == 6 and not set(learning) & set(held)
    with pytest.raises(InputError, match="single sequence"):
        split(corpus_of(0, 1), 0.1, 0)


def test_the_command_tunes(ssm, corpus, tmp_path, capsys):
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus)
    command = ["tune", str(tmp_path / "corpus"), str(ssm), "-o", str(tmp_path / "out"), "--epochs", "1"]
    assert cli.main(command) == 0
    assert "top-1" in capsys.readouterr().out
    assert cli.main([*command, "--temperatures", "0"]) == 2
    assert cli.main(["tune", str(tmp_path), str(ssm), "-o", str(tmp_path / "x")]) == 2
    assert cli.main(["tune", str(tmp_path / "corpus"), str(ssm), "-o", "a", "b"]) == 2


def test_rates_are_shares_of_all_places():
    reached = Acceptance(np.array([1, 2, 3, 3, 4]), 8)
    assert reached.rates == [0.125, 0.25, 0.375, 0.375, 0.5]
    assert "top-1 0.125" in str(reached)


# -- profile and shape -------------------------------------------------------------------------------------------------


def test_a_profile_counts_as_the_held_out_acceptance_does(ssm, corpus, tmp_path, capsys):
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus)
    for name, epochs in (("a", 8), ("b", 1)):
        tune(corpus, ssm, tmp_path / name, Settings(**{**vars(QUICK), "epochs": epochs}))
    out = tmp_path / "profile.json"
    command = ["profile", str(tmp_path / "corpus"), str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(out)]
    assert cli.main(command) == 0
    said, written = capsys.readouterr().out, json.loads(out.read_text())
    every = batches(corpus, np.arange(corpus.num_sequences), 256)
    greedy = written["acceptance"][0]
    assert greedy["temperature"] == 0 and greedy["places"] == corpus.num_answers
    for name, found in zip("ab", greedy["ssms"], strict=True):
        reached, _ = tuning.acceptance(Student(tmp_path / name), corpus, every)
        assert found["by_rank"][: tuning.RANKS] == pytest.approx(reached.rates)
        assert f"{reached.rates[0]:.3f}" in said
    assert greedy["merged_by_rank"][0] >= max(found["by_rank"][0] for found in greedy["ssms"])
    assert (tmp_path / "profile.png").is_file()

    shape = tmp_path / "shape.json"
    assert cli.main(["shape", str(out), "-o", str(shape), "--nodes", "6", "--depth", "3"]) == 0
    options = TreeOptions.from_value(str(shape))
    assert options.ssms[0].model == str(tmp_path / "a") and 0 < len(options.ssms[0].tree) <= 6
    assert cli.main(["shape", str(out), "-o", str(shape) + "9", "--row-cost", "9"]) == 2
    assert cli.main(["shape", str(tmp_path / "missing.json")]) == 2
    assert cli.main([*command[:-1], str(tmp_path / "profile.txt")]) == 2


def test_depths_are_conditional_on_the_path_above():
    found = Profile(("a",), ("",), np.array([[0, 0, 3, 0, 0, 0, 9, 0]]), np.array([0, 8]), np.zeros(1))
    accepted = found.ranks(0).accepted([1] * 8)
    assert accepted.tolist() == [2, 1, 0, 3, 2, 1, 0, 0]  # the last place emits nothing behind it
    assert found.by_depth(0, 1)[:3] == pytest.approx([5 / 7, 3 / 5, 1 / 3])  # nothing is tried behind the text


def test_sampled_texts_are_counted_by_what_was_drawn(ssm, tmp_path, capsys):
    tokens, best = [5, 16, 49, 7, 9], [[49, 7], [7, 9], [9, 7]]
    drawn = [(tokens, 2, temperature, np.array(best), np.log([[0.6, 0.4]] * 3)) for temperature in (0.0, 0.7, 0.7)]
    other = ([5, 16, 7, 9, 7], *drawn[1][1:])  # the same laws, but the second likeliest drawn each time
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus := Corpus.of([drawn[0], other, drawn[2]], 2))
    assert corpus.answers.tolist() == [49, 7, 9, 7, 9, 7, 49, 7, 9]
    out = tmp_path / "p.json"
    assert cli.main(["profile", str(tmp_path / "corpus"), str(ssm), "-o", str(out)]) == 0
    found = Profile.load(out)
    assert found.temperatures == [0.0, 0.7] and found.at(0.7).rank.shape == (1, 6)
    assert (found.at(0.7).rank[0, 3:] == found.at(0).rank[0]).all()
    assert "temperature 0.7: 2 texts, 6 places" in capsys.readouterr().out
    assert "has texts at 0, 0.7" in said(capsys, "shape", out, "--temperature", "1", "-o", tmp_path / "s.json")


COSTS = {
    "llm": "LLM",
    "ssms": ["a", "b"],
    "machine": "",
    "batches": [
        {"batch": 1, "nodes": [0, 4, 16], "llm": [1.0, 1.1, 1.4], "level": [0.02, 0.02]},
        {"batch": 8, "nodes": [0, 4, 16], "llm": [1.0, 9.0, 90.0], "level": [0.02, 0.02]},
    ],
}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """(profile, costs) of two SSMs that know different halves of the texts."""
    monkeypatch.chdir("/")
    rank = np.repeat([[0, 16], [16, 0]], 40, axis=1)  # 16 = not among those that are told apart
    Profile(("/a", "/b"), ("", ""), rank, np.array([0, 40, 80]), np.zeros(2)).save(tmp_path / "p.json")
    (tmp_path / "c.json").write_text(json.dumps(COSTS))
    return tmp_path / "p.json", tmp_path / "c.json"


def test_a_shape_weighs_measured_costs(planned, tmp_path, capsys):
    profile, costs = map(str, planned)
    out = tmp_path / "s.json"
    assert cli.main(["shape", profile, "--costs", costs, "-o", str(out)]) == 0
    trees = [ssm.tree for ssm in TreeOptions.from_value(str(out)).ssms]
    assert len(trees) == 2 and all(trees)  # both, since each helps where the other does not
    assert "8, a" not in capsys.readouterr().out
    assert "no tree pays" in said(capsys, "shape", profile, "--costs", costs, "--batch", "8", "-o", tmp_path / "t.json")
    assert "of [1, 8]" in said(capsys, "shape", profile, "--costs", costs, "--batch", "2", "-o", tmp_path / "t.json")


def test_best_first_trees_get_the_measured_costs(planned, tmp_path):
    profile, costs = map(str, planned)
    assert cli.main(["shape", profile, "--costs", costs, "--best-first", "-o", str(tmp_path / "s.json")]) == 0
    options = TreeOptions.from_value(str(tmp_path / "s.json"))
    assert (options.row_cost, options.draft_cost) == (0.025, pytest.approx(0.02 / (1 + 3 * 0.025), abs=1e-4))
    assert len(options.ssms) == 2


@pytest.mark.parametrize("batch", ["1", "8"])
def test_costs_given_as_numbers_come_out_as_they_were(batch, planned, tmp_path):
    command = ["shape", str(planned[0]), "--best-first", "-o", str(tmp_path / "s.json"), "--batch", batch]
    assert cli.main([*command, "--row-cost", "0.03", "--draft-cost", "0.06"]) == 0
    options = TreeOptions.from_value(str(tmp_path / "s.json"))
    assert (options.row_cost, options.draft_cost) == (0.03, 0.06)


def test_shapes_that_could_not_be_served_are_refused(planned, tmp_path, capsys):
    for wrong, message in (
        (["-o", "s.cfg"], "ends in .json"),
        (["--nodes", "1025"], "--nodes: give 1 to 1024"),
        (["--depth", "65"], "--depth: 1 to 64"),
        (["--batch", "-3"], "--batch: give at least 1"),
    ):
        assert message in said(capsys, "shape", planned[0], "-o", tmp_path / "s.json", *wrong)


@pytest.mark.parametrize("damage", ["{}", "[]", "{", '{"llm": 1, "ssms": [], "machine": "", "batches": []}'])
def test_damaged_costs_are_named(damage, planned, tmp_path, capsys):
    planned[1].write_text(damage)
    message = said(capsys, "shape", planned[0], "--costs", planned[1], "-o", tmp_path / "s.json")
    assert "c.json: holds no costs" in message or "c.json: is no JSON" in message


def test_costs_of_other_ssms_and_a_measurement_without_an_llm_are_refused(planned, tmp_path, capsys):
    planned[1].write_text(json.dumps(COSTS | {"ssms": ["a"], "batches": [COSTS["batches"][0] | {"level": [0.1]}]}))
    out = tmp_path / "s.json"
    assert "of ['a'], the profile of ['/a', '/b']" in said(
        capsys, "shape", planned[0], "--costs", planned[1], "-o", out
    )
    assert "--llm: name" in said(capsys, "shape", planned[0], "--measure", tmp_path, "-o", out)
    assert not out.exists()


def test_a_cost_curve_never_falls_and_goes_on_behind_its_end():
    cost = Cost(1, (0, 4, 8), (1.0, 0.9, 1.4), (0.1,))
    assert cost.curve(10).tolist() == pytest.approx([1, 1, 1, 1, 1, 1.1, 1.2, 1.3, 1.4, 1.45, 1.5])
    assert points(20) == [0, 1, 2, 4, 8, 16, 20]


def test_tuning_that_would_not_fit_into_memory_is_refused(ssm, corpus, tmp_path, capsys, monkeypatch):
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    message = said(capsys, "tune", tmp_path / "corpus", ssm, "-o", tmp_path / "out")
    assert "--batch-tokens 4096: needs" in message and not (tmp_path / "out").exists()


# -- wrong input -------------------------------------------------------------------------------------------------------


def said(capsys, *command) -> str:
    """The one line on stderr of a command that must fail."""
    capsys.readouterr()
    assert cli.main(list(map(str, command))) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1]


def test_nothing_that_exists_is_overwritten(llm, ssm, corpus, tmp_path, capsys):
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus)
    mine = tmp_path / "mine.json"
    mine.write_text("keep")
    assert "is there already" in said(capsys, "pack", ssm, "--llm", llm, "-o", mine)
    assert "is there already" in said(capsys, "profile", tmp_path / "corpus", ssm, "-o", mine)
    assert "is there already" in said(capsys, "shape", mine, "-o", mine)
    assert "holds files already" in said(capsys, "tune", tmp_path / "corpus", ssm, "-o", mine)
    assert "there is no folder" in said(capsys, "pack", ssm, "--llm", llm, "-o", tmp_path / "no" / "file")
    assert mine.read_text() == "keep" and (ssm / "model.safetensors").stat().st_size > 1000


def test_what_would_go_wrong_later_is_said_before(llm, ssm, corpus, tmp_path, capsys, monkeypatch):
    """Nothing is tuned, and no engine starts."""
    monkeypatch.setattr(Run, "one", None)
    monkeypatch.setattr("specinfer_vllm.train.generate.serving", None)
    CorpusWriter(tmp_path / "corpus", {}).write(0, corpus)
    out, tuned = tmp_path / "out", ["tune", tmp_path / "corpus"]
    assert "is no folder of a model" in said(capsys, *tuned, ssm, tmp_path / "no", "-o", out, tmp_path / "b")
    assert "names a folder twice" in said(capsys, *tuned, ssm, ssm, "-o", out, out)
    assert "more than 0" in said(capsys, *tuned, ssm, "-o", out, "--temperatures", "nan")
    assert "more than 0" in said(capsys, *tuned, ssm, "-o", out, "--learning-rate", "inf")
    generated = ["generate", llm, "--out", tmp_path / "new"]
    assert "leaves no prompt" in said(capsys, *generated, "--max-model-len", "100")
    assert "0 or more" in said(capsys, *generated, "--temperatures", "nan")
    assert "holds files already" in said(capsys, "generate", llm, "--out", ssm)
    assert not (tmp_path / "new").exists() and not out.exists()


def test_a_corpus_of_another_vocabulary_is_refused(llm, ssm, tmp_path, capsys):
    tokens = [5, VOCAB + 3, 7]
    foreign = Corpus.of([(tokens, 1, 0.0, np.array([[VOCAB + 3], [7]]), np.zeros((2, 1)))] * 3, 1)
    CorpusWriter(tmp_path / "corpus", {}).write(0, foreign)
    assert "the corpus holds token 99" in said(capsys, "tune", tmp_path / "corpus", ssm, "-o", tmp_path / "out")
    assert "the corpus holds token 99" in said(capsys, "profile", tmp_path / "corpus", ssm, "-o", tmp_path / "p.json")
    with pytest.raises(InputError, match="holds token 99"):
        cut(llm, [0], tmp_path / "cut", np.array([1, VOCAB + 3]))


def test_layers_under_another_name_are_refused(llm, tmp_path):
    other = tmp_path / "falcon"
    other.mkdir()
    (other / "config.json").write_text((llm / "config.json").read_text())
    renamed = {name.replace("model.layers", "transformer.h"): weight for name, weight in weights(llm).items()}
    save_file(renamed, other / "model.safetensors")
    with pytest.raises(InputError, match="only layers called"):
        cut(other, [0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut off", None])
def test_a_damaged_profile_is_named(damage, tmp_path, capsys):
    found = Profile(("a",), ("",), np.zeros((1, 8), np.int64), np.array([0, 8]), np.zeros(1))
    found.save(tmp_path / "p.json")
    if damage is None:
        np.savez(tmp_path / "p.npz", rank=np.zeros((1, 5)), offsets=np.array([0, 8]))
    else:
        (tmp_path / "p.npz").write_bytes(damage)
    assert "p.json: is no profile" in said(capsys, "shape", tmp_path / "p.json", "-o", tmp_path / "s.json")


def test_a_sharded_ssm_is_tuned_into_a_folder_that_loads(llm, corpus, tmp_path):
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(llm).save_pretrained(sharded, max_shard_size="20KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    tune(corpus, sharded, tmp_path / "out", QUICK)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    cut(sharded, [1], tmp_path / "one")
    assert len(weights(tmp_path / "one")) == 11


def test_a_kill_in_the_last_write_costs_nothing(ssm, corpus, tmp_path, monkeypatch):
    tune(corpus, ssm, tmp_path / "whole", QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "plot", None)
        with pytest.raises(TypeError):
            tune(corpus, ssm, tmp_path / "stopped", QUICK)
    assert not (tmp_path / "stopped").exists()
    boost_tune(corpus, [ssm], [tmp_path / "stopped"], QUICK)
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["stopped", "whole"]


# -- packed SSMs -------------------------------------------------------------------------------------------------------


def test_a_packed_ssm_comes_back_but_for_its_eighth_bit(llm, tmp_path, capsys):
    cut(llm, [0, 3], tmp_path / "ssm", np.arange(0, VOCAB, 3))
    file, out = tmp_path / "ssm.safetensors", tmp_path / "out"
    assert cli.main(["pack", str(tmp_path / "ssm"), "--llm", str(llm), "-o", str(file)]) == 0
    assert cli.main(["assemble", str(file), "--llm", str(llm), "-o", str(out)]) == 0
    before, after = weights(tmp_path / "ssm"), weights(out)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        step = weight.abs().amax(dim=-1, keepdim=True) / 127
        assert ((weight - after[name]).abs() <= step / 2 + 1e-7).all()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert np.load(out / DRAFT_VOCAB).tolist() == list(range(0, VOCAB, 3))
    assert file.stat().st_size < (tmp_path / "ssm" / "model.safetensors").stat().st_size / 2
    assert Student(out).ids.tolist() == list(range(0, VOCAB, 3))
    assert cli.main(["assemble", str(file), "--llm", str(llm), "-o", str(out)]) == 2
    assert "holds files already" in capsys.readouterr().err


def test_a_packed_ssm_of_another_llm_is_refused(llm, ssm, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for each in llm.iterdir():
        (other / each.name).write_bytes(each.read_bytes())
    changed = {name: weight + 1 for name, weight in weights(llm).items()}
    save_file(changed, other / "model.safetensors")
    with pytest.raises(ValueError, match="embed_tokens.weight is not that of"):
        pack(ssm, other, tmp_path / "a")
    pack(ssm, llm, tmp_path / "a")
    with pytest.raises(ValueError, match="other embeddings"):
        assemble(tmp_path / "a", other, tmp_path / "out")
    for content in (b"", (tmp_path / "a").read_bytes()[:-5]):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(ValueError, match="no packed SSM"):
            assemble(tmp_path / "b", llm, tmp_path / "out")
    with pytest.raises(ValueError, match="no packed SSM"):
        assemble(llm / "model.safetensors", llm, tmp_path / "out")
    assert not (tmp_path / "out").exists()
