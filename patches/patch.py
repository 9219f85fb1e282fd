# SPDX-License-Identifier: Apache-2.0
"""One way to touch vLLM: a patch names its target, the reason and the versions, and looks before it touches."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

# Releases whose hooks were read; anything else makes the plug-in stand aside.
SUPPORTED_VERSIONS = ">=0.32,<0.34"
# Left on a replaced function, so that a second copy of this package does not wrap it again.
MARK = "__specinfer_patch__"


class HookMissing(RuntimeError):
    """A target is not there."""


class HookChanged(HookMissing):
    """A target is there, but not as it was when what relies on it was written."""


@dataclass(frozen=True)
class Hook:
    """A place of vLLM that we rely on.

    module       dotted module path
    name         attribute path inside the module
    parameters   what its parameters must begin with, the others being optional; a last "*" = whatever follows is
                 passed on unread; empty = any
    reason       why we are there
    versions     releases of vLLM it was read in
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    reason: str = ""
    versions: str = SUPPORTED_VERSIONS

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def resolve(self) -> Any:
        """The object behind the name, static and class methods unwrapped. Raises HookMissing."""
        try:
            found = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = inspect.getattr_static(found, part)
        except (ImportError, AttributeError) as error:
            raise HookMissing(f"{self}: not found ({error})") from error
        return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    def check(self) -> None:
        """Raise HookMissing, or HookChanged when it is not as we know it."""
        target = self.resolve()
        if getattr(target, "__isabstractmethod__", False):
            raise HookMissing(f"{self}: not found (only what it should implement)")
        if self.versions != SUPPORTED_VERSIONS and not is_version_in(vllm_version(), self.versions):
            raise HookChanged(f"{self}: read in vLLM {self.versions} only, and this is {vllm_version()}")
        if not self.parameters:
            return
        if not callable(target):
            raise HookChanged(f"{self}: a {type(target).__name__}, expected a function of {self.parameters}")
        self.compare(inspect.signature(target).parameters)

    def compare(self, found: Mapping[str, inspect.Parameter]) -> None:
        """Raise HookChanged unless a target with these parameters is as we know it."""
        wanted = tuple(name for name in self.parameters if name != "*")
        rest = () if wanted != self.parameters else tuple(found.values())[len(wanted) :]
        if tuple(found)[: len(wanted)] != wanted or any(map(is_required, rest)):
            raise HookChanged(f"{self}: parameters are ({', '.join(found)}), expected ({', '.join(self.parameters)})")


def is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call must give this parameter."""
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def vllm_version() -> str:
    """The version of the vLLM in this process."""
    import vllm

    return vllm.__version__


def is_version_in(version: str, specifiers: str) -> bool:
    """Whether a version of vLLM, local labels aside, is among the releases; one that cannot be parsed is not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifiers).contains(version.split("+")[0], prereleases=True)
    except InvalidVersion:
        return False


class Patch:
    """Replaces one function or method of vLLM; `replacement` gets the original as its first argument.

    Subclasses state `target`, with its reason and versions, and override `replacement`. A patch is applied once per
    process: a second `apply` is refused, `revert` puts the original back.
    """

    target: ClassVar[Hook]
    # The original and what stands in its place, as they stand in their owner: a static method stays one.
    kept: ClassVar[tuple[Any, Any] | None] = None

    @staticmethod
    def replacement(original: Any, *args: Any, **kwargs: Any) -> Any:
        """What runs instead of the original."""
        raise NotImplementedError

    @classmethod
    def is_applied(cls) -> bool:
        """Whether the target is replaced by this patch in this process."""
        return cls.kept is not None

    @classmethod
    def apply(cls) -> None:
        """Check the target and replace it.

        Raises HookMissing before anything is changed, or RuntimeError when it is applied already, be it by another
        copy of this package.
        """
        cls.target.check()
        original = cls.target.resolve()
        if cls.is_applied() or hasattr(original, MARK):
            raise RuntimeError(f"{cls.__name__} is applied to {cls.target} already, by {getattr(original, MARK, 'it')}")
        owner, name = cls.owner()
        kept = inspect.getattr_static(owner, name)
        replacement = cls.replacement

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(patched, MARK, f"{cls.__module__}.{cls.__qualname__}")
        placed = type(kept)(patched) if isinstance(kept, (staticmethod, classmethod)) else patched
        setattr(owner, name, placed)
        cls.kept = kept, placed

    @classmethod
    def revert(cls) -> None:
        """Put the original back; nothing happens when the patch is not applied.

        Raises RuntimeError when someone has replaced the target since: putting the original back would drop theirs.
        """
        if cls.kept is None:
            return
        original, placed = cls.kept
        owner, name = cls.owner()
        if inspect.getattr_static(owner, name) is not placed:
            raise RuntimeError(f"{cls.target} was replaced by someone else after {cls.__name__}; undo that first")
        setattr(owner, name, original)
        cls.kept = None

    @classmethod
    def owner(cls) -> tuple[Any, str]:
        """The class or module that holds the target, and the target's name in it."""
        owner: Any = importlib.import_module(cls.target.module)
        *path, name = cls.target.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name
