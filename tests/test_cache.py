# SPDX-License-Identifier: Apache-2.0
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specinfer_vllm.bench import cache


class Builder:
    """Writes one file and counts how often it was asked to."""

    calls = 0

    def __call__(self, draft: Path) -> None:
        self.calls += 1
        (draft / "file").write_text("content")


def test_a_folder_is_built_once(tmp_path: Path):
    build = Builder()
    for _ in range(2):
        assert (cache.built(tmp_path / "it", "recipe", build) / "file").read_text() == "content"
    assert build.calls == 1


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_text("CONTENT"), os.remove, lambda file: file.write_text("")]
)
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage, capsys):
    build = Builder()
    damage(cache.built(tmp_path / "it", "recipe", build) / "file")
    assert (cache.built(tmp_path / "it", "recipe", build) / "file").read_text() == "content"
    assert build.calls == 2 and "building it again" in capsys.readouterr().err


def test_another_recipe_builds_again(tmp_path: Path):
    build = Builder()
    for recipe in ("one", "two"):
        cache.built(tmp_path / "it", recipe, build)
    assert build.calls == 2


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        cache.built(tmp_path / "it", "recipe", lambda draft: 1 // 0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_callers_at_the_same_time_share_one_build(tmp_path: Path):
    build = Builder()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.built(tmp_path / "it", "recipe", build), range(8)))
    assert build.calls == 1


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SPECINFER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "specinfer-vllm"
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "own"))
    assert cache.folder() == tmp_path / "own"
