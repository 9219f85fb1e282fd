# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's greedy tokens are those of the V1 runner, both serving trees. All else: test_triton_runner_v2.py."""

import json
import os

import pytest
import tiny_model
from engines import engine
from test_triton_interpreter import RUNNING
from vllm import SamplingParams

pytestmark = pytest.mark.engine


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs both runners, a process each")
def test_both_runners_give_the_same_tokens(tmp_path):
    if not RUNNING or "runner_v2" not in RUNNING[-1].done:
        pytest.skip("test_triton_interpreter.py was not asked to run the V2 runner")
    assert RUNNING[-1].done["runner_v2"].wait(timeout=1500)
    status, output = RUNNING[-1].result["runner_v2"]
    assert status == 0, output
    said = json.loads(next(line for line in output.splitlines() if line.startswith('{"greedy"')))
    llm, ssm = tiny_model.make(tmp_path / "llm", layers=3), tmp_path / "ssm"
    tiny_model.cut(llm, ssm, 2)
    settings = said["settings"]
    tree = {"method": "tree", "ssms": [str(ssm)], "proposers": ["recycling"], "row_cost": 0, "num_nodes": 5, "depth": 3}
    with engine(llm, **settings, speculative_config=tree) as v1:
        for prompt, length, tokens in said["greedy"]:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            output = v1.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
            assert list(output.token_ids) == tokens
