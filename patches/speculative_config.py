# SPDX-License-Identifier: Apache-2.0
"""The subclass of vLLM's SpeculativeConfig that carries a tree's options through pickling.

Imported while a spawned process unpickles its configuration, so it must not touch a device nor import the runners.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

from pydantic import Field
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from specinfer_vllm.config import METHOD, TreeOptions

# The V1 runner builds this class through its documented `custom_class` method; the same label keeps
# asynchronous scheduling off, which the V1 adapter cannot follow.
V1_METHOD = "custom_class"
DRAFTER = "specinfer_vllm.engine.drafter.TreeDrafter"
# vLLM lets asynchronous scheduling stay on beside this label only, and the V2 runner refuses the other.
V2_METHOD = "draft_model"


def uses_runner_v2() -> bool:
    """Which runner serves a tree, as vLLM chooses it: V2 wherever Triton runs, or as the user says."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    return HAS_TRITON if wanted is None else wanted


@config(repr=False)  # pydantic's own repr would print both ModelConfigs on every log line
class TreeSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative configuration for token trees.

    Upstream: vllm/config/speculative.py. Its __post_init__ changes with every release and knows nothing of trees, so it
    is not called; what the engine reads from it is set here. vLLM >=0.32,<0.34.
    """

    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        tree = TreeOptions.from_value(self.options)
        self.method, self.model = (V2_METHOD, None) if uses_runner_v2() else (V1_METHOD, DRAFTER)
        self.num_speculative_tokens = tree.max_nodes
        self.prompt_lookup_max = 0
        self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    @cached_property
    def tree(self) -> TreeOptions:
        """The checked options."""
        return TreeOptions.from_value(self.options)

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots an SSM writes behind the LLM's last: the next root and its own tree. Without SSMs none."""
        return 1 + self.tree.max_ssm_slots if self.tree.ssms else 0

    def use_ngram(self) -> bool:
        """Whether the V2 runner keeps committed tokens in device memory, for someone who scans them: draft-free
        proposers do.
        """
        return self.method == V2_METHOD and bool(self.tree.free_proposers)

    def compute_hash(self) -> str:
        """Distinguishes compiled graphs: SSMs are compiled beside the LLM."""
        text = json.dumps(self.options, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"TreeSpeculativeConfig(method={METHOD!r}, {self.options})"


def tree_config(vllm_config: Any) -> TreeSpeculativeConfig | None:
    """The tree's configuration in a VllmConfig, or None."""
    found = vllm_config.speculative_config
    return found if isinstance(found, TreeSpeculativeConfig) else None
