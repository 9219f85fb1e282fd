# SPDX-License-Identifier: Apache-2.0
"""How `tree` gets from the user into vLLM's configuration (vllm/engine/arg_utils.py, class EngineArgs)."""

from __future__ import annotations

import json
from typing import Any

from specinfer_vllm.config import METHOD, TreeOptions, read_value
from specinfer_vllm.patches.patch import Hook, Patch

ARG_UTILS = "vllm.engine.arg_utils"


def read_flag(text: str) -> dict[str, Any] | None:
    """What --speculative-config takes: the bare method, JSON, or nothing. Raises ValueError for argparse to report."""
    if text in ("", "None"):
        return None
    return dict(read_value(text))


class SpeculativeFlagTakesTree(Patch):
    """`--speculative-config tree` and `--spec-method tree` pass vLLM's parser.

    Upstream reads the flag with json.loads, which refuses a bare word, and closes the choices of --spec-method.
    """

    target = Hook(ARG_UTILS, "EngineArgs.add_cli_args", ("parser",))
    reason = "the flag is parsed by json.loads and the method is a closed list"

    @staticmethod
    def replacement(original: Any, parser: Any) -> Any:
        parser = original(parser)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.type = read_flag
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
    )
    reason = "SpeculativeConfig knows a closed list of methods and fields"

    @staticmethod
    def replacement(original: Any, self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        if not asks_for_tree(self):
            return original(self, target_model_config, target_parallel_config)
        from specinfer_vllm.patches.speculative_config import TreeSpeculativeConfig

        return TreeSpeculativeConfig(
            options=tree_options(self).as_dict(),
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )


class TreeChoosesWorkerAndScheduler(Patch):
    """A tree brings its own worker and scheduler classes, and is checked before anything is loaded."""

    target = Hook(ARG_UTILS, "EngineArgs.create_engine_config", ("self", "usage_context"))
    reason = "worker_cls and scheduler_cls are strings on EngineArgs; combinations are known only on the finished config"

    @staticmethod
    def replacement(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.speculative_config, str):
            self.speculative_config = read_flag(self.speculative_config)
        if not asks_for_tree(self):
            return original(self, *args, **kwargs)
        from specinfer_vllm.engine import launch

        options = tree_options(self)
        launch.prepare(self, options)
        config = original(self, *args, **kwargs)
        launch.check(config)
        return config


def asks_for_tree(args: Any) -> bool:
    """Whether these EngineArgs name the method `tree`, in any of the forms."""
    given = args.speculative_config
    if isinstance(given, str):
        given = read_flag(given)
    method = (given or {}).get("method")
    return METHOD in (method, args.spec_method)


def tree_options(args: Any) -> TreeOptions:
    """The options of a tree from EngineArgs, --spec-model and --spec-tokens included. Raises TreeOptionError."""
    given = dict(args.speculative_config or {})
    given.setdefault("method", METHOD)
    for flag, key, value in (("--spec-model", "ssms", args.spec_model), ("--spec-tokens", "num_nodes", args.spec_tokens)):
        if value is None:
            continue
        if key in given:
            raise ValueError(f"{flag} and speculative_config.{key} say the same thing; give one of them")
        given[key] = value
    return TreeOptions.from_value(given)


PATCHES: tuple[type[Patch], ...] = (
    SpeculativeFlagTakesTree,
    TreeReachesSpeculativeConfig,
    TreeChoosesWorkerAndScheduler,
)


def dump(options: TreeOptions) -> str:
    """The options as one line of JSON, as a user could pass them."""
    return json.dumps({"method": METHOD, **options.as_dict()})
