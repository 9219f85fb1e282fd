# SPDX-License-Identifier: Apache-2.0
"""Trees without any draft model: which proposers draw them, and how large they may grow."""

import argparse

from specinfer_vllm.bench import engines, smollm2

engines.use_all_cores()  # sets environment variables that vLLM reads when it is imported
from vllm import LLM, SamplingParams  # noqa: E402

TREE = {
    "method": "tree",
    "proposers": ["ngram", "recycling"],  # suffix matches in the request's own text; the LLM's own runners-up
    "num_nodes": 12,  # of one request's tree
    "batch_nodes": 24,  # of all trees in one step
    "depth": 8,  # longest path
    "row_cost": 0.03,  # verify a little more than the default would
}
CHAT = "Write a CSV table of ten fruits with the columns name, colour, price. Then write the same table as JSON."


def main() -> None:
    """Generate one chat and print the counters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=160, help="output tokens (default 160)")
    parser.add_argument("--proposers", nargs="+", default=TREE["proposers"], help="ngram, recycling or both")
    parser.add_argument("--share-recycling", action="store_true", help="one table for all requests: see the README")
    options = parser.parse_args()

    llm = LLM(
        model=options.model or str(smollm2.model_path()),
        speculative_config={**TREE, "proposers": options.proposers, "share_recycling": options.share_recycling},
        dtype="float32",  # what a CPU is fast in; the default would be bfloat16
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    output = llm.chat([{"role": "user", "content": CHAT}], params, use_tqdm=False)[0]
    print(f"> {CHAT}\n{output.outputs[0].text.strip()}\n")

    stats = llm.collective_rpc("tree_stats")[0]
    for name in options.proposers:
        proposed, accepted = stats["proposed_by"].get(name, 0), stats["accepted_by"].get(name, 0)
        print(f"{name:>10}: {accepted} of {proposed} nodes accepted")  # a node that both drew counts for both
    print(f"{stats['tokens_per_step']:.2f} tokens per LLM step (1.00 without drafts)")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
