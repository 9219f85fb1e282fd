# SPDX-License-Identifier: Apache-2.0
"""Every logits processor is there for a tree (vllm/v1/sample/logits_processor, vllm/sampling_params.py).

vLLM loads only min_tokens beside a speculative method and refuses requests with min_p or logit_bias, because its
rejection sampler cannot apply them to drafts. A tree applies them row by row (engine/row_parameters.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specinfer_vllm.patches.patch import Hook, Patch


class TreeTakesEveryParameter(Patch):
    """Requests with min_p or logit_bias are admitted when the method is a tree."""

    target = Hook(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "min_p and logit_bias are refused beside every speculative method",
    )

    @staticmethod
    def replacement(original: Any, self: Any, speculative_config: Any) -> None:
        """Check as `original` unless the method is a tree."""
        if not hasattr(speculative_config, "tree"):
            original(self, speculative_config)


class TreeLoadsEveryProcessor(Patch):
    """The runner of a tree gets the processors that it would get without speculation, the user's own included."""

    target = Hook(
        "vllm.v1.worker.gpu_model_runner",
        "build_logitsprocs",
        ("vllm_config", "*"),
        "only min_tokens is loaded beside a speculative method",
    )

    @staticmethod
    def replacement(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """What `original` builds for the same configuration without its tree."""
        if hasattr(vllm_config.speculative_config, "tree"):
            vllm_config = copy.copy(vllm_config)
            vllm_config.speculative_config = None
        return original(vllm_config, *args, **kwargs)


@contextmanager
def every_processor() -> Iterator[None]:
    """Let the runner that is built meanwhile load every logits processor. Raises HookMissing."""
    TreeLoadsEveryProcessor.apply()
    try:
        yield
    finally:
        TreeLoadsEveryProcessor.revert()


PATCHES: tuple[type[Patch], ...] = (TreeTakesEveryParameter,)
