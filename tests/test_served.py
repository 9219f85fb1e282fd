# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with token trees, as its clients see it: over HTTP, through the official openai package."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

pytestmark = pytest.mark.engine

VLLM = Path(sys.executable).with_name("vllm")
START_SECONDS = 240
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = "Write a Python function that adds two numbers, then one that subtracts them."
# vLLM's own sampler serves a request with arguments for custom processors, one token a step.
UNDRAFTED = {"vllm_xargs": {"note": "no processor reads this"}}


def environment() -> dict[str, str]:
    """A server has an engine process of its own, whatever the in-process tests set."""
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return kept | {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
    }


def command(model: Path, port: int, speculative: dict) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "smol",
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 1 << 29,
        "speculative-config": json.dumps(speculative),
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [str(VLLM), "serve", str(model), "--enforce-eager", *flags]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@dataclass
class Server:
    """A running server; its process leads a group of its own."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, text: str, extra: dict | None = None, **params):
        """One chat's response, greedy unless told otherwise."""
        params = {"max_tokens": 28, "temperature": 0, "extra_body": extra, **params}
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="smol", messages=messages, **params)

    def fetch(self, path: str, body: dict | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """Sum over the metric's labels."""
        lines = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.fetch("/metrics"), re.MULTILINE)
        return sum(map(float, lines))

    def stats(self) -> dict:
        return json.loads(self.fetch("/collective_rpc", {"method": "tree_stats"}))["results"][0]

    def wait_until_healthy(self) -> None:
        for _ in range(START_SECONDS):
            if self.process.poll() is not None:
                break
            try:
                self.fetch("/health")
                return
            except OSError:
                time.sleep(1)
        pytest.fail(f"the server did not start\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End whatever is left of it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="module")
def server(model_path, ssm_path, tmp_path_factory) -> Iterator[Server]:
    """One server for all tests: an SSM and both draft-free proposers, every node verified."""
    speculative = {
        "method": "tree",
        "ssms": [{"model": str(ssm_path), "width": 2}],
        "proposers": ["ngram", "recycling"],
        "num_nodes": 8,
        "depth": 3,
        "row_cost": 0,
    }
    port, log = free_port(), tmp_path_factory.mktemp("served") / "server.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(model_path, port, speculative),
            env=environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Server(process, port, log)
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.kill()


def test_a_stream_a_whole_answer_and_one_without_drafts_are_the_same_text(server):
    before = server.stats()
    whole = server.ask(ASKED).choices[0]
    drafted = server.stats()
    chunks = list(server.ask(ASKED, stream=True, stream_options={"include_usage": True}))
    undrafted = server.ask(ASKED, UNDRAFTED).choices[0]
    after = server.stats()

    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.message.content == undrafted.message.content
    assert len([delta for delta in deltas if delta]) > 1
    assert chunks[-1].usage.completion_tokens == 28
    assert {whole.finish_reason, undrafted.finish_reason} == {"length"}
    assert drafted["accepted"] > before["accepted"]
    assert after["undrafted"]["extra_args"] - before["undrafted"].get("extra_args", 0) >= 27


def test_accepted_tokens_show_in_the_metrics(server):
    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    before = [server.metric(name) for name in names]
    server.ask("Repeat these words, three times: red green blue. red green blue. red green blue.")
    accepted, drafted = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert 0 < accepted < drafted
    stats = server.stats()
    assert stats["tokens_per_step"] > 1
    assert stats["proposer_failures"] == {}
    assert all(stats["proposed_by"][name] > 0 for name in ("ssm0", "ngram", "recycling"))


# Eight requests that share batches and nothing else.
MIXED = {
    "greedy": {"text": ASKED},
    "logprobs": {"text": "Name three rivers.", "logprobs": True, "top_logprobs": 3},
    "stop": {"text": ASKED, "stop": ["return", "nothing like this"]},
    "three seeded samples": {"text": "Tell me a joke.", "n": 3, "seed": 7, "temperature": 1.0},
    "penalty": {"text": "The sea, the sea, the", "extra": {"repetition_penalty": 1.3}},
    "schema": {
        "text": "A person as JSON.",
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "top p": {"text": "Where do cats sleep?", "temperature": 0.8, "top_p": 0.9, "seed": 3, "extra": {"top_k": 20}},
    "sampled penalty": {"text": "Say something new.", "temperature": 0.9, "presence_penalty": 0.5, "seed": 11},
}


@pytest.fixture(scope="module")
def together(server) -> dict:
    """The answers of all eight, asked at the same time."""
    with ThreadPoolExecutor(len(MIXED)) as pool:
        asked = {name: pool.submit(server.ask, **request) for name, request in MIXED.items()}
        return {name: each.result().choices for name, each in asked.items()}


@pytest.mark.parametrize("name", MIXED)
def test_a_request_gets_among_seven_others_what_it_gets_alone(server, together, name):
    alone = server.ask(**MIXED[name]).choices
    assert [each.message.content for each in together[name]] == [each.message.content for each in alone]
    assert [each.finish_reason for each in together[name]] == [each.finish_reason for each in alone]


def test_parameters_of_a_mixed_batch_are_honoured(server, together):
    texts = {name: [each.message.content for each in choices] for name, choices in together.items()}
    assert together["stop"][0].finish_reason == "stop"
    assert not any(word in texts["stop"][0] for word in MIXED["stop"]["stop"])
    assert len(set(texts["three seeded samples"])) == 3
    person = json.loads(texts["schema"][0])
    assert person.keys() == {"name", "age"} and person["name"] in ("Ada", "Bob") and 1 <= person["age"] <= 99
    tokens = together["logprobs"][0].logprobs.content
    assert "".join(token.token for token in tokens) == texts["logprobs"][0]
    assert all(token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 3 for token in tokens)
    assert not {"penalties", "token_mask"} & set(server.stats()["undrafted"])


def test_logprobs_are_those_of_one_token_a_step(server):
    asked = {"text": "Name three rivers.", "logprobs": True, "top_logprobs": 2}
    tree, plain = (server.ask(extra=extra, **asked).choices[0].logprobs.content for extra in (None, UNDRAFTED))
    assert [token.token for token in tree] == [token.token for token in plain]
    assert [token.logprob for token in tree] == pytest.approx([token.logprob for token in plain], abs=1e-3)


def test_a_client_that_leaves_in_mid_stream_leaves_the_server_healthy(server):
    expected = server.ask(ASKED).choices[0].message.content
    stream = server.ask("Write a long story.", {"ignore_eos": True}, max_tokens=400, stream=True)
    assert next(iter(stream)) is not None
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    deadline = time.monotonic() + 5  # 400 tokens would take far longer
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.ask(ASKED).choices[0].message.content == expected


def test_a_wrong_option_ends_the_start_before_weights_load(model_path):
    begin = time.monotonic()
    done = subprocess.run(
        command(model_path, free_port(), {"method": "tree", "num_nodse": 4}),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "speculative_config.num_nodse: unknown option; did you mean 'num_nodes'?" in said
    assert "EngineCore" not in said and "Loading" not in said
    assert time.monotonic() - begin < 60


def test_sigterm_ends_the_server_and_all_of_its_processes(server):
    """Last in this file: the server is gone afterwards."""
    server.process.terminate()
    assert server.process.wait(timeout=30) == 0
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"processes of the server are left\n{server.log.read_text()[-2000:]}")
