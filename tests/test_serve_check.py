# SPDX-License-Identifier: Apache-2.0
"""examples/gpu_serve_check.sh and its load generator, against servers that only pretend to have a model."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from specinfer_vllm.bench import serve_check  # noqa: E402

SCRIPT = Path(__file__).resolve().parent.parent / "examples/gpu_serve_check.sh"
TOKENS = 6
DRIFT_AT = 3


class FakeServer(ThreadingHTTPServer):
    """Answers a chat with ids made of its words; what it does wrong is told by `drift` and `tells_ids`.

    drift     added to the fourth token of the chats that are long enough to be meant
    gap       distance of the two likeliest logprobs at every place; the second is the token that a drift of 1 gives
    accepted  of every answer's tokens, as a draft's
    """

    daemon_threads = True

    def __init__(self, port: int = 0, drift: int = 0, gap: float = 1.0, accepted: int = 0, tells_ids: bool = True):
        super().__init__(("127.0.0.1", port), Handler)
        self.drift, self.gap, self.accepted, self.tells_ids = drift, gap, accepted, tells_ids
        self.lock, self.counters = threading.Lock(), dict.fromkeys(serve_check.COUNTERS.values(), 0)
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """The four pages that are asked for."""

    server: FakeServer

    def log_message(self, *args) -> None:
        pass

    def reply(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply("")
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "fake"}]}))
        elif self.path == "/metrics":
            labels = '{model_name="fake",engine="0"}'
            lines = [f"{name}{labels} {value:.1f}" for name, value in self.server.counters.items()]
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels[:-1]},position="0"}} 99.0')
            self.reply("\n".join(["# HELP nothing", *lines, ""]))
        else:
            self.reply("no such page", 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(0.02)
        base = sum(map(ord, asked["messages"][0]["content"])) % 1000
        ids = [base + 10 * i for i in range(asked["max_tokens"])]
        likeliest = [[(each, -0.5), (each + 1, -0.5 - server.gap)] for each in ids]
        ids[DRIFT_AT] += server.drift
        choice = {"index": 0, "message": {"role": "assistant", "content": "?"}, "finish_reason": "length"}
        if server.tells_ids:
            choice["token_ids"] = ids
        if asked.get("logprobs"):
            assert asked["return_tokens_as_token_ids"] and asked["top_logprobs"] == serve_check.LIKELIEST
            choice["logprobs"] = {
                "content": [
                    {
                        "token": f"token_id:{two[0][0]}",
                        "top_logprobs": [{"token": f"token_id:{t}", "logprob": p} for t, p in two],
                    }
                    for two in likeliest
                ]
            }
        with server.lock:
            server.now -= 1
            for key, value in (
                ("generated", len(ids)),
                ("accepted", server.accepted),
                ("drafted", 2 * server.accepted),
            ):
                server.counters[serve_check.COUNTERS[key]] += value
        self.reply(json.dumps({"choices": [choice]}))


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    """Chats of our own: nothing is downloaded."""
    monkeypatch.setattr(
        serve_check, "load_chats", lambda count: [[{"role": "user", "content": f"chat {i}"}] for i in range(count)]
    )


@pytest.fixture
def ask(tmp_path):
    """Start a fake server, measure it; returns its file."""
    count = iter(range(100))

    def measured(name: str, *more: str, **fake) -> Path:
        server, out = FakeServer(**fake), tmp_path / f"{next(count)}-{name}.json"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            words = [
                "ask",
                "--url",
                server.url,
                "--name",
                name,
                "--out",
                str(out),
                "--tokens",
                str(TOKENS),
                "--chats",
                "3",
            ]
            measured.code = serve_check.main([*words, "--concurrency", "1", "4", "--repeats", "2", *more])
            measured.most = server.most
        finally:
            server.shutdown()
            server.server_close()
        return out

    return measured


# -- ask ---------------------------------------------------------------------------------------------------------------


def test_a_server_is_measured(ask):
    out = ask("tree", accepted=2)
    assert ask.code == 0 and ask.most == 4
    found = serve_check.Measured.load(out)
    assert (found.name, found.model, len(found.first)) == ("tree", "fake", 8)
    assert [run.concurrency for run in found.runs] == [1, 4, 1, 4]
    assert [len(run.tokens) for run in found.runs] == [3, 8, 3, 8]
    assert all(run.tokens == found.first[: len(run.tokens)] for run in found.runs)
    assert [(run.generated, run.accepted, run.drafted) for run in found.runs[:2]] == [(18, 6, 12), (48, 16, 32)]
    assert set(found.likeliest[0][0]) == {str(found.first[0][0]), str(found.first[0][0] + 1)}


def test_a_server_that_tells_no_ids_cannot_be_checked(ask, capsys):
    assert not ask("tree", tells_ids=False).exists()
    assert ask.code == 2 and "no token_ids in the answer" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(tmp_path, capsys):
    assert serve_check.main(["ask", "--url", "http://127.0.0.1:9", "--name", "tree", "--out", str(tmp_path / "x")]) == 2
    assert "http://127.0.0.1:9: " in capsys.readouterr().err


# -- compare -----------------------------------------------------------------------------------------------------------


def test_equal_texts_pass_and_the_table_is_printed(ask, capsys):
    files = [ask("plain"), ask("chain", accepted=2), ask("tree", accepted=3)]
    capsys.readouterr()
    assert serve_check.main(["compare", *map(str, files)]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows[2:]] == [["1", "plain"], ["", "chain"], ["", "tree"]] + [
        ["4", "plain"],
        ["", "chain"],
        ["", "tree"],
    ]
    assert [row[5:] for row in rows[2:5]] == [["1.00", ""], ["1.50", "50%"], ["2.00", "50%"]]
    assert rows[2][4] == "1.00x" and all(float(row[2]) > 0 for row in rows[2:])
    assert "passed: the texts are plain vLLM's" in said and "tree: 30 texts; 0 different" in said


def test_differing_texts_are_reported_and_end_with_1(ask, capsys):
    files = [ask("plain"), ask("chain"), ask("tree", drift=1)]
    capsys.readouterr()
    assert serve_check.main(["compare", *map(str, files)]) == 1
    said = capsys.readouterr().out
    first = serve_check.Measured.load(files[0]).first[0][DRIFT_AT]
    line = (
        f"tree, chat 0, token 3: plain {first}, here {first + 1}, plain's logprobs -0.5000 and -1.5000: NOT EXPLAINED"
    )
    assert line in said and "tree: 30 texts; 8 different" in said and "8 of them not explained" in said
    assert "chain: 30 texts; 0 different" in said and said.rstrip().endswith("FAILED: texts differ from plain vLLM's")


def test_a_token_that_plain_did_not_think_of_is_never_explained(ask, capsys):
    files = [ask("plain", gap=0.0), ask("tree", drift=2)]
    assert serve_check.main(["compare", *map(str, files), "--tie", "100"]) == 1
    assert "not among plain's 5 likeliest: NOT EXPLAINED" in capsys.readouterr().out


def test_a_tie_explains_a_difference_and_is_printed(ask, capsys):
    files = [ask("plain", gap=2e-4), ask("tree", drift=1)]
    assert serve_check.main(["compare", *map(str, files)]) == 0
    assert "explained: a tie, 2.0e-04 apart (up to 0.001)" in capsys.readouterr().out
    assert serve_check.main(["compare", *map(str, files), "--tie", "1e-4"]) == 1


def test_a_text_that_plain_gives_too_is_explained(ask, capsys):
    files = [ask("plain"), ask("plain", drift=1), ask("tree", drift=1)]
    assert serve_check.main(["compare", *map(str, files)]) == 0
    assert "explained: plain vLLM gave this text too in another batch" in capsys.readouterr().out


def test_a_text_that_ends_early_is_reported(ask, capsys):
    files = [ask("plain"), ask("tree", "--tokens", "5")]
    assert serve_check.main(["compare", *map(str, files)]) == 1
    assert "token 5: plain has 6 tokens, here 5: NOT EXPLAINED" in capsys.readouterr().out


def test_plain_is_asked_for(ask, capsys, tmp_path):
    assert serve_check.main(["compare", str(ask("tree"))]) == 2
    assert "'plain' and another server are compared; given: tree" in capsys.readouterr().err
    assert serve_check.main(["compare", str(tmp_path / "none.json")]) == 2


# -- the script --------------------------------------------------------------------------------------------------------


def bash(*words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", *words], capture_output=True, text=True, check=False, timeout=120, **more)


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sh")), ids=lambda script: script.name)
def test_the_syntax_is_bashs(script):
    done = bash("-n", str(script))
    assert done.returncode == 0, done.stderr
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_help_needs_nothing():
    done = bash(str(SCRIPT), "--help")
    assert done.returncode == 0 and "--concurrency" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "--nope: unknown option"),
        (["--port"], "--port: a value is missing"),
        (["--tokens", "many"], "many: a whole number above 0"),
        (["--concurrency", "1 0"], "0: a whole number above 0"),
    ],
)
def test_a_wrong_word_is_named(words, message):
    done = bash(str(SCRIPT), *words)
    assert done.returncode == 2 and message in done.stderr


FAKE_VLLM = f"""#!{sys.executable}
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_serve_check import FakeServer
words = sys.argv[1:]
assert words[0] == "serve", words
tree = words[words.index("--speculative-config") + 1] if "--speculative-config" in words else ""
name = "chain" if "branches" in tree else "tree" if tree else "plain"
with open(os.environ["FAKE_LOG"], "a") as log:
    print(json.dumps([name, str(os.getpid()), *words]), file=log)
if os.environ.get("FAKE_DIES") == name:
    sys.exit("the model is nowhere")
if "FAKE_MUTE" in os.environ:
    time.sleep(600)
drift = int(os.environ.get("FAKE_DRIFT", 0)) if name == "tree" else 0
FakeServer(int(words[words.index("--port") + 1]), drift=drift).serve_forever()
"""
FAKE_DOCTOR = """#!/bin/bash
[ "$FAKE_DOCTOR" = refuses ] && [[ "$*" = *tree* ]] && { echo "refused: enable_lora: no"; exit 1; }
printf 'tables\\n\\n%s\\nrunner V2\\n' "${*:3}"
"""
# The load generator with chats of its own, as in the tests above.
FAKE_PYTHON = f"""#!/bin/bash
if [ "$1 $2" = "-m specinfer_vllm.bench.serve_check" ]; then
  exec {sys.executable} -c '
import sys
from specinfer_vllm.bench import serve_check
serve_check.load_chats = lambda count: [[{{"role": "user", "content": f"chat {{i}}"}}] for i in range(count)]
sys.exit(serve_check.main())' "${{@:3}}"
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def script(tmp_path):
    """Run the script with a vLLM that only pretends; returns what it did, and the words that started its servers."""
    tools, log = tmp_path / "tools", tmp_path / "started"
    tools.mkdir()
    for name, text in {"vllm": FAKE_VLLM, "specinfer": FAKE_DOCTOR, "python": FAKE_PYTHON}.items():
        (tools / name).write_text(text)
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)

    def begin(*words: str, **environment: str) -> subprocess.Popen:
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        variables = os.environ | {"PATH": path, "FAKE_LOG": str(log), "TMPDIR": str(tmp_path), **environment}
        return subprocess.Popen(
            ["bash", str(SCRIPT), *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        process = begin("--cpu", "--repeats", "1", *words, **environment)
        said = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, *said), started()

    def started() -> list[list[str]]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    run.begin, run.started = begin, started
    return run


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_three_servers_are_measured_in_turn_and_stopped(script, tmp_path):
    done, started = script("--rounds", "2", "my/model")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [words[0] for words in started] == ["plain", "chain", "tree", "tree", "chain", "plain"]
    assert all(words[2:4] == ["serve", "my/model"] for words in started)
    assert not any(is_alive(int(words[1])) for words in started)
    assert "passed: the texts are plain vLLM's" in done.stdout and done.stdout.count("runner V2") == 3
    assert re.search(r"^\| 1 \| plain \| [0-9.]+ \|", done.stdout, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started", "tools"]


def test_ssms_reach_chain_and_tree_and_further_flags_reach_vllm(script, tmp_path):
    done, started = script("--out", str(tmp_path / "out"), "my/model", "one", "the/other", "--", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(words[words.index("--seed") + 1] == "1" for words in started)
    chain, tree = (json.loads(words[words.index("--speculative-config") + 1]) for words in started[1:])
    assert chain == {
        "method": "tree",
        "branches": 1,
        "ssms": [{"model": "one", "width": 1}, {"model": "the/other", "width": 1}],
    }
    assert tree == {"method": "tree", "ssms": [{"model": "one"}, {"model": "the/other"}]}
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".log"}


def test_a_tree_that_says_something_else_ends_with_1(script):
    done, started = script("my/model", FAKE_DRIFT="1")
    assert done.returncode == 1 and "NOT EXPLAINED" in done.stdout and "FAILED" in done.stdout
    assert "logs and measurements: " in done.stderr
    assert not any(is_alive(int(words[1])) for words in started)


def test_a_server_that_dies_shows_the_end_of_its_log(script):
    done, started = script("my/model", FAKE_DIES="chain")
    assert done.returncode == 2 and [words[0] for words in started] == ["plain", "chain"]
    assert "chain: the server ended before it answered" in done.stderr and "the model is nowhere" in done.stderr
    assert not any(is_alive(int(words[1])) for words in started)


def test_a_server_that_never_answers_is_stopped(script):
    done, started = script("--start", "2", "my/model", FAKE_MUTE="1")
    assert done.returncode == 2 and "plain: the server does not answer after 2 seconds (--start)" in done.stderr
    assert not any(is_alive(int(words[1])) for words in started)


def test_a_script_that_is_ended_takes_its_server_along(script):
    process = script.begin("--cpu", "my/model", FAKE_MUTE="1")
    deadline = time.monotonic() + 60
    while not script.started() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert [is_alive(int(words[1])) for words in script.started()] == [False]


def test_what_the_doctor_refuses_is_not_started(script):
    done, started = script("my/model", FAKE_DOCTOR="refuses")
    assert done.returncode == 2 and not started
    assert "chain: specinfer doctor refuses it" in done.stderr and "refused: enable_lora: no" in done.stderr


def test_a_machine_without_a_gpu_is_told_so(script):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    process = script.begin("my/model")
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and not script.started()
    assert "no GPU: torch finds none" in said and "--cpu" in said


def test_a_machine_without_vllm_is_told_so(tmp_path):
    (tmp_path / "examples").mkdir()
    copy = shutil.copy(SCRIPT, tmp_path / "examples")  # away from the checkout's own environment
    done = bash(str(copy), env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "not found; activate the environment" in done.stderr
