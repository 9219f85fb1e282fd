# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group vllm.general_plugins: vLLM calls `register` once in each of its processes.

It imports no runner and touches no device (a forked engine would inherit a broken one), and it never raises into the
host: on a vLLM it does not know, it names the missing hook and stands aside.
"""

from __future__ import annotations

import logging

from specinfer_vllm.patches.patch import SUPPORTED_VERSIONS, HookMissing

# Below vLLM's logger, so that its handlers and level apply.
logger = logging.getLogger("vllm.specinfer")


def register() -> None:
    """Hook `tree` into this process's vLLM, all patches or none."""
    try:
        import vllm
        from packaging.specifiers import SpecifierSet

        if vllm.__version__.split("+")[0] not in SpecifierSet(SUPPORTED_VERSIONS, prereleases=True):
            logger.warning(
                "specinfer-vllm stands aside: vLLM %s is not one of the versions it knows (%s); "
                "`--speculative-config tree` is not available",
                vllm.__version__,
                SUPPORTED_VERSIONS,
            )
            return
        apply_patches()
    except HookMissing as missing:
        logger.warning("specinfer-vllm stands aside: %s; run `specinfer doctor`", missing)
    except Exception:
        logger.exception("specinfer-vllm stands aside: it could not hook into vLLM; run `specinfer doctor`")


def apply_patches() -> None:
    """Apply every patch of this process. Raises HookMissing before the first change when a target is missing."""
    from specinfer_vllm.patches.engine_args import PATCHES

    for patch in PATCHES:
        patch.target.check()
    for patch in PATCHES:
        if not patch.is_applied():
            patch.apply()
