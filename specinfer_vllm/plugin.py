# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group vllm.general_plugins: vLLM calls `register` once in each of its processes.

It imports no runner and touches no device (a forked engine would inherit a broken one), and it never raises into the
host: on a vLLM it does not know, it names the missing hook and stands aside.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specinfer_vllm.patches.patch import SUPPORTED_VERSIONS, HookMissing, is_version_in, vllm_version

if TYPE_CHECKING:
    from specinfer_vllm.engine.outlook import Outlook

# Below vLLM's logger, so that its handlers and level apply.
logger = logging.getLogger("vllm.specinfer")


def register() -> None:
    """Hook `tree` into this process's vLLM, all patches or none."""
    try:
        if is_version_in(vllm_version(), SUPPORTED_VERSIONS):
            apply_patches()
        else:
            stand_aside("vLLM %s is not one of the versions it knows (%s)", vllm_version(), SUPPORTED_VERSIONS)
    except HookMissing as missing:
        stand_aside("%s; `specinfer doctor` says more", missing)
    except Exception:
        logger.exception("specinfer-vllm stands aside: it could not hook into vLLM; `specinfer doctor` says more")


def stand_aside(reason: str, *values: object) -> None:
    """Say why `tree` is not available in this process."""
    logger.warning(f"specinfer-vllm stands aside, `--speculative-config tree` is not available: {reason}", *values)


def apply_patches() -> None:
    """Apply every patch that is not applied yet.

    Raises HookMissing before the first change when a hook is not as we know it; what is applied when anything else
    fails is taken back.
    """
    from specinfer_vllm.patches import hooks
    from specinfer_vllm.patches.llvmlite_library import disown_dict

    hooks.check(hooks.PLUGIN)
    applied = []
    try:
        for patch in hooks.PATCHES:
            if not patch.is_applied():
                patch.apply()
                applied.append(patch)
    except Exception:
        for patch in reversed(applied):
            patch.revert()
        raise
    if "llvmlite" in sys.modules:  # a script that imports numba is imported again by each process that it spawns
        disown_dict()


def device() -> tuple[str, str | None]:
    """What this environment's vLLM runs on, and why trees do not run there (None where they do)."""
    from vllm.platforms import current_platform

    from specinfer_vllm.engine import launch

    return current_platform.device_name or "no device", launch.device_problem()


def outlook(command_line: Sequence[str] | None) -> Outlook:
    """What a command line of `vllm serve` will get here; None = what `--speculative-config tree` alone gets."""
    from specinfer_vllm.engine import outlook

    return outlook.outlook(command_line)
