# SPDX-License-Identifier: Apache-2.0
"""Two small speculative models (SSMs) draw a tree each; the LLM verifies their union in one pass.

Without --ssm they are the two that come with the package, boost-tuned for SmolLM2-135M-Instruct: the second one learned
where the first one misses.
"""

import argparse

from specinfer_vllm.bench import engines, smollm2

engines.use_all_cores()  # sets environment variables that vLLM reads when it is imported
from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Generate one chat and say whose tokens were accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--ssm", action="append", help="folder or hub id of an SSM; give it twice for two")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens (default 64)")
    options = parser.parse_args()
    if options.model and not options.ssm:
        parser.error("--model needs --ssm: SSMs share the LLM's vocabulary")

    ssms = options.ssm or list(map(str, smollm2.ssms()))
    llm = LLM(
        model=options.model or str(smollm2.model_path()),
        speculative_config={
            "method": "tree",
            # The first SSM takes the tree's expansion <2,1,1>, every other one brings its own.
            "ssms": [ssms[0], *({"model": ssm, "expansion": [3, 1]} for ssm in ssms[1:])],
            "expansion": [2, 1, 1],
        },
        dtype="float32",  # what a CPU is fast in; the default would be bfloat16
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
    )
    chat = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]
    output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=options.tokens), use_tqdm=False)[0]
    print(f"\n{output.outputs[0].text.strip()}\n")
    stats = llm.collective_rpc("tree_stats")[0]
    for name, proposed in stats["proposed_by"].items():
        print(f"{name}: {stats['accepted_by'].get(name, 0)} of {proposed} nodes accepted")  # a shared node counts twice
    print(f"{stats['tokens_per_step']:.2f} tokens per LLM step (1.00 without drafts)")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
