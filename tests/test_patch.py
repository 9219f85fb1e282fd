# SPDX-License-Identifier: Apache-2.0
import sys
import types
from types import SimpleNamespace

import pytest

from specinfer_vllm.patches.patch import (
    SUPPORTED_VERSIONS,
    Hook,
    HookChanged,
    HookMissing,
    Patch,
    is_version_in,
)


@pytest.fixture
def upstream(monkeypatch) -> types.ModuleType:
    """A module with one function of each kind, as vLLM's could be."""

    class Host:
        def method(self, x):
            return "method", x

        @staticmethod
        def static(x):
            return "static", x

        @classmethod
        def of(cls, x):
            return cls.__name__, x

    module = types.ModuleType("some_upstream")
    module.Host = Host
    module.function = lambda x, y=0: ("function", x)
    module.number = 3
    monkeypatch.setitem(sys.modules, "some_upstream", module)
    return module


def patch_of(name: str, *parameters: str) -> type[Patch]:
    class Shouting(Patch):
        target = Hook("some_upstream", name, parameters, "tests shout")

        @staticmethod
        def replacement(original, *args, **kwargs):
            kind, x = original(*args, **kwargs)
            return kind.upper(), x

    return Shouting


def call(module, name: str):
    host = module.Host()
    return {"function": module.function, "Host.method": host.method, "Host.static": host.static, "Host.of": host.of}[
        name
    ](1)


@pytest.mark.parametrize(
    "name, parameters, plain",
    [
        ("function", ("x",), "function"),
        ("Host.method", ("self", "x"), "method"),
        ("Host.static", ("x",), "static"),
        ("Host.of", ("cls", "x"), "Host"),
    ],
)
def test_a_patch_wraps_the_original_and_gives_it_back(upstream, name, parameters, plain):
    patch = patch_of(name, *parameters)
    owner, last = patch.owner()
    before = vars(owner)[last]
    patch.apply()
    assert patch.is_applied() and patch.kept[0] is before
    assert call(upstream, name) == (plain.upper(), 1)
    patch.revert()
    assert vars(owner)[last] is before
    assert not patch.is_applied() and call(upstream, name) == (plain, 1)


def test_a_second_apply_is_refused_and_changes_nothing(upstream):
    patch = patch_of("function")
    patch.apply()
    applied = upstream.function
    with pytest.raises(RuntimeError, match="Shouting is applied to some_upstream.function already"):
        patch.apply()
    assert upstream.function is applied


def test_a_second_copy_of_the_package_does_not_patch_again(upstream):
    patch_of("Host.method").apply()
    with pytest.raises(RuntimeError, match="already, by .*test_patch"):
        patch_of("Host.method").apply()
    assert call(upstream, "Host.method") == ("METHOD", 1)


def test_a_patch_can_be_applied_again_after_it_was_reverted(upstream):
    patch = patch_of("function")
    patch.apply()
    patch.revert()
    patch.revert()
    patch.apply()
    assert call(upstream, "function") == ("FUNCTION", 1)


def test_reverting_never_drops_what_someone_else_put_on_top(upstream):
    patch = patch_of("function")
    patch.apply()
    upstream.function = lambda x: ("theirs", x)
    with pytest.raises(RuntimeError, match="replaced by someone else"):
        patch.revert()
    assert call(upstream, "function") == ("theirs", 1)


def test_a_patched_function_still_looks_like_the_original(upstream):
    patch = patch_of("Host.method", "self", "x")
    patch.apply()
    assert upstream.Host.method.__name__ == "method"
    patch.target.check()


@pytest.mark.parametrize("name", ["gone", "Host.gone", "Gone.method"])
def test_a_missing_target_is_named(upstream, name):
    with pytest.raises(HookMissing, match=f"^some_upstream.{name}: not found"):
        patch_of(name).apply()


def test_what_is_only_declared_is_missing(upstream):
    upstream.Host.method.__isabstractmethod__ = True  # an interface may outlive its implementation
    with pytest.raises(HookMissing, match="^some_upstream.Host.method: not found"):
        Hook("some_upstream", "Host.method").check()


def test_a_missing_module_is_named():
    with pytest.raises(HookMissing, match="^some_upstream.of.old: not found"):
        Hook("some_upstream.of", "old").check()


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("function", ("y",)),
        ("function", ("y", "x")),
        ("function", ("x", "y", "z")),
        ("Host.method", ("self",)),  # x has become required
        ("number", ("x",)),
    ],
)
def test_a_changed_signature_is_detected_before_anything_is_changed(upstream, name, parameters):
    before = dict(vars(upstream)), dict(vars(upstream.Host))
    with pytest.raises(HookChanged, match=f"^some_upstream.{name}: "):
        patch_of(name, *parameters).apply()
    assert (dict(vars(upstream)), dict(vars(upstream.Host))) == before


@pytest.mark.parametrize("parameters", [(), ("x",), ("x", "y"), ("x", "*"), ("*",)])
def test_further_parameters_may_be_optional_or_passed_on_unread(upstream, parameters):
    Hook("some_upstream", "function", parameters).check()


def test_required_parameters_may_follow_where_they_are_passed_on_unread(upstream):
    Hook("some_upstream", "Host.method", ("self", "*")).check()


def test_a_hook_read_in_fewer_releases_is_refused_in_the_others(upstream, monkeypatch):
    vllm = pytest.importorskip("vllm")
    hook = Hook("some_upstream", "function", versions=">=0.32,<0.33")
    monkeypatch.setattr(vllm, "__version__", "0.32.1")
    hook.check()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(HookChanged, match="read in vLLM >=0.32,<0.33 only, and this is 0.33.0"):
        hook.check()


@pytest.mark.parametrize(
    "version, known",
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc1", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("0.34.0.dev7+g123", False),
        ("dev", False),
        ("", False),
    ],
)
def test_versions_are_told_apart(version, known):
    assert is_version_in(version, SUPPORTED_VERSIONS) is known


# -- the tensor-parallel group -----------------------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch):
    """vLLM's groups of two ranks and one stage, as names."""
    state = pytest.importorskip("vllm.distributed.parallel_state")
    monkeypatch.setattr(state, "_TP", SimpleNamespace(world_size=2, rank_in_group=1))
    monkeypatch.setattr(state, "_PP", SimpleNamespace(world_size=1, rank_in_group=0))
    return state


def test_a_rank_is_alone_meanwhile(groups):
    from specinfer_vllm.patches.tensor_parallel import this_rank_alone

    before = groups.get_tp_group()
    with pytest.raises(ZeroDivisionError), this_rank_alone():
        assert groups.get_tensor_model_parallel_world_size() == 1
        assert groups.get_tensor_model_parallel_rank() == 0
        raise ZeroDivisionError
    assert groups.get_tp_group() is before


@pytest.mark.parametrize("change", ["several stages", "another name"])
def test_a_rank_that_would_not_be_alone_is_seen(groups, monkeypatch, change):
    from specinfer_vllm.patches.tensor_parallel import this_rank_alone

    before = groups._TP
    if change == "several stages":
        groups._PP.world_size = 2
    else:
        monkeypatch.setattr(groups, "get_tp_group", lambda: before)
    with pytest.raises(HookChanged, match="get_tp_group: not the group of one rank"), this_rank_alone():
        pass
    assert groups._TP is before


def test_a_model_that_is_not_sharded_has_a_parallel_config_of_its_own():
    pytest.importorskip("vllm")
    from vllm.config import ParallelConfig

    from specinfer_vllm.patches.tensor_parallel import unsharded

    shared = ParallelConfig(tensor_parallel_size=2, rank=1, distributed_executor_backend="mp")
    mine = unsharded(shared)
    assert (mine.tensor_parallel_size, mine.world_size, mine.rank) == (1, 1, 1)
    assert (shared.tensor_parallel_size, shared.world_size) == (2, 2)
