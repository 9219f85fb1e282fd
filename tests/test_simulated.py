# SPDX-License-Identifier: Apache-2.0
"""The served engine accepts what a replay of the recorded chats says its proposers deserve."""

import pytest
from engines import engine

from specinfer_vllm.bench import prompts, simulate
from specinfer_vllm.bench.device_replay import DeviceReplay
from specinfer_vllm.bench.recording import record
from specinfer_vllm.propose.ensemble import Ensemble
from specinfer_vllm.propose.ngram import NgramProposer
from specinfer_vllm.propose.recycling import RecyclingProposer

pytestmark = pytest.mark.engine
NODES = 8


def test_the_engine_reaches_the_simulation(model_path, tmp_path):
    chats = [prompt.messages for prompt in prompts.load(["mtbench", "humaneval"], 6)]
    recorded = record(model_path, chats, 64, simulate.WIDTH, tmp_path / "chats.npz")
    proposers = [NgramProposer(recorded.vocab_size), RecyclingProposer(recorded.vocab_size, 1)]
    simulated = simulate.replay(recorded, Ensemble(proposers), NODES).per_step
    longest = max(len(recorded.text(chat)[0]) for chat in range(recorded.num_chats))
    device = DeviceReplay("recycling", recorded.vocab_size, 1, longest)  # as the V2 runner drafts
    assert simulate.replay(recorded, Ensemble([device]), NODES).per_step >= 0.95 * simulated
    options = {"method": "tree", "num_nodes": NODES, "row_cost": 0, "primer": "none"}
    with engine(model_path, max_model_len=1024, max_num_seqs=1, speculative_config=options) as llm:
        served = simulate.served(llm, recorded)
    assert simulated > 1.2
    assert served >= 0.95 * simulated
