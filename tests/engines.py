# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, and workloads whose outputs two engines can be compared by."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from specinfer_vllm.bench.engines import runner_of
from specinfer_vllm.propose.draft_vocab import NarrowHead

# The plain engine's two best logits: below this gap the order of additions decides, and a difference is tolerated.
TIE = 1e-4
MAX_MODEL_LEN = 384


@contextmanager
def engine(model, **options) -> Iterator[LLM]:
    """An in-process engine in fp32 with a small chunked-prefill budget, shut down at the end."""
    settings = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 29,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": True,
        **options,
    }
    llm = LLM(model=str(model), **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def bytes_held(llm: LLM) -> int:
    """Bytes of all tensors and arrays that this package keeps between steps.

    Everything reachable from what the tree runner adds to vLLM's, but for weights (an SSM's narrow head is some of its
    own) and the KV cache.
    """
    runner = runner_of(llm)
    weights = {each.untyped_storage().data_ptr() for each in runner.model.parameters()}
    caches = {cache.untyped_storage().data_ptr() for cache in runner.kv_caches}
    held: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [runner.drafter, runner.step, runner.compactions, runner.ssm_groups]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, torch.nn.Module | NarrowHead | type | str | bytes):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray):
            owner = each
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            held[owner.ctypes.data] = owner.nbytes
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each
        elif type(each).__module__.startswith("specinfer_vllm."):
            fields = getattr(each, "__slots__", ())
            waiting += [*getattr(each, "__dict__", {}).values(), *(getattr(each, name, None) for name in fields)]
    return sum(size for at, size in held.items() if at not in weights and at not in caches)


@dataclass
class Answer:
    """One request's output. gaps[i]: distance of the two best logits where token i was chosen, if it was asked for."""

    tokens: list[int]
    text: str
    finish: str | None
    gaps: list[float] = field(default_factory=list)
    cached: int = 0

    @classmethod
    def of(cls, output, completion) -> Answer:
        best = [sorted((entry.logprob for entry in at.values()), reverse=True) for at in completion.logprobs or ()]
        gaps = [entries[0] - entries[1] if len(entries) > 1 else 0.0 for entries in best]
        return cls(
            list(completion.token_ids), completion.text, completion.finish_reason, gaps, output.num_cached_tokens or 0
        )


def answers(outputs) -> list[Answer]:
    """Every completion of every request, in order."""
    return [Answer.of(output, completion) for output in outputs for completion in output.outputs]


def difference(plain: Answer, tree: Answer) -> str | None:
    """None when equal, or when they part where the plain pass was tied (printed); else what differs."""
    if (plain.tokens, plain.text, plain.finish) == (tree.tokens, tree.text, tree.finish):
        return None
    shared = min(len(plain.tokens), len(tree.tokens))
    at = next((i for i in range(shared) if plain.tokens[i] != tree.tokens[i]), shared)
    gap = plain.gaps[at] if at < len(plain.gaps) else float("inf")
    if at < shared and gap <= TIE:
        print(f"tie at token {at}: the plain pass's two best logits differ by {gap:.1e}")
        return None
    return f"token {at}: plain {plain.tokens[at : at + 5]}, tree {tree.tokens[at : at + 5]}, gap {gap:.1e}"


def differences(plain: Sequence[Answer], tree: Sequence[Answer]) -> list[str]:
    """All that differ, named by their place."""
    assert len(plain) == len(tree)
    found = [(i, difference(a, b)) for i, (a, b) in enumerate(zip(plain, tree, strict=True))]
    return [f"request {i}: {what}" for i, what in found if what]


def greedy(max_tokens: int, **params) -> SamplingParams:
    """Greedy, with the two best logprobs for the tie rule."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, **params)


def real_chats(llm: LLM, prompts, tokens: Sequence[int]) -> list[Answer]:
    """Chats of mixed lengths, max_num_seqs at a time. tokens: max_tokens of each prompt, cycled."""
    params = [greedy(tokens[i % len(tokens)]) for i in range(len(prompts))]
    return answers(llm.chat([prompt.messages for prompt in prompts], params, use_tqdm=False))


def with_aborts(llm: LLM, prompts, max_tokens: int) -> list[Answer]:
    """Every third request is aborted after a few steps; the others' answers, in order."""
    core = llm.llm_engine
    tokenizer = llm.get_tokenizer()
    kept = {}
    for i, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        core.add_request(f"abort-{i}", text, greedy(max_tokens))
    for step in range(100_000):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            if output.finished:
                kept[output.request_id] = answers([output])[0]
        if step == 6:
            core.abort_request([f"abort-{i}" for i in range(0, len(prompts), 3)])
    return [kept[f"abort-{i}"] for i in range(len(prompts)) if i % 3]


def shuffled(items: Sequence, seed: int) -> list:
    """A copy in random order."""
    return random.Random(seed).sample(list(items), len(items))
