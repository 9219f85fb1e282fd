# SPDX-License-Identifier: Apache-2.0
"""What an SSM hands to its model, without loading one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from specinfer_vllm.propose import ssm  # noqa: E402


def test_a_warm_up_takes_tokens_and_positions_for_two_things(monkeypatch):
    """Where they are one tensor, what is compiled reads one for the other ever after: positions past all tables."""
    monkeypatch.setattr(ssm, "set_forward_context", lambda *args, **kwargs: nullcontext())
    taken = {}
    proposer = SimpleNamespace(
        device=torch.device("cpu"), llm_config=None, own_group=nullcontext, model=lambda **inputs: taken.update(inputs)
    )
    ssm.SsmProposer.warm_up(proposer, 3)
    tokens, positions = taken["input_ids"], taken["positions"]
    assert tokens.shape == positions.shape == (3,)
    assert tokens.untyped_storage().data_ptr() != positions.untyped_storage().data_ptr()
