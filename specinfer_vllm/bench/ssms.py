# SPDX-License-Identifier: Apache-2.0
"""How good SSMs are on prompts they were not tuned on: HumanEval, MT-bench and GSM8K (SpecInfer, Table 1).

`python -m specinfer_vllm.bench.ssms [SSM..]` has the LLM answer the prompts once, greedily and sampled, and keeps the
answers; then it counts the SSMs' ranks along them, alone and merged, and walks trees and chains of equal nodes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SETS = ("humaneval", "mtbench", "gsm8k")
SHOWN = (1, 2, 3, 4, 5)
PAPER = (1, 1, 3, 1, 1, 1, 1, 1)  # SpecInfer's own expansion


def main(arguments: list[str] | None = None) -> int:
    """Answer, count and print."""
    options = parse(arguments)
    from specinfer_vllm.bench import engines, smollm2
    from specinfer_vllm.train.corpus import Corpus
    from specinfer_vllm.train.profile import profile

    ssms = options.ssms or smollm2.ssms()
    corpora = answers(options.llm or str(smollm2.model_path()), options.temperatures, options.limit, options.tokens)
    found = {name: profile(corpus, ssms) for name, corpus in corpora.items()}
    every = profile(Corpus.joined(list(corpora.values())), ssms)
    for temperature in options.temperatures:
        print_acceptance({name: each.at(temperature) for name, each in found.items()}, temperature)
        print_trees(every.at(temperature), temperature)
    print(engines.hardware())
    if options.json:
        options.json.write_text(json.dumps({name: each.summary() for name, each in found.items()}, indent=1))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ssms", type=Path, nargs="*", help="folders of SSMs (default: the package's own)")
    parser.add_argument("--llm", help="folder of the LLM (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each set (default 40)")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer (default 128)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="default 0 0.7")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args(arguments)


def answers(llm: str, temperatures: Sequence[float], limit: int, tokens: int) -> dict:
    """The LLM's answers to the prompts of each set, at every temperature: name -> Corpus; kept in the cache folder."""
    from specinfer_vllm.bench import cache, prompts
    from specinfer_vllm.train.corpus import Corpus, CorpusWriter
    from specinfer_vllm.train.generate import Recipe, generate, serving

    running, found = None, {}
    for name in SETS:
        texts = [each.text for each in prompts.load([name], limit)]
        parts = []
        for temperature in temperatures:
            recipe = Recipe(llm, len(texts), len(texts), (temperature,), max_tokens=tokens, prompts=name)
            folder = cache.folder() / "answers" / f"{Path(llm).name}-{name}-{limit}x{tokens}-{temperature:g}"
            writer = CorpusWriter(folder, recipe.as_dict())
            if writer.missing(1):
                running = running or serving(recipe, 1024)
                generate(running, recipe, writer, texts)
            parts.append(Corpus.load(folder))
        found[name] = Corpus.joined(parts)
    return found


def print_acceptance(found: dict, temperature: float) -> None:
    """How often the LLM's token is among an SSM's first k: each SSM and all merged, on each set and on average."""
    from specinfer_vllm.printing import print_table

    ssms = next(iter(found.values())).ssms
    groups = {Path(ssm).name: [i] for i, ssm in enumerate(ssms)}
    if len(ssms) > 1:
        groups["merged"] = list(range(len(ssms)))
    rows = []
    for label, group in groups.items():
        shares = {name: [each.coverage(group, width) for width in SHOWN] for name, each in found.items()}
        for name, share in (*shares.items(), ("mean", np.mean(list(shares.values()), axis=0))):
            places = found[name].rank.shape[1] if name in found else sum(each.rank.shape[1] for each in found.values())
            rows.append((label, name, str(places), *(f"{each:.3f}" for each in share)))
    columns = ("SSM", "prompts", "places", *(f"top-{width}" for width in SHOWN))
    print_table(f"temperature {temperature:g}", columns, rows)


def print_trees(every, temperature: float) -> None:
    """Tokens per step, walked: the best chain, SpecInfer's expansion and the best trees, at equal numbers of nodes."""
    from specinfer_vllm.printing import print_table
    from specinfer_vllm.tree.shape import best_forest
    from specinfer_vllm.tree.static import num_nodes

    rows, alone = [], [every.ranks(i) for i in range(len(every.ssms))]
    for nodes in (4, 8, num_nodes(PAPER)):
        free = np.ones(nodes + 1)
        for ssm, ranks in zip(every.ssms, alone, strict=True):
            chain, paper = ranks.tokens_per_step((1,) * nodes), ranks.tokens_per_step(PAPER)
            tree = best_forest([ranks], nodes, 8, free, [0.0]).tokens_per_step
            told = f"{paper:.3f}" if nodes == num_nodes(PAPER) else "-"
            rows.append((Path(ssm).name, str(nodes), f"{chain:.3f}", told, f"{tree:.3f}", f"{tree / chain:.2f}x"))
        if len(alone) > 1:
            forest = best_forest(alone, nodes, 8, free, [0.0] * len(alone))
            rows.append(("merged", str(nodes), "-", "-", f"{forest.tokens_per_step:.3f}", "-"))
    columns = ("SSM", "nodes", "chain", f"<{','.join(map(str, PAPER))}>", "best tree", "tree/chain")
    print_table(f"tokens per step, temperature {temperature:g}", columns, rows)


if __name__ == "__main__":
    raise SystemExit(main())
