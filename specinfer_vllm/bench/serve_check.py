# SPDX-License-Identifier: Apache-2.0
"""Load for servers that are compared: the same greedy chats, so many at a time, and whether the texts are plain vLLM's.

`ask` measures one running server and writes a file; `compare` reads those of plain, chain and tree, prints the table
and the texts that differ, and ends with 1 when a difference is not explained. examples/gpu_serve_check.sh does all.

A difference is explained when plain vLLM gave that very text too in one of its runs (its own batches differ), or when
plain vLLM held the other token as likely as its own, up to `--tie`, where the texts part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specinfer_vllm.printing import failed

PLAIN = "plain"
LIKELIEST = 5  # tokens whose logprobs are asked for at every place
SETS = ("mtbench", "humaneval")
COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
}
# Seconds until the server must have counted what it sent, and that one answer may take.
COUNTED, ANSWER = 5.0, 1800


@dataclass
class Run:
    """All chats once. tokens: output ids of each chat; the counters are the server's own for this run."""

    concurrency: int
    seconds: float
    tokens: list[list[int]]
    generated: int = 0
    accepted: int = 0
    drafted: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass
class Measured:
    """One server. first: its chats before anything was timed; likeliest: at each place of them, token id → logprob."""

    name: str
    model: str
    first: list[list[int]] = field(default_factory=list)
    likeliest: list[list[dict[str, float]]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Measured:
        """What `save` wrote. Raises OSError, ValueError."""
        read = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**read, "runs": [Run(**each) for each in read["runs"]]})


class ServerError(RuntimeError):
    """The server answered otherwise than a vLLM server that does its work."""


# -- ask ---------------------------------------------------------------------------------------------------------------


class Server:
    """A running server, over HTTP. tokens: most output tokens of a chat."""

    def __init__(self, session: Any, url: str, tokens: int) -> None:
        self.session, self.url, self.tokens, self.model = session, url.rstrip("/"), tokens, ""

    async def get(self, path: str) -> str:
        """A page's text. Raises ServerError."""
        async with self.session.get(f"{self.url}{path}") as answer:
            text = await answer.text()
            if answer.status != 200:
                raise ServerError(f"GET {path}: {answer.status} {text[:500]}")
            return text

    async def chat(self, messages: list[dict], logprobs: bool = False) -> tuple[list[int], list[dict[str, float]]]:
        """Greedy output ids of a chat, and at each place the likeliest tokens if asked for. Raises ServerError."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"POST /v1/chat/completions: {answer.status} {(await answer.text())[:500]}")
            choice = (await answer.json())["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise ServerError("POST /v1/chat/completions: no token_ids in the answer; is this vLLM 0.32 or later?")
        places = choice["logprobs"]["content"] if logprobs else []
        return ids, [
            {each["token"].removeprefix("token_id:"): each["logprob"] for each in place["top_logprobs"]}
            for place in places
        ]

    async def counters(self) -> dict[str, int]:
        """The server's own counters since its start, summed over their labels; 0 for one that it does not have."""
        text = await self.get("/metrics")
        found = {}
        for key, name in COUNTERS.items():
            values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
            found[key] = int(sum(map(float, values)))
        return found

    async def counted(self, before: dict[str, int], tokens: int) -> dict[str, int]:
        """What was counted since `before`, once all tokens are; a server counts a moment after it answers."""
        deadline = time.monotonic() + COUNTED
        while True:
            now = await self.counters()
            since = {key: now[key] - before[key] for key in now}
            if since["generated"] >= tokens or time.monotonic() > deadline:
                return since
            await asyncio.sleep(0.05)


async def all_chats(server: Server, chats: Sequence[list], concurrency: int, logprobs: bool = False) -> list:
    """Every chat's answer, so many at a time; the next is asked when one ends."""
    turn = asyncio.Semaphore(concurrency)

    async def one(messages: list[dict]) -> tuple[list[int], list[dict[str, float]]]:
        async with turn:
            return await server.chat(messages, logprobs)

    return await asyncio.gather(*map(one, chats))


async def timed(server: Server, chats: Sequence[list], concurrency: int) -> Run:
    """One run over the chats."""
    before, begin = await server.counters(), time.perf_counter()
    answers = await all_chats(server, chats, concurrency)
    seconds, tokens = time.perf_counter() - begin, [ids for ids, _ in answers]
    return Run(concurrency, seconds, tokens, **await server.counted(before, sum(map(len, tokens))))


async def measure(options: argparse.Namespace, chats: Sequence[list]) -> Measured:
    """First all chats, untimed, with logprobs; then every concurrency in turn, and all of that `repeats` times."""
    import aiohttp

    limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=ANSWER)}
    async with aiohttp.ClientSession(**limits) as session:
        server = Server(session, options.url, options.tokens)
        server.model = json.loads(await server.get("/v1/models"))["data"][0]["id"]
        found = Measured(options.name, server.model)
        for ids, likeliest in await all_chats(server, chats, max(options.concurrency), logprobs=True):
            found.first.append(ids)
            found.likeliest.append(likeliest)
        for repeat in range(options.repeats):
            for concurrency in options.concurrency:
                run = await timed(server, chats[: chats_at(concurrency, options.chats)], concurrency)
                found.runs.append(run)
                said = f"{concurrency} at a time, run {repeat + 1}/{options.repeats}: {run.rate:.1f} tokens/s"
                print(f"  {options.name}, {said}", flush=True)
    return found


def chats_at(concurrency: int, least: int) -> int:
    """Chats of a run: enough for a batch that stays full for a while."""
    return max(least, 2 * concurrency)


def load_chats(count: int) -> list[list[dict[str, str]]]:
    """The first prompts of each set, in turns. Raises RuntimeError where they cannot be downloaded."""
    from specinfer_vllm.bench import prompts

    each = -(-count // len(SETS))
    columns = ([prompt.messages for prompt in prompts.load([name], each)] for name in SETS)
    found = [messages for messages in chain.from_iterable(zip_longest(*columns)) if messages]
    return found[:count]


def ask(options: argparse.Namespace) -> int:
    """Measure one server."""
    from aiohttp import ClientError

    try:
        chats = load_chats(chats_at(max(options.concurrency), options.chats))
        asyncio.run(measure(options, chats)).save(options.out)
    except (ClientError, OSError, RuntimeError) as error:
        return failed(f"{options.url}: {type(error).__name__}: {error}")
    return 0


# -- compare -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A text that is not plain vLLM's first one. explained: why that is in order, '' where it is not."""

    name: str
    chat: int
    at: int
    words: str
    explained: str

    def __str__(self) -> str:
        verdict = f"explained: {self.explained}" if self.explained else "NOT EXPLAINED"
        return f"{self.name}, chat {self.chat}, token {self.at}: {self.words}: {verdict}"


def differences(plain: Sequence[Measured], other: Sequence[Measured], tie: float) -> list[Difference]:
    """Every text of `other`, timed or not, that differs from plain vLLM's first one; equal ones once."""
    reference, known, name = plain[0], texts(plain), other[0].name
    found: dict[tuple, Difference] = {}
    for chat, ids in chain.from_iterable(enumerate(every) for every in answers(other)):
        mine = reference.first[chat]
        if ids != mine and (chat, *ids) not in found:
            is_known = name != PLAIN and ids in known[chat]
            found[chat, *ids] = explain(name, chat, mine, reference.likeliest[chat], ids, is_known, tie)
    return sorted(found.values(), key=lambda each: (each.chat, each.at))


def answers(servers: Sequence[Measured]) -> list[list[list[int]]]:
    """All texts of these servers, a list of chats each."""
    return [every for server in servers for every in (server.first, *(run.tokens for run in server.runs))]


def texts(servers: Sequence[Measured]) -> list[list[list[int]]]:
    """Of each chat, all the texts that these servers gave."""
    every = answers(servers)
    return [[each[chat] for each in every if chat < len(each)] for chat in range(max(map(len, every)))]


def explain(
    name: str, chat: int, mine: list[int], likeliest: list[dict[str, float]], ids: list[int], is_known: bool, tie: float
) -> Difference:
    """Where a text leaves plain vLLM's, and whether that is in order."""
    at = next((i for i, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), min(len(mine), len(ids)))
    if at >= min(len(mine), len(ids)):
        words, gap = f"plain has {len(mine)} tokens, here {len(ids)}", None
    else:
        best, here = likeliest[at].get(str(mine[at])), likeliest[at].get(str(ids[at]))
        words, gap = f"plain {mine[at]}, here {ids[at]}", None if None in (best, here) else abs(best - here)
        words += (
            f", which is not among plain's {LIKELIEST} likeliest"
            if gap is None
            else f", plain's logprobs {best:.4f} and {here:.4f}"
        )
    why = ""
    if is_known:
        why = "plain vLLM gave this text too in another batch"
    elif gap is not None and gap <= tie:
        why = f"a tie, {gap:.1e} apart (up to {tie:g})"
    return Difference(name, chat, at, words, why)


def table(servers: dict[str, list[Measured]]) -> str:
    """Markdown: tokens/s of each server at each concurrency, medians of all runs."""
    lines = [
        "| requests at a time | | tokens/s | slowest-fastest | against plain | tokens per LLM step | drafts accepted |",
        "|---|---|---|---|---|---|---|",
    ]
    for concurrency in dict.fromkeys(run.concurrency for run in servers[PLAIN][0].runs):
        base = statistics.median(run.rate for run in runs_of(servers[PLAIN], concurrency))
        for place, (name, measured) in enumerate(servers.items()):
            runs = runs_of(measured, concurrency)
            rates = [run.rate for run in runs]
            generated, accepted, drafted = (sum(getattr(run, key) for run in runs) for key in COUNTERS)
            # A request's step emits what was accepted and one token more.
            steps = f"{generated / (generated - accepted):.2f}" if generated > accepted else "?"
            cells = (
                str(concurrency) if place == 0 else "",
                name,
                f"{statistics.median(rates):.1f}",
                f"{min(rates):.1f}-{max(rates):.1f}",
                f"{statistics.median(rates) / base:.2f}x",
                steps,
                f"{100 * accepted / drafted:.0f}%" if drafted else "",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def runs_of(servers: Sequence[Measured], concurrency: int) -> list[Run]:
    """Their runs at this concurrency."""
    return [run for server in servers for run in server.runs if run.concurrency == concurrency]


def compare(options: argparse.Namespace) -> int:
    """Print what was measured; 1 when a text differs and nothing explains it."""
    servers: dict[str, list[Measured]] = {}
    try:
        for path in options.files:
            measured = Measured.load(path)
            servers.setdefault(measured.name, []).append(measured)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return failed(f"{path}: {type(error).__name__}: {error}")
    if PLAIN not in servers or len(servers) < 2:
        return failed(f"{PLAIN!r} and another server are compared; given: {', '.join(servers) or 'nothing'}")
    servers = {PLAIN: servers.pop(PLAIN), **servers}
    runs = max(len(runs_of(each, each[0].runs[0].concurrency)) for each in servers.values() if each[0].runs)
    print(f"\n{servers[PLAIN][0].model}, greedy, medians of {runs} runs\n{table(servers)}\n")
    unexplained = 0
    for name, measured in servers.items():
        found = differences(servers[PLAIN], measured, options.tie)
        for each in found:
            print(each)
        wrong = sum(not each.explained for each in found)
        count = sum(map(len, answers(measured)))
        if name == PLAIN:  # its batches differ, and nothing of ours runs there: said, not judged
            print(f"plain: {count} texts; {len(found)} different ones are not its first")
            continue
        unexplained += wrong
        print(
            f"{name}: {count} texts; {len(found)} different ones are not plain's first, {wrong} of them not explained"
        )
    print("FAILED: texts differ from plain vLLM's" if unexplained else "passed: the texts are plain vLLM's")
    return int(unexplained > 0)


# -- command line ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit code: 1 for texts that differ, 2 for what cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    one = commands.add_parser("ask", help="measure a running server")
    one.add_argument("--url", required=True, help="its address, such as http://127.0.0.1:8000")
    one.add_argument("--name", required=True, help=f"its name in the table; one is {PLAIN!r}")
    one.add_argument("--out", type=Path, required=True, help="file to write")
    one.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64], help="requests at a time (1 8 64)")
    one.add_argument("--chats", type=int, default=8, help="chats of a run, at least; twice the concurrency if more (8)")
    one.add_argument("--tokens", type=int, default=128, help="most output tokens of a chat (128)")
    one.add_argument("--repeats", type=int, default=3, help="runs at each concurrency (3)")
    one.set_defaults(run=ask)
    two = commands.add_parser("compare", help="print the table and the texts that differ")
    two.add_argument("files", type=Path, nargs="+", help="what `ask` wrote; several of one name are taken together")
    two.add_argument("--tie", type=float, default=1e-3, help="logprobs so close are a tie (1e-3; 0.25 for bfloat16)")
    two.set_defaults(run=compare)
    given = parser.parse_args(arguments)
    return given.run(given)


if __name__ == "__main__":
    sys.exit(main())
