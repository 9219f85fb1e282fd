# SPDX-License-Identifier: Apache-2.0
"""Drafts on their way from a worker to the scheduler, with the topology that vLLM's own type has no place for."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.outputs import DraftTokenIds


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """vLLM's drafts plus each node's parent.

    parents  requests x nodes    local index of the parent, 0 = root; nodes count from 1 in the order of draft_token_ids
    """

    parents: list[list[int]] = field(default_factory=list)
