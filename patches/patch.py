# SPDX-License-Identifier: Apache-2.0
"""One way to touch vLLM: a patch names its target, the reason and the versions, and looks before it touches."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

# Releases whose hooks were read and tested; anything else makes the plug-in stand aside.
SUPPORTED_VERSIONS = ">=0.32,<0.34"


class HookMissing(RuntimeError):
    """A target of a patch is not there, or has another signature than the one the patch was written for."""


@dataclass(frozen=True)
class Hook:
    """A place of vLLM that we rely on: a dotted name and, for a callable, its first parameters.

    module       dotted module path
    name         attribute path inside the module
    parameters   leading parameter names the callable must have; empty = any
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def resolve(self) -> Any:
        """The object behind the name, staticmethods unwrapped. Raises HookMissing."""
        try:
            found = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = inspect.getattr_static(found, part)
        except (ImportError, AttributeError) as error:
            raise HookMissing(f"{self}: not found ({error})") from error
        return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    def check(self) -> None:
        """Raise HookMissing unless the target is there with the parameters we were written for."""
        target = self.resolve()
        if not self.parameters:
            return
        found = tuple(inspect.signature(target).parameters)
        if found[: len(self.parameters)] != self.parameters:
            raise HookMissing(f"{self}: parameters are {found}, expected to start with {self.parameters}")


class Patch:
    """Replaces one function or method of vLLM; `replacement` gets the original as its first argument.

    Subclasses state `target`, `reason` and, if narrower than the plug-in's, `versions`; they override `replacement`.
    A patch is applied once per process: a second `apply` is refused, `revert` puts the original back.
    """

    target: ClassVar[Hook]
    reason: ClassVar[str]
    versions: ClassVar[str] = SUPPORTED_VERSIONS
    original: ClassVar[Any] = None

    @staticmethod
    def replacement(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def is_applied(cls) -> bool:
        """Whether the target is replaced by this patch in this process."""
        return cls.original is not None

    @classmethod
    def apply(cls) -> None:
        """Check the target and replace it. Raises HookMissing, or RuntimeError when it is applied already."""
        if cls.is_applied():
            raise RuntimeError(f"{cls.__name__} is applied already")
        cls.target.check()
        owner, name = cls.owner()
        kept = inspect.getattr_static(owner, name)
        original = cls.target.resolve()
        replacement = cls.replacement

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(owner, name, staticmethod(patched) if isinstance(kept, staticmethod) else patched)
        cls.original = kept

    @classmethod
    def revert(cls) -> None:
        """Put the original back; nothing happens when the patch is not applied."""
        if cls.is_applied():
            owner, name = cls.owner()
            setattr(owner, name, cls.original)
            cls.original = None

    @classmethod
    def owner(cls) -> tuple[Any, str]:
        """The class or module that holds the target, and the target's name in it."""
        owner: Any = importlib.import_module(cls.target.module)
        *path, name = cls.target.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name
