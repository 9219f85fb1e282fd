# SPDX-License-Identifier: Apache-2.0
"""Which requests of the V2 runner get a tree, a chain or nothing, and how long it may be."""

import pytest
import torch
from vllm import SamplingParams

from specinfer_vllm.config import MAX_WIDTH, TreeOptions
from specinfer_vllm.engine import device_requests
from specinfer_vllm.engine.device_requests import DeviceRequests


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch):
    """vLLM's buffers that a GPU reads from the host; without a GPU a plain tensor says the same."""

    class Plain:
        def __init__(self, size, dtype):
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np, self.gpu = self.cpu.numpy(), None

        def copy_to_uva(self):
            self.gpu = self.cpu.clone()
            return self.gpu

    monkeypatch.setattr(device_requests, "UvaBackedTensor", Plain)


CASES = {
    "plain": ({}, MAX_WIDTH, None),
    "greedy": ({"temperature": 0}, MAX_WIDTH, None),
    "honoured at every row": ({"top_p": 0.5, "min_p": 0.1, "logit_bias": {3: 1.0}, "min_tokens": 2}, MAX_WIDTH, None),
    "repetition": ({"repetition_penalty": 1.2}, 1, None),
    "presence": ({"presence_penalty": 0.1}, 1, None),
    "frequency": ({"frequency_penalty": -0.1}, 1, None),
    "custom arguments": ({"extra_args": {"mine": 1}}, 0, "extra_args"),
}


def requests(**options) -> DeviceRequests:
    return DeviceRequests(4, 100, TreeOptions.from_value({"method": "tree", **options}), torch.device("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_a_request_gets_what_its_parameters_allow(name):
    given, branches, reason = CASES[name]
    limits = requests()
    limits.start(2, SamplingParams(**given), prompt_len=5)
    assert limits.known.np[0, 2] == branches
    assert limits.refused.get(2) == reason


def test_bad_words_make_a_chain():
    limits, params = requests(), SamplingParams(bad_words=["never"])
    limits.start(0, params, prompt_len=5)
    assert limits.known.np[0, 0] == 1


def test_the_option_bounds_the_branches():
    limits = requests(branches=2)
    limits.start(0, SamplingParams(), prompt_len=5)
    assert limits.known.np[0, 0] == 2


def test_sampled_requests_get_no_tree_from_the_greedy_rule():
    limits = requests(verifier="greedy")
    limits.start(0, SamplingParams(temperature=0.5), prompt_len=5)
    limits.start(1, SamplingParams(temperature=0), prompt_len=5)
    assert limits.known.np[0, :2].tolist() == [0, MAX_WIDTH]
    assert limits.refused == {0: "sampled"}
    limits.start(0, SamplingParams(temperature=0), prompt_len=5)  # another request on the slot
    assert limits.refused == {}


def test_custom_processors_may_look_at_any_request():
    limits = requests()
    limits.has_custom = True
    limits.start(0, SamplingParams(), prompt_len=5)
    assert (limits.known.np[0, 0], limits.refused) == (0, {0: "custom_processors"})


@pytest.mark.parametrize(("max_tokens", "last"), [(7, 12), (200, 100), (None, 100)])
def test_a_tree_ends_where_the_request_does(max_tokens, last):
    limits = requests()
    limits.start(0, SamplingParams(max_tokens=max_tokens), prompt_len=5)
    limits.publish()
    assert limits.last[0] == last
