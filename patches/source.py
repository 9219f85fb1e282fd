# SPDX-License-Identifier: Apache-2.0
"""Hooks looked up in vLLM's source files, without importing them: a release's wheel may need what this machine lacks.

What is found is what an import would give, as far as it is written down: names are followed through imports, aliases
and bases; a decorator is taken to keep the signature, as functools.wraps does. What only running the code could tell
raises HookChanged, which names it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter

from specinfer_vllm.patches.patch import Hook, HookChanged, HookMissing, is_version_in

Function = ast.FunctionDef | ast.AsyncFunctionDef
PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter"}
METHODS = {"staticmethod", "classmethod"}
CACHES = {"cache", "lru_cache"}
CACHE_METHODS = {"cache_clear", "cache_info", "cache_parameters"}
# How a dataclass's field says that it has a default.
DEFAULTS = {"default", "default_factory"}
REQUIRED = Parameter.empty
# Bases that bring no constructor of their own.
PLAIN = {"object", "abc.ABC", "typing.Generic"}


@dataclass(frozen=True, eq=False)
class Module:
    """One parsed file. `package` is what a relative import in it starts from."""

    name: str
    package: str
    tree: ast.Module


@dataclass(frozen=True, eq=False)
class Found:
    """A function, a class, or the expression that a name stands for; its own names mean what they do in `module`."""

    module: Module
    node: Function | ast.ClassDef | ast.expr


@dataclass(frozen=True)
class Outside:
    """Something of another package, by its dotted name."""

    name: str


Target = Found | Outside | Module


class Sources:
    """The Python files of one release. `read` gives a file's text by its path, e.g. vllm/envs.py, None = no such."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self.read = read
        self.modules: dict[str, Module | None] = {}

    def check(self, hook: Hook, version: str) -> None:
        """Raise HookMissing, or HookChanged when it is not as we know it, as Hook.check does for an installed vLLM."""
        target = self.resolve(hook)
        if is_abstract(target):
            raise HookMissing(f"{hook}: not found (only what it should implement)")
        if not is_version_in(version, hook.versions):
            raise HookChanged(f"{hook}: read in vLLM {hook.versions} only, and this is {version}")
        if not hook.parameters:
            return
        try:
            hook.compare({each.name: each for each in self.parameters(target)})
        except TypeError as error:
            raise HookChanged(f"{hook}: {error}, expected a function of {hook.parameters}") from error

    def resolve(self, hook: Hook) -> Target:
        """What the hook names. Raises HookMissing."""
        found: Target | None = self.module(hook.module)
        if found is None:
            raise HookMissing(f"{hook}: not found (no module {hook.module})")
        for part in hook.name.split("."):
            owner, found = found, self.attribute(found, part)
            if found is None:
                raise HookMissing(f"{hook}: not found ({describe(owner)} has no {part}{self.unread(owner)})")
        return found

    def module(self, name: str) -> Module | None:
        """A module by its dotted name, parsed once; None where the release has none such."""
        if name not in self.modules:
            self.modules[name] = self.parse(name)
        return self.modules[name]

    def parse(self, name: str) -> Module | None:
        """Read its file, of a module or of a package."""
        stem = name.replace(".", "/")
        for path, package in ((f"{stem}/__init__.py", name), (f"{stem}.py", name.rpartition(".")[0])):
            text = self.read(path)
            if text is not None:
                return Module(name, package, ast.parse(text, path))
        return None

    # -- names ---------------------------------------------------------------------------------------------------------

    def attribute(self, owner: Target, name: str) -> Target | None:
        """What `owner.name` is, None where it is not there."""
        if isinstance(owner, Module):
            return self.member(owner, name)
        if isinstance(owner, Outside):
            return Outside(f"{owner.name}.{name}")
        if isinstance(owner.node, ast.ClassDef):
            return next(filter(None, (self.own(each, name) for each in self.bases(owner))), None)
        if name in CACHE_METHODS and CACHES & set(decorators(owner.node)):
            return Outside(f"functools.{name}")
        return None

    def member(self, module: Module, name: str) -> Target | None:
        """A module's global, or a module of a package."""
        statement = binding(module.tree.body, name)
        found = None if statement is None else self.follow(module, statement, name)
        if found is not None:
            return found
        starred = (self.module(each) for each in star_imports(module) if each != module.name)
        return next(
            filter(None, (self.member(each, name) for each in starred if each)), self.module(f"{module.name}.{name}")
        )

    def own(self, owner: Target, name: str) -> Target | None:
        """What a class itself defines under this name."""
        if not isinstance(owner, Found) or not isinstance(owner.node, ast.ClassDef):
            return None
        statement = binding(owner.node.body, name)
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Name) and value.id != name:  # an alias of its neighbour, or of a global
            return self.own(owner, value.id) or self.member(owner.module, value.id)
        return None if statement is None else self.follow(owner.module, statement, name)

    def follow(self, module: Module, statement: ast.stmt, name: str) -> Target | None:
        """What a statement of `module` binds to `name`."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return Found(module, statement)
        if isinstance(statement, ast.Import):
            alias = next(each for each in statement.names if bound(each) == name)
            target = alias.name if alias.asname else name
            return self.module(target) or Outside(target)
        if isinstance(statement, ast.ImportFrom):
            alias = next(each for each in statement.names if bound(each) == name)
            source = absolute(module, statement)
            if source == module.name:  # a package names one of its own modules
                return self.module(f"{source}.{alias.name}")
            origin = self.module(source)
            return Outside(f"{source}.{alias.name}") if origin is None else self.member(origin, alias.name)
        value = statement.value  # an assignment
        if isinstance(value, ast.Call) and name_of(value.func) in METHODS and value.args:
            value = value.args[0]
        is_own = isinstance(value, ast.Name) and value.id == name  # `f = f` would lead here again
        return (None if is_own else self.named(module, value)) or Found(module, value)

    def named(self, module: Module, expression: ast.expr) -> Target | None:
        """What an expression names; None where it is more than a dotted name, or one that is not found."""
        if isinstance(expression, ast.Name):
            return self.member(module, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.named(module, expression.value)
            return None if owner is None else self.attribute(owner, expression.attr)
        return None

    def bases(self, owner: Found) -> list[Target]:
        """A class and what it inherits from, in the order in which attributes are looked up."""
        found: list[Target] = []
        for expression in owner.node.bases:
            # Generic[T] is Generic; what cannot be followed stands for itself.
            plain = expression.value if isinstance(expression, ast.Subscript) else expression
            base = self.named(owner.module, plain) or Outside(ast.unparse(plain))
            is_class = isinstance(base, Found) and isinstance(base.node, ast.ClassDef)
            found += self.bases(base) if is_class else [base]
        last = {key(each): place for place, each in enumerate(found)}  # a common base comes after all that share it
        return [owner, *(each for place, each in enumerate(found) if last[key(each)] == place)]

    def unread(self, owner: Target) -> str:
        """Bases of other packages, for the message that something was not found."""
        if not isinstance(owner, Found) or not isinstance(owner.node, ast.ClassDef):
            return ""
        names = [each.name for each in self.bases(owner) if isinstance(each, Outside)]
        return f"; not looked for in {', '.join(names)}" if names else ""

    # -- signatures ----------------------------------------------------------------------------------------------------

    def parameters(self, target: Target) -> list[Parameter]:
        """Its parameters as inspect.signature gives them. Raises TypeError where it has none, or none to be read."""
        if not isinstance(target, Found):
            raise TypeError(f"{describe(target)} cannot be read")
        if isinstance(target.node, ast.ClassDef):
            return self.constructor(target)
        if isinstance(target.node, ast.Lambda):
            return list(arguments(target.node.args))
        if not isinstance(target.node, Function):
            raise TypeError(f"it is {describe(target)}")
        if PROPERTIES & set(decorators(target.node)):
            raise TypeError("it is a property")
        return list(arguments(target.node.args))

    def constructor(self, owner: Found) -> list[Parameter]:
        """What a class is called with. Raises TypeError where that is not written in the release's files."""
        below = owner
        for each in self.bases(owner):
            if isinstance(each, Outside) and each.name in PLAIN:
                continue
            if isinstance(each, Outside) and each.name == "typing.NamedTuple":
                return list(own_fields(below.node))
            if not isinstance(each, Found) or not isinstance(each.node, ast.ClassDef):
                raise TypeError(f"its constructor may be that of {describe(each)}")
            written = self.own(each, "__init__")
            if written is not None:
                return self.parameters(written)[1:]
            if self.is_dataclass(each):
                return self.fields(each)
            below = each
        return []

    def is_dataclass(self, owner: Found) -> bool:
        """Whether a decorator writes its constructor: dataclass, or one of the release's own that says it is alike."""
        for decorator in owner.node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            target = self.named(owner.module, call.func if call else decorator)
            alike = isinstance(target, Found) and "dataclass_transform" in decorators(target.node)
            if alike or (isinstance(target, Outside) and target.name.endswith("dataclasses.dataclass")):
                return call is None or not is_constant(keyword(call, "init"), False)
        return False

    def fields(self, owner: Found) -> list[Parameter]:
        """The fields of a dataclass and of those it inherits from; those to be named come last."""
        found: dict[str, Parameter] = {}
        for each in reversed(self.bases(owner)):
            if isinstance(each, Found) and isinstance(each.node, ast.ClassDef) and self.is_dataclass(each):
                found |= {field.name: field for field in own_fields(each.node)}
        return sorted(found.values(), key=lambda field: field.kind)


def own_fields(node: ast.ClassDef) -> Iterator[Parameter]:
    """The annotated names in a class's body that its constructor takes."""
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    kind = keyword_kind(any(is_constant(keyword(call, "kw_only"), True) for call in calls))
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation, value = ast.unparse(statement.annotation), statement.value
        if "ClassVar" in annotation:
            continue
        if annotation.endswith("KW_ONLY"):
            kind = Parameter.KEYWORD_ONLY
            continue
        call = value if isinstance(value, ast.Call) and name_of(value.func) in ("field", "Field") else None
        if call and is_constant(keyword(call, "init"), False):
            continue
        named = keyword_kind(True) if call and is_constant(keyword(call, "kw_only"), True) else kind
        yield Parameter(statement.target.id, named, default=REQUIRED if is_required(value, call) else value)


def is_required(value: ast.expr | None, field: ast.Call | None) -> bool:
    """Whether a field's value is no default: nothing, or field(...) without one."""
    if field is None:
        return value is None
    first = field.args[0] if field.args else None  # pydantic's Field takes the default first, and ... for none
    return (first is None or is_constant(first, ...)) and not any(each.arg in DEFAULTS for each in field.keywords)


def arguments(given: ast.arguments) -> Iterator[Parameter]:
    """The parameters of a function, in order."""
    positional = [*((each, Parameter.POSITIONAL_ONLY) for each in given.posonlyargs)]
    positional += ((each, Parameter.POSITIONAL_OR_KEYWORD) for each in given.args)
    defaults = [REQUIRED] * (len(positional) - len(given.defaults)) + given.defaults
    for (each, kind), default in zip(positional, defaults, strict=True):
        yield Parameter(each.arg, kind, default=default)
    if given.vararg:
        yield Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL)
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield Parameter(each.arg, Parameter.KEYWORD_ONLY, default=REQUIRED if default is None else default)
    if given.kwarg:
        yield Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)


def binding(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """The statement that gives `name` its value: the last one, and of two branches the first."""
    for statement in reversed(body):
        if name in names_bound(statement):
            return statement
        for block in blocks(statement):
            found = binding(block, name)
            if found is not None:
                return found
    return None


def names_bound(statement: ast.stmt) -> list[str]:
    """The names that a statement itself binds; a bare annotation binds none."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [bound(alias) for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [each.id for each in statement.targets if isinstance(each, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement that run in the same scope; not what only a type checker reads."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if not (isinstance(statement, ast.If) and name_of(statement.test) == "TYPE_CHECKING"):
        yield getattr(statement, "body", [])
    yield getattr(statement, "orelse", [])
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    yield getattr(statement, "finalbody", [])


def bound(alias: ast.alias) -> str:
    """The name that an import binds; `import a.b` binds a."""
    return alias.asname or alias.name.partition(".")[0]


def star_imports(module: Module) -> list[str]:
    """Modules whose names a module takes over, the last one first."""
    found = [each for each in module.tree.body if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"]
    return [absolute(module, each) for each in reversed(found)]


def absolute(module: Module, statement: ast.ImportFrom) -> str:
    """The dotted name of the module that is imported from."""
    if not statement.level:
        return statement.module or ""
    above = module.package.split(".")[: len(module.package.split(".")) - statement.level + 1]
    return ".".join([*above, statement.module] if statement.module else above)


def decorators(node: ast.AST) -> list[str]:
    """The last names of its decorators: cache for @functools.cache."""
    listed = getattr(node, "decorator_list", [])
    return [name_of(each.func if isinstance(each, ast.Call) else each) for each in listed]


def name_of(expression: ast.expr) -> str:
    """The last part of a dotted name, empty for any other expression."""
    return getattr(expression, "attr", getattr(expression, "id", ""))


def is_abstract(target: Target) -> bool:
    """Whether a method is only declared."""
    return isinstance(target, Found) and "abstractmethod" in decorators(target.node)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """A keyword argument of a call."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def keyword_kind(named: bool) -> int:
    """How a field is given to the constructor."""
    return Parameter.KEYWORD_ONLY if named else Parameter.POSITIONAL_OR_KEYWORD


def is_constant(expression: ast.expr | None, value: object) -> bool:
    """Whether an expression is this very True, False or ... ."""
    return isinstance(expression, ast.Constant) and expression.value is value


def key(target: Target) -> object:
    """What makes two findings the same."""
    return target.node if isinstance(target, Found) else target


def describe(target: Target) -> str:
    """A finding in an error's words."""
    if isinstance(target, (Module, Outside)):
        return target.name
    if isinstance(target.node, ast.expr):
        return f"the value {ast.unparse(target.node)[:60]}"
    return f"{target.module.name}.{target.node.name}"
