# SPDX-License-Identifier: Apache-2.0
"""Token trees offline: an ordinary vLLM script with one more argument, `speculative_config="tree"`."""

import argparse

from specinfer_vllm.bench import engines, smollm2

engines.use_all_cores()  # sets environment variables that vLLM reads when it is imported
from vllm import LLM, SamplingParams  # noqa: E402

CHATS = [
    "Write a Python function that returns the n-th Fibonacci number, then one that returns the first n of them.",
    "List the planets of the solar system with one sentence each.",
    "Repeat this list in alphabetical order: pear, apple, plum, fig, cherry, date, grape, banana.",
]


def main() -> None:
    """Generate and say how far each LLM step got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per chat (default 96)")
    options = parser.parse_args()

    llm = LLM(
        model=options.model or str(smollm2.model_path()),
        speculative_config="tree",
        dtype="float32",  # what a CPU is fast in; the default would be bfloat16
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # starts in seconds; leave it out to compile the model
    )
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=options.tokens), use_tqdm=False)
    for text, output in zip(CHATS, outputs, strict=True):
        print(f"\n> {text}\n{output.outputs[0].text.strip()}")

    stats = llm.collective_rpc("tree_stats")[0]
    print(f"\n{stats['tokens_per_step']:.2f} tokens per LLM step (1.00 without drafts); {stats['tokens']} tokens")
    print("accepted tokens by proposer:", stats["accepted_by"])


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
