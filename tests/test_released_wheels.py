# SPDX-License-Identifier: Apache-2.0
"""The hooks in the sources of released vLLM wheels, which need CUDA to be imported; offline these are skipped."""

import contextlib
import functools
import http.server
import importlib
import inspect
import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path

import pytest

from specinfer_vllm.bench.released import Release, Unreachable
from specinfer_vllm.patches import hooks
from specinfer_vllm.patches.patch import Hook, HookChanged, HookMissing, is_version_in, vllm_version
from specinfer_vllm.patches.source import Sources

RELEASES = ("0.32.0", "0.33.0")

Read = Callable[[str], str | None]


def verdict(sources: Sources, hook: Hook, version: str) -> HookMissing | None:
    """What is wrong with a hook in a release, None for nothing."""
    try:
        sources.check(hook, version)
    except HookMissing as wrong:
        return wrong
    return None


# -- released wheels ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=RELEASES)
def release(request) -> tuple[str, dict[Hook, HookMissing | None]]:
    """A version of vLLM, and what each hook comes to in its GPU wheel."""
    version = request.param
    sources = Sources(Release("vllm", version).read)
    try:
        return version, {hook: verdict(sources, hook, version) for hook in hooks.ALL}
    except Unreachable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("hook", hooks.ALL, ids=str)
def test_a_hook_is_as_we_know_it_in_a_released_wheel(release, hook):
    version, found = release
    if not is_version_in(version, hook.versions):
        pytest.skip(f"{hook} is read in vLLM {hook.versions} only")
    if found[hook] is not None:
        pytest.fail(f"vllm {version}: {found[hook]}", pytrace=False)


# -- the installed vLLM, which can be imported -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def installed() -> Read:
    """Reads the files of the installed vLLM."""
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("needs an installed vLLM")
    root = Path(spec.submodule_search_locations[0]).parent
    return lambda path: (root / path).read_text(encoding="utf-8") if (root / path).is_file() else None


@pytest.fixture(scope="session")
def sources(installed) -> Sources:
    """The installed vLLM as its files tell it."""
    return Sources(installed)


def shape(parameters) -> list[tuple[str, int, bool]]:
    """Name, kind and whether it must be given, of each parameter."""
    return [(each.name, each.kind, each.default is Parameter.empty) for each in parameters]


def read_shape(sources: Sources, hook: Hook) -> list[tuple[str, int, bool]]:
    return shape(sources.parameters(sources.resolve(hook)))


@pytest.mark.parametrize("hook", hooks.ALL, ids=str)
def test_what_the_files_say_of_a_hook_is_what_inspect_says(sources, hook):
    pytest.importorskip("vllm")
    if not is_version_in(vllm_version(), hook.versions):
        pytest.skip(f"{hook} is read in vLLM {hook.versions} only")
    target = hook.resolve()
    if hook.parameters:
        assert read_shape(sources, hook) == shape(inspect.signature(target).parameters.values())
    sources.check(hook, vllm_version())


def functions(module, name: str) -> Iterator[str]:
    """Attribute paths of the functions and methods, inherited ones too, of what a module of vLLM defines."""
    for key, value in vars(module).items():
        if getattr(value, "__module__", None) != name:
            continue
        if inspect.isfunction(value):
            yield key
        elif inspect.isclass(value):
            methods = {attribute: inspect.getattr_static(value, attribute) for attribute in dir(value)}
            for attribute, method in methods.items():
                function = getattr(method, "__func__", method)  # of a static or a class method
                # A dataclass writes its own __init__, an Enum brings others.
                if inspect.isfunction(function) and function.__module__.startswith("vllm."):
                    if not attribute.startswith("__"):
                        yield f"{key}.{attribute}"


def test_what_the_files_say_of_their_modules_is_what_inspect_says(sources):
    """Hundreds of functions beside the hooks, so that the next hook is read as well as these."""
    pytest.importorskip("vllm")
    compared = 0
    for name in sorted({hook.module for hook in hooks.ALL}):
        for path in functions(importlib.import_module(name), name):
            hook = Hook(name, path)
            assert read_shape(sources, hook) == shape(inspect.signature(hook.resolve()).parameters.values()), hook
            compared += 1
    assert compared > 500


def edited(read: Read, path: str, old: str, new: str) -> Sources:
    """The files, with one of them changed as a next release could change it."""
    text = read(path)
    assert text.count(old) == 1
    return Sources(lambda each: text.replace(old, new) if each == path else read(each))


SCHEDULER = "vllm/v1/core/sched/scheduler.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


@pytest.mark.parametrize(
    "name, path, old, new, message",
    [
        (
            "Scheduler.update_draft_token_ids",
            SCHEDULER,
            "def update_draft_token_ids(self, draft_token_ids: DraftTokenIds)",
            "def update_draft_token_ids(self, drafts: DraftTokenIds)",
            r"parameters are \(self, drafts\), expected \(self, draft_token_ids\)",
        ),
        (
            "CPUModelRunner.take_draft_token_ids",
            RUNNER,
            "def take_draft_token_ids(self)",
            "def take_draft_token_ids(self, wait: bool)",
            r"parameters are \(self, wait\), expected \(self\)",
        ),
        (
            "CPUModelRunner._input_fits_in_drafter",
            RUNNER,
            "def _input_fits_in_drafter(",
            "def _fits_in_drafter(",
            "not found .*CPUModelRunner has no _input_fits_in_drafter",
        ),
    ],
)
def test_a_change_upstream_fails_by_name_and_nothing_else_does(installed, name, path, old, new, message):
    sources = edited(installed, path, old, new)
    found = [verdict(sources, hook, "0.32.0") for hook in hooks.ALL]
    wrong = [each for each in found if each is not None]
    assert len(wrong) == 1
    with pytest.raises(HookMissing, match=rf"{name}: {message}"):
        raise wrong[0]


# -- names and parameters, by hand -------------------------------------------------------------------------------------

FILES = {
    "host/__init__.py": "from .inner import *\nfrom host import late\n",
    "host/late.py": "def f(x): ...\n",
    "host/inner/__init__.py": "from host.inner.base import Base as Known, free\nfrom . import base as module\n",
    "host/inner/base.py": """
import dataclasses, functools, threading
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from unknown import Elsewhere

if TYPE_CHECKING:
    def only_typed(a): ...

try:
    from host.fast import free
except ImportError:
    def free(slow): ...

def free(a, /, b, c=1, *, d, e=2, **rest): ...

same = free
short = lambda x, y=0: None
number = 3
made = functools.partial(free, 1)

@functools.lru_cache(maxsize=None)
def cached(x): ...

class Base:
    bare: int
    alias = free
    bound = staticmethod(free)
    def __init__(self, x, *args): ...
    def method(self, x): ...
    def kept(self, x): ...
    @staticmethod
    def static(x): ...
    @classmethod
    def of(cls, x): ...
    @property
    def width(self): ...
    @abstractmethod
    def declared(self): ...

class Left(Base):
    def method(self, left): ...

class Right(Base):
    def kept(self, right): ...

class Both(Left, Right):
    other = Left.method
    if number:
        async def branch(self, a): ...
    else:
        def branch(self, b): ...

class Beyond(Elsewhere): ...

@dataclass
class Record:
    a: int
    kind: ClassVar[str] = "record"
    b: list = field(default_factory=list)
    c: int = field(init=False)
    _: KW_ONLY
    d: int
    def method(self): ...

@dataclasses.dataclass(kw_only=True)
class Longer(Record):
    b: list
    e: int = 0

class Pair(NamedTuple):
    left: int
    right: int = 0
""",
}


@pytest.fixture
def host() -> Sources:
    return Sources(FILES.get)


def signature(host: Sources, name: str) -> str:
    parameters = host.parameters(host.resolve(Hook("host.inner.base", name)))
    return str(inspect.Signature([each.replace(default=Parameter.empty) for each in parameters]))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("free", "(a, /, b, c, *, d, e, **rest)"),
        ("same", "(a, /, b, c, *, d, e, **rest)"),
        ("short", "(x, y)"),
        ("cached", "(x)"),
        ("Base", "(x, *args)"),
        ("Base.static", "(x)"),
        ("Base.of", "(cls, x)"),
        ("Base.alias", "(a, /, b, c, *, d, e, **rest)"),
        ("Base.bound", "(a, /, b, c, *, d, e, **rest)"),
        ("Both", "(x, *args)"),
        ("Both.method", "(self, left)"),
        ("Both.kept", "(self, right)"),
        ("Both.other", "(self, left)"),
        ("Both.branch", "(self, a)"),
        ("Record", "(a, b, *, d)"),
        ("Longer", "(a, *, b, d, e)"),
        ("Pair", "(left, right)"),
    ],
)
def test_parameters_are_read_where_they_are_written(host, name, expected):
    assert signature(host, name) == expected


@pytest.mark.parametrize(
    "module, name",
    [
        ("host", "Known.method"),  # by a star import from a package, there by another name
        ("host", "late.f"),
        ("host.inner", "module.Both.kept"),
        ("host.inner.base", "threading.Thread"),
        ("host.inner.base", "cached.cache_clear"),
        ("host.inner.base", "Base.width"),
    ],
)
def test_names_are_followed_from_file_to_file(host, module, name):
    host.check(Hook(module, name), "0.33.0")


@pytest.mark.parametrize(
    "name, message",
    [
        ("gone", "host.inner.base has no gone"),
        ("Gone.method", "host.inner.base has no Gone"),
        ("Both.gone", "host.inner.base.Both has no gone"),
        ("Beyond.method", "host.inner.base.Beyond has no method; not looked for in unknown.Elsewhere"),
        ("free.cache_clear", "host.inner.base.free has no cache_clear"),
        ("only_typed", "host.inner.base has no only_typed"),
        ("Base.bare", "host.inner.base.Base has no bare"),
        ("Base.declared", "only what it should implement"),
        ("Both.declared", "only what it should implement"),
    ],
)
def test_what_is_not_there_is_named(host, name, message):
    with pytest.raises(HookMissing, match=rf"^host.inner.base.{name}: not found \({message}\)"):
        host.check(Hook("host.inner.base", name), "0.33.0")


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        ("Both.method", ("self", "x"), r"parameters are \(self, left\), expected \(self, x\)"),
        ("Record", ("a", "b"), r"parameters are \(a, b, d\), expected \(a, b\)"),
        ("number", ("x",), "it is the value 3"),
        ("made", ("b",), r"it is the value functools.partial\(free, 1\)"),
        ("Base.width", ("self",), "it is a property"),
        ("Beyond", ("x",), "its constructor may be that of unknown.Elsewhere"),
        ("threading.Thread", ("group",), "threading.Thread cannot be read"),
    ],
)
def test_what_is_not_as_expected_is_named(host, name, parameters, message):
    with pytest.raises(HookChanged, match=f"^host.inner.base.{name}: {message}"):
        host.check(Hook("host.inner.base", name, parameters), "0.33.0")


def test_a_missing_module_is_named(host):
    with pytest.raises(HookMissing, match=r"^host.gone.f: not found \(no module host.gone\)"):
        host.check(Hook("host.gone", "f"), "0.33.0")


def test_a_hook_of_other_releases_is_refused(host):
    with pytest.raises(HookChanged, match="read in vLLM >=0.32,<0.33 only, and this is 0.33.0"):
        host.check(Hook("host.inner.base", "free", versions=">=0.32,<0.33"), "0.33.0")


# -- fetching ----------------------------------------------------------------------------------------------------------

TINY = {"tinyhost/__init__.py": "", "tinyhost/a.py": "def f(x): ...\n" * 999, "tinyhost/large.so": "0" * 500_000}


class Index(http.server.SimpleHTTPRequestHandler):
    """A package index of one folder that counts the bytes of the packages that it sends, in parts where it may."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            super().do_GET()
            return
        content = path.read_bytes()
        asked = self.headers.get("Range") if self.server.in_parts else None
        first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, len(content) - 1)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client may hang up on what it did not ask for
            self.wfile.write(content[first : last + 1])
        self.server.sent[path.name] = self.server.sent.get(path.name, 0) + last + 1 - first

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def index(tmp_path, monkeypatch) -> Iterator[http.server.HTTPServer]:
    """An index with one package, where pip looks instead of the user's."""
    page = tmp_path / "index/simple/tinyhost"
    page.mkdir(parents=True)
    with zipfile.ZipFile(page / "tinyhost-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in TINY.items():
            wheel.writestr(name, text)
    with tarfile.open(page / "tinyhost-1.0.tar.gz", "w:gz") as archive:
        for name, text in TINY.items():
            entry = tarfile.TarInfo(f"tinyhost-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    handler = functools.partial(Index, directory=tmp_path / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.in_parts, server.sent = True, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        yield server
        server.shutdown()


def test_a_file_is_read_without_downloading_the_wheel_and_kept(index):
    release = Release("tinyhost", "1.0")
    assert release.read("tinyhost/a.py") == TINY["tinyhost/a.py"]
    assert release.read("tinyhost/gone.py") is None
    assert set(index.sent) == {"tinyhost-1.0-py3-none-any.whl"}
    assert 0 < sum(index.sent.values()) < 300_000
    index.sent.clear()
    assert Release("tinyhost", "1.0").read("tinyhost/a.py") == TINY["tinyhost/a.py"]
    assert index.sent == {}


def test_a_damaged_file_is_fetched_again(index):
    release = Release("tinyhost", "1.0")
    release.read("tinyhost/a.py")
    (release.folder / "tinyhost/a.py").write_text("def f(y): ...\n")
    assert Release("tinyhost", "1.0").read("tinyhost/a.py") == TINY["tinyhost/a.py"]


def test_an_index_that_sends_whole_files_only_is_asked_for_the_source_archive(index, capsys):
    index.in_parts = False
    release = Release("tinyhost", "1.0")
    assert release.read("tinyhost/a.py") == TINY["tinyhost/a.py"]
    assert sorted(path.name for path in release.folder.rglob("*.*")) == ["__init__.py", "a.py", "members.json"]
    assert "downloading tinyhost-1.0.tar.gz" in capsys.readouterr().err


def test_a_release_out_of_reach_is_no_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    sources = Sources(Release("tinyhost", "1.0").read)
    with pytest.raises(Unreachable, match="^tinyhost==1.0: not found on the index that pip uses"):
        sources.check(Hook("tinyhost.a", "f", ("x",)), "1.0")
    assert not list(tmp_path.rglob("*.*"))
