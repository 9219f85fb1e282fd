# SPDX-License-Identifier: Apache-2.0
"""Tokens per LLM step of the draft-free proposers, without an LLM: recorded greedy chats are drafted for step by step.

`record` lets plain vLLM write 60 chats of 128 tokens once; `replay` drives the served engine's own proposers over them.
A greedy step accepts the deepest path that equals the recorded text, so the count is what the engine would give;
`serve` asks the engine itself and prints both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_vllm.bench import cache
from specinfer_vllm.bench.device_replay import DeviceReplay
from specinfer_vllm.bench.recording import Recording, record
from specinfer_vllm.propose.ensemble import Ensemble
from specinfer_vllm.propose.ngram import NgramProposer
from specinfer_vllm.propose.proposer import DraftBatch, Observation
from specinfer_vllm.propose.recycling import PUBLISHED, RecyclingProposer
from specinfer_vllm.tree.topology import TokenTrees

CHATS, TOKENS, WIDTH, DEPTH = 60, 128, 10, 8
# Time of one LLM pass by its rows, ms: all linears and the head of SmolLM2-135M in fp32, two cores.
COST = {1: 62, 4: 67, 8: 77, 9: 82, 12: 81, 16: 94, 17: 92, 24: 106, 32: 122}


@dataclass
class Tally:
    """What a replay counted. passes = LLM passes of the batch; steps = passes times the requests in each.

    tokens, steps [chats] int64; rows [passes] int64 = rows of each pass; accepted_by = accepted draws per proposer
    """

    tokens: np.ndarray
    steps: np.ndarray
    rows: list[int] = field(default_factory=list)
    accepted_by: dict[str, int] = field(default_factory=dict)

    @property
    def per_step(self) -> float:
        """Tokens per LLM step."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per LLM step below which a tenth and nine tenths of the chats lie."""
        low, high = np.quantile(self.tokens / self.steps, [0.1, 0.9])
        return float(low), float(high)

    @property
    def nodes(self) -> float:
        """Nodes verified per step."""
        return float((sum(self.rows) - self.steps.sum()) / self.steps.sum())

    def time(self) -> float:
        """Estimated ms of all passes, by COST."""
        return float(np.interp(self.rows, list(COST), list(COST.values())).sum())


@dataclass
class Running:
    """One chat on its slot: the whole recorded text, its prompt's length, and how much of it is committed."""

    chat: int
    text: np.ndarray
    prompt: int
    committed: int


def replay(recorded: Recording, ensemble: Ensemble, nodes: int, batch: int = 1, depth: int = DEPTH) -> Tally:
    """Draft for every chat, `batch` of them at a time, `nodes` per request at most; a chat that ends makes room."""
    tally = Tally(np.zeros(recorded.num_chats, np.int64), np.zeros(recorded.num_chats, np.int64))
    waiting = [chat for chat in range(recorded.num_chats) if np.diff(recorded.output_offsets)[chat] > 1]
    longest = max(len(recorded.text(chat)[0]) for chat in waiting)
    history = np.zeros((batch, longest), np.int32)
    running: list[Running | None] = [None] * batch
    while waiting or any(running):
        for slot in range(batch):
            if running[slot] is None and waiting:
                running[slot] = _begin(recorded, waiting.pop(0), slot, history, ensemble)
        slots = [slot for slot in range(batch) if running[slot] is not None]
        trees = ensemble.propose(_draft_batch(slots, running, history, nodes, depth))
        tally.rows.append(trees.num_rows)
        for request, slot in enumerate(slots):
            if _step(recorded, running[slot], slot, trees, request, tally, ensemble):
                ensemble.finish(slot)
                running[slot] = None
    tally.tokens, tally.steps = tally.tokens[tally.steps > 0], tally.steps[tally.steps > 0]
    return tally


def _begin(recorded: Recording, chat: int, slot: int, history: np.ndarray, ensemble: Ensemble) -> Running:
    """The prompt is read and its first token sampled."""
    text, prompt = recorded.text(chat)
    history[slot, : len(text)] = text
    ensemble.start(slot)
    _observe(recorded, chat, slot, text, prompt, prompt - 1, prompt, ensemble)
    return Running(chat, text, prompt, prompt + 1)


def _draft_batch(
    slots: list[int], running: list[Running | None], history: np.ndarray, nodes: int, depth: int
) -> DraftBatch:
    lengths = np.array([running[slot].committed for slot in slots])
    room = np.array([len(running[slot].text) for slot in slots]) - lengths - 1
    return DraftBatch(
        slots=np.array(slots),
        history=history,
        rows=np.array(slots),
        lengths=lengths,
        max_depth=np.minimum(room, depth).astype(np.int32),
        max_nodes=np.full(len(slots), nodes, np.int32),
    )


def _step(
    recorded: Recording, at: Running, slot: int, trees: TokenTrees, request: int, tally: Tally, ensemble: Ensemble
) -> bool:
    """One LLM pass of one request; whether its chat has ended."""
    start = trees.offsets[request]
    node, accepted = 0, 0
    owners = trees.draw_owner[trees.draw_request == request]
    draws = trees.draw_node[trees.draw_request == request]
    while at.committed + accepted < len(at.text):
        children = [
            c for c in trees.children(request, node) if trees.tokens[start + c] == at.text[at.committed + accepted]
        ]
        if not children:
            break
        node, accepted = children[0], accepted + 1
        for owner in owners[draws == node]:
            name = ensemble.names[owner]
            tally.accepted_by[name] = tally.accepted_by.get(name, 0) + 1
    emitted = min(accepted + 1, len(at.text) - at.committed)
    first = at.committed - 1
    at.committed += emitted
    tally.tokens[at.chat] += emitted
    tally.steps[at.chat] += 1
    _observe(recorded, at.chat, slot, at.text, at.prompt, first, first + emitted, ensemble)
    return at.committed == len(at.text)


def _observe(
    recorded: Recording, chat: int, slot: int, text: np.ndarray, prompt: int, first: int, end: int, ensemble: Ensemble
) -> None:
    """Show the rows read at text[first:end]."""
    rows = recorded.output_offsets[chat] + np.arange(first, end) - (prompt - 1)
    wanted = ensemble.num_successors
    if wanted:
        ensemble.observe(
            Observation(
                np.full(end - first, slot),
                text[first:end],
                recorded.successors[rows, :wanted],
                recorded.probabilities[rows, :wanted],
            )
        )


def makers(vocab_size: int, slots: int, primer: Path | None) -> dict[str, Callable[[], list]]:
    """The proposers to compare, by name."""
    ngram = lambda: NgramProposer(vocab_size)  # noqa: E731
    recycling = lambda **options: RecyclingProposer(vocab_size, slots, **options)  # noqa: E731
    rows = {
        "ngram": lambda: [ngram()],
        "recycling as published": lambda: [recycling(weights=PUBLISHED)],
        "recycling as published, shared": lambda: [recycling(weights=PUBLISHED, shared=True)],
        "ngram + recycling as published": lambda: [ngram(), recycling(weights=PUBLISHED)],
        "ngram + recycling as published, shared": lambda: [ngram(), recycling(weights=PUBLISHED, shared=True)],
        "recycling": lambda: [recycling()],
        "recycling, shared": lambda: [recycling(shared=True)],
        "ngram + recycling": lambda: [ngram(), recycling()],
        "ngram + recycling, shared": lambda: [ngram(), recycling(shared=True)],
    }
    if primer is not None:
        rows["recycling, primer"] = lambda: [recycling(primer=primer)]
        rows["recycling, primer, shared"] = lambda: [recycling(primer=primer, shared=True)]
        rows["ngram + recycling, primer"] = lambda: [ngram(), recycling(primer=primer)]
    return rows


def device_makers(recorded: Recording, slots: int, primer: Path | None) -> dict[str, Callable[[], list]]:
    """The same of the V2 runner."""
    longest = max(len(recorded.text(chat)[0]) for chat in range(recorded.num_chats))
    device = lambda name, primer=None: [DeviceReplay(name, recorded.vocab_size, slots, longest, primer)]  # noqa: E731
    rows = {
        "ngram, V2 runner": lambda: device("ngram"),
        "recycling, V2 runner": lambda: device("recycling"),
        "ngram + recycling, V2 runner": lambda: device("ngram") + device("recycling"),
    }
    if primer is not None:
        rows["recycling, primer, V2 runner"] = lambda: device("recycling", primer)
    return rows


def print_table(recorded: Recording, primer: Path | None, sizes: list[int]) -> None:
    """Tokens per LLM step by proposers and nodes, each with the tenth and the ninetieth percentile over the chats."""
    print(f"{recorded.num_chats} chats, {len(recorded.outputs)} tokens; tokens per LLM step (p10-p90 of the chats)\n")
    print("| proposers | " + " | ".join(f"{nodes} nodes" for nodes in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for name, make in (makers(recorded.vocab_size, 1, primer) | device_makers(recorded, 1, primer)).items():
        cells = []
        for nodes in sizes:
            tally = replay(recorded, Ensemble(make()), nodes)
            low, high = tally.spread
            cells.append(f"{tally.per_step:.2f} ({low:.2f}-{high:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def print_speed(recorded: Recording, primer: Path | None, batches: list[int], costs: list[float]) -> None:
    """Estimated speed against plain decoding by batch size and row cost: the passes' time by COST, nothing else."""
    print("\n| proposers | batch | row cost | tokens per step | nodes per request | estimated speed |")
    print("|---|---|---|---|---|---|")
    chosen = ["ngram", "recycling", "ngram + recycling", "recycling, primer", "ngram + recycling, primer"]
    for name in chosen:
        for batch in batches:
            rows = makers(recorded.vocab_size, batch, primer)
            if name not in rows:
                continue
            plain = replay(recorded, Ensemble([]), 0, batch)
            for cost in costs:
                tally = replay(recorded, Ensemble(rows[name](), row_cost=cost), 16, batch)
                ratio = plain.time() / tally.time()
                print(
                    f"| {name} | {batch} | {cost} | {tally.per_step:.2f} | {tally.nodes:.1f} | {ratio:.2f}x |",
                    flush=True,
                )


def served(llm: Any, recorded: Recording) -> float:
    """Tokens per LLM step of a tree engine on the recording's prompts, each request's first pass left out as in replay.

    llm  vLLM's LLM with method tree. AssertionError: its texts are not the recorded ones
    """
    from vllm import SamplingParams

    chats = range(recorded.num_chats)
    outputs = [recorded.text(chat)[0][recorded.text(chat)[1] :] for chat in chats]
    prompts = [{"prompt_token_ids": recorded.text(chat)[0][: recorded.text(chat)[1]].tolist()} for chat in chats]
    params = [SamplingParams(temperature=0, max_tokens=len(output)) for output in outputs]
    before = llm.collective_rpc("tree_stats")[0]
    answers = llm.generate(prompts, params)
    after = llm.collective_rpc("tree_stats")[0]
    same = [list(a.outputs[0].token_ids) == o.tolist() for a, o in zip(answers, outputs, strict=True)]
    assert sum(same) >= 0.95 * len(same), f"{same.count(False)} of {len(same)} texts are not the recorded ones"
    tokens, steps = (after[name] - before[name] - recorded.num_chats for name in ("tokens", "request_steps"))
    return tokens / steps


def print_served(recorded: Recording, model: str | Path, sizes: list[int]) -> None:
    """Tokens per LLM step, served and simulated, of ngram and recycling merged."""
    from specinfer_vllm.bench import engines

    engines.use_all_cores()
    from vllm import LLM

    print("| nodes | simulated | served | served / simulated |\n|---|---|---|---|")
    for nodes in sizes:
        options = {"method": "tree", "num_nodes": nodes, "row_cost": 0, "primer": "none"}
        llm = LLM(**engines.settings(model, False, 1), speculative_config=options)
        engine = served(llm, recorded)
        simulated = replay(recorded, Ensemble(makers(recorded.vocab_size, 1, None)["ngram + recycling"]()), nodes)
        print(f"| {nodes} | {simulated.per_step:.3f} | {engine:.3f} | {engine / simulated.per_step:.3f} |", flush=True)
        del llm


def main(arguments: list[str] | None = None) -> int:
    """Record, or replay and print tables."""
    options = parse(arguments)
    path = options.recording or cache.folder() / "greedy-chats.npz"
    if options.what == "record":
        from specinfer_vllm.bench import prompts, smollm2

        half = -(-options.chats // 2)
        sets = [prompts.load([name], half) for name in ("mtbench", "humaneval")]
        chats = [each.messages for pair in zip(*sets, strict=True) for each in pair][: options.chats]
        recorded = record(options.model or smollm2.model_path(), chats, options.tokens, WIDTH, path)
        cache.say(f"{recorded.num_chats} chats, {len(recorded.outputs)} tokens: {path}")
        return 0
    if not path.exists():
        print(f"{path}: no such recording; make one with `python -m specinfer_vllm.bench.simulate record`")
        return 2
    recorded = Recording.load(path)
    if options.chats:
        recorded = recorded.head(options.chats)
    if options.what == "serve":
        from specinfer_vllm.bench import smollm2

        print_served(recorded, options.model or smollm2.model_path(), options.nodes)
        return 0
    primer = options.primer if options.primer is None or options.primer.exists() else parse_error(options.primer)
    print_table(recorded, primer, options.nodes)
    if options.batch:
        print_speed(recorded, primer, options.batch, options.row_cost)
    return 0


def parse_error(primer: Path) -> None:
    """Say that a primer is missing, and end."""
    raise SystemExit(f"--primer: {primer} does not exist; make one with `specinfer primer`")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "replay", "serve"])
    parser.add_argument("--recording", type=Path, help="file of the chats (default: in the cache folder)")
    parser.add_argument("--model", help="record, serve: folder or hub id (default: the demo's model)")
    parser.add_argument("--chats", type=int, default=CHATS, help=f"chats, half from each prompt set (default {CHATS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"record: output tokens per chat (default {TOKENS})")
    parser.add_argument("--primer", type=Path, help="replay: a primer to compare with")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16, 32], help="replay, serve: tree sizes"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[], help="replay: batch sizes to estimate the speed of")
    parser.add_argument(
        "--row-cost", type=float, nargs="+", default=[0.03, 0.04, 0.05], help="replay: row costs to try"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
