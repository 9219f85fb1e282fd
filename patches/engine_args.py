# SPDX-License-Identifier: Apache-2.0
"""How `tree` gets from the user into vLLM's configuration (vllm/engine/arg_utils.py, class EngineArgs)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from specinfer_vllm.config import (
    METHOD,
    WHERE,
    TreeOptionError,
    TreeOptions,
    is_tree,
    read_text,
    read_value,
    resembles_tree,
)
from specinfer_vllm.patches.patch import Hook, Patch

ARG_UTILS = "vllm.engine.arg_utils"
HELP = (
    "specinfer-vllm: `tree` for token trees, alone, in JSON or in a .json file; `specinfer options` lists its options."
)


class SpeculativeFlagTakesTree(Patch):
    """`--speculative-config tree` and `--spec-method tree` pass vLLM's parser.

    Upstream reads the flag with json.loads, which refuses a bare word, and closes the choices of --spec-method.
    """

    target = Hook(
        ARG_UTILS,
        "EngineArgs.add_cli_args",
        ("parser",),
        "the flag is parsed by json.loads and the method is a closed list",
    )

    @staticmethod
    def replacement(original: Any, parser: Any) -> Any:
        """Returns the parser that `original` filled, with both flags widened."""
        parser = original(parser)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.help = f"{action.help or ''}\n\n{HELP}"
                action.type = flag_reader(action.type)
                action.__class__ = type("TreeFlag", (KeepsEarlierTree, type(action)), {})
            elif "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, METHOD]
        return parser


class TreeReachesSpeculativeConfig(Patch):
    """A tree becomes TreeSpeculativeConfig; every other method goes to vLLM's own class untouched.

    Upstream's SpeculativeConfig has a closed Literal of methods and forbids further fields.
    """

    target = Hook(
        ARG_UTILS,
        "EngineArgs.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
        "SpeculativeConfig knows a closed list of methods and fields",
    )

    @staticmethod
    def replacement(original: Any, self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        """Returns TreeSpeculativeConfig, or what `original` makes of another method.

        Raises TreeOptionError for a model that trees cannot verify.
        """
        options = tree_options(self)
        if options is None:
            refuse_other_method(self)
            return original(self, target_model_config, target_parallel_config)
        from specinfer_vllm.engine import launch
        from specinfer_vllm.patches.speculative_config import TreeSpeculativeConfig

        launch.check_model(target_model_config)
        return TreeSpeculativeConfig(
            options=options.as_dict(),
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )


class TreeChoosesWorkerAndScheduler(Patch):
    """A tree brings its own worker and scheduler classes, and is checked before anything is loaded.

    The caller's EngineArgs come out as they went in, so that they may be used again, with or without a tree.
    """

    target = Hook(
        ARG_UTILS,
        "EngineArgs.create_engine_config",
        ("self", "usage_context"),
        "worker_cls and scheduler_cls are strings on EngineArgs; combinations are known only on the finished config",
    )

    @staticmethod
    def replacement(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the VllmConfig. Raises TreeOptionError for what a tree cannot be combined with."""
        options = tree_options(self)
        if options is None:
            return original(self, *args, **kwargs)
        from specinfer_vllm.engine import launch

        kept = {name: getattr(self, name) for name in (*launch.CHOSEN, "speculative_config")}
        try:
            launch.prepare(self, options)
            config = original(self, *args, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(self, name, value)
        launch.check(config)
        return config


class KeepsEarlierTree:
    """Mixed into the action of --speculative-config: `tree` and dotted options may be given side by side.

    vLLM's parser turns all dotted forms into one JSON flag at the end, which would replace the word.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the flag's value, with what an earlier one said of a tree and this one does not."""
        earlier = getattr(namespace, self.dest, None)  # type: ignore[attr-defined]
        if isinstance(earlier, dict) and is_tree(earlier.get("method")) and isinstance(values, dict):
            values = {**earlier, **values}
        super().__call__(parser, namespace, values, option_string)  # type: ignore[misc]


def flag_reader(upstream: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of --speculative-config: trees in every form, everything else as `upstream` reads it.

    The result raises argparse.ArgumentTypeError, the only exception whose message argparse prints.
    """

    def read(text: str) -> Any:
        word = text.strip()
        if resembles_tree(word):
            raise argparse.ArgumentTypeError(f"{word!r} is no method; did you mean {METHOD!r}?")
        try:
            return read_text(text) if is_tree_text(word) else upstream(text)
        except TreeOptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def is_tree_text(text: str) -> bool:
    """Whether this flag is ours to read: the word, a file, or broken JSON that names the method."""
    return is_tree(text) or text.endswith(".json") or (text.startswith("{") and METHOD in text)


def tree_options(args: Any) -> TreeOptions | None:
    """The options of the tree that EngineArgs ask for, --spec-model and --spec-tokens included.

    None for another method.
    Raises TreeOptionError.
    """
    given = asked(args)
    if given is None:
        return None
    for flag, key, value in (
        ("spec_model", "ssms", args.spec_model),
        ("spec_tokens", "num_nodes", args.spec_tokens),
    ):
        if value is None:
            continue
        if given.get(key):
            raise TreeOptionError(f"{flag}: {value!r} and {WHERE}.{key} say the same thing; give one of them")
        given[key] = value
    return TreeOptions.from_value(given)


def asked(args: Any) -> dict[str, Any] | None:
    """What EngineArgs say of a tree, as a new dict; None when the method is another's. Raises TreeOptionError."""
    given = said(args.speculative_config)
    methods = [each for each in (given.get("method"), args.spec_method) if each is not None]
    others = [each for each in methods if not is_tree(each)]
    if len(others) == len(methods):
        refuse_slip(given, methods)
        return None
    if others:
        raise TreeOptionError(
            f"spec_method: {args.spec_method!r} and {WHERE}.method={given['method']!r} are two methods; give one"
        )
    return read_value(given)


def said(value: Any) -> Mapping[str, Any]:
    """The dict in speculative_config as far as it can be a tree's; what vLLM must read or refuse itself is empty."""
    if isinstance(value, TreeOptions):
        return {"method": METHOD, **value.as_dict()}
    if isinstance(value, str):
        word = value.strip()
        return read_value(word) if is_tree_text(word) or resembles_tree(word) else {}
    return value if isinstance(value, Mapping) else {}


def refuse_slip(given: Mapping[str, Any], methods: Sequence[Any]) -> None:
    """Raise TreeOptionError when a tree was meant and not named: vLLM's own message would not lead there."""
    for method in methods:
        if resembles_tree(method):
            raise TreeOptionError(f"{WHERE}.method: {method!r} is no method; did you mean {METHOD!r}?")
    if methods or not isinstance(given, Mapping):
        return
    options = {each.name for each in fields(TreeOptions)}
    for key in given:
        if str(key).replace("-", "_") in options:
            raise TreeOptionError(f'{WHERE}.{key}: an option of method {METHOD!r}; add "method": "{METHOD}"')


def refuse_other_method(args: Any) -> None:
    """Raise TreeOptionError when a tree was asked for, and vLLM found another method in the model's own folder."""
    if not str(args.worker_cls).startswith("specinfer_vllm."):
        return
    method = (args.speculative_config or {}).get("method")
    raise TreeOptionError(
        f"{WHERE}.method: {METHOD!r} was asked for and the method is {method!r}, which the model's folder brings "
        "(speculators_config). Serve the model that it names as verifier, or leave 'tree' out"
    )


PATCHES: tuple[type[Patch], ...] = (
    SpeculativeFlagTakesTree,
    TreeReachesSpeculativeConfig,
    TreeChoosesWorkerAndScheduler,
)
