# SPDX-License-Identifier: Apache-2.0
"""The main job on real input: the same prompts through plain vLLM and through token trees, and what it brought."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; exit code 1 when a text differs."""
    options = parse(arguments)
    from specinfer_vllm.bench import engines

    engines.use_all_cores()
    from vllm import LLM, SamplingParams

    from specinfer_vllm.bench import prompts, smollm2
    from specinfer_vllm.config import AUTO
    from specinfer_vllm.propose.primer import find_primer

    model = smollm2.model_path()
    chats = prompts.load(["humaneval", "mtbench"], options.prompts)
    shared = engines.settings(model, options.compiled, max_num_seqs=options.batch)
    how = "compiled (starting takes minutes)" if options.compiled else "eager (starting takes about a minute)"
    print(f"starting plain vLLM and vLLM with token trees, {how}", flush=True)
    ssms = [] if options.draft_free else [str(smollm2.ssms()[0])]
    print(f"SSM: {Path(ssms[0]).name if ssms else 'none'}", flush=True)
    primer = find_primer(AUTO, model)
    print(f"primer: {primer or 'none; `specinfer primer` makes one, which saves more steps'}", flush=True)
    tree = {"method": "tree", "ssms": ssms, "proposers": ["recycling"]}
    running = {"plain": LLM(**shared), "tree": LLM(**shared, speculative_config=tree)}
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    print(
        f"{len(chats)} prompts (HumanEval, MT-bench), {options.tokens} tokens each, {options.batch} at a time; "
        f"a warm-up and {options.repeats} runs of each engine, some minutes",
        flush=True,
    )
    messages = [chat.messages for chat in chats]
    timings = engines.alternate(running, messages, params, options.repeats, options.batch)
    stats = running["tree"].collective_rpc("tree_stats")[0]
    different = engines.differences(running["plain"], messages, timings["plain"], timings["tree"])
    return report(running["tree"], timings, stats, different, options.picture)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The demo's options."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each set (default 4)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt (default 96)")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each engine (default 3)")
    parser.add_argument("--draft-free", action="store_true", help="without an SSM, as the bare word `tree` serves")
    parser.add_argument("--compiled", action="store_true", help="torch.compile both engines, as vLLM does by default")
    parser.add_argument("--picture", type=Path, default=Path("tree.png"), help="where to draw it (default tree.png)")
    return parser.parse_args(arguments)


def report(llm, timings, stats: dict, different: list[str], picture: Path) -> int:
    """Print equality, tokens per step, speed, one tree. Returns the exit code."""
    from rich.console import Console
    from rich.markup import escape

    from specinfer_vllm.bench import engines
    from specinfer_vllm.bench import picture as pictures
    from specinfer_vllm.metrics import Showcase

    console = Console()
    plain, tree = timings["plain"], timings["tree"]
    equal = sum(a == b for a, b in zip(plain.token_ids, tree.token_ids, strict=True))
    console.print(f"\n[bold]{escape(tree.texts[0].strip()[:400])}[/]\n", highlight=False)
    console.print(f"texts: {equal} of {len(plain.texts)} equal to plain vLLM's, token for token")
    for each in different:
        console.print(f"  {each}")
    accepted = ", ".join(f"{name} {count}" for name, count in stats["accepted_by"].items())
    console.print(f"tokens per LLM step: plain 1.00, tree {stats['tokens_per_step']:.2f} (accepted: {accepted})")
    console.print(
        f"tokens per second: plain {plain.median:.1f} ({plain.spread}), tree {tree.median:.1f} ({tree.spread}), "
        f"ratio {engines.ratio(tree, plain):.2f}x  [dim](medians of {len(plain.rates)} alternating runs)[/]"
    )
    console.print(f"[dim]{engines.hardware()}[/]\n")
    if stats["showcase"]:
        showcase = Showcase(**stats["showcase"])
        decode = llm.get_tokenizer().decode
        console.print("one step's tree, the one with the longest accepted path among those with branches:")
        console.print(pictures.text(showcase, decode))
        console.print(f"drawn in {pictures.png(showcase, decode, picture)}")
    return 1 if any(not each.endswith(engines.TIED) for each in different) else 0


if __name__ == "__main__":
    sys.exit(main())
