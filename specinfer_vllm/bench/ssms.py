# SPDX-License-Identifier: Apache-2.0
"""How good SSMs are on prompts they were not tuned on: HumanEval, MT-bench and GSM8K (SpecInfer, Table 1).

`python -m specinfer_vllm.bench.ssms [SSM..]` has the LLM answer the prompts once, greedily and sampled, and keeps the
answers; then it counts the SSMs' ranks along them, alone and merged, and walks trees and chains of equal nodes.
"""

from __future__ import annotations

import argparse
import hashlib
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

    ssms, llm = options.ssms or smollm2.ssms(), options.llm or str(smollm2.model_path())
    corpora = answers(llm, options.temperatures, options.limit, options.tokens)
    corpus = Corpus.joined(list(corpora.values()))
    every = profile(corpus, ssms)
    ends = np.cumsum([each.num_sequences for each in corpora.values()])
    texts = np.split(np.arange(corpus.num_sequences), ends[:-1])
    found = {name: every.of(mine) for name, mine in zip(corpora, texts, strict=True)}
    for temperature in options.temperatures:
        print_acceptance({name: each.at(temperature) for name, each in found.items()}, temperature)
        print_trees(every.at(temperature), temperature)
    if options.serve:
        print_served(every.at(0), llm, corpus, options.serve)
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
    parser.add_argument(
        "--serve", type=int, default=0, help="also serve so many greedy answers, with trees of 20 nodes"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    if options.llm and not options.ssms:
        parser.error("--llm: name its SSMs; the package has some for SmolLM2-135M-Instruct only")
    if min(options.limit, options.tokens) < 1 or min(options.temperatures) < 0 or options.serve < 0:
        parser.error("--limit, --tokens: give at least 1; --temperatures, --serve: 0 or more")
    if options.serve and 0 not in options.temperatures:
        parser.error("--serve: serves greedy answers; let 0 be among --temperatures")
    return options


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
            digest = hashlib.sha256(json.dumps(recipe.as_dict()).encode()).hexdigest()[:12]
            folder = cache.folder() / "answers" / f"{Path(llm).name}-{name}-{limit}x{tokens}-{temperature:g}-{digest}"
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

    rows = []
    for label, group in next(iter(found.values())).groups().items():
        shares = {name: [each.coverage(group, width) for width in SHOWN] for name, each in found.items()}
        for name, share in (*shares.items(), ("mean", np.mean(list(shares.values()), axis=0))):
            places = found[name].rank.shape[1] if name in found else sum(each.rank.shape[1] for each in found.values())
            rows.append((label, name, str(places), *(f"{each:.3f}" for each in share)))
    columns = ("SSM", "prompts", "places", *(f"top-{width}" for width in SHOWN))
    print_table(f"temperature {temperature:g}", columns, rows)


def print_trees(every, temperature: float) -> None:
    """Tokens per step, walked: a chain, SpecInfer's expansion and the best tree of 8 levels, of equally many nodes.

    The best tree is chosen on these very texts: a few numbers, from thousands of places.
    """
    from specinfer_vllm.printing import print_table
    from specinfer_vllm.tree.shape import best_forest
    from specinfer_vllm.tree.static import num_nodes

    rows = []
    for nodes in (4, 8, num_nodes(PAPER)):
        for label, group in every.groups().items():
            ranks = [every.ranks(i) for i in group]
            tree = best_forest(ranks, nodes, 8, np.ones(nodes + 1), [0.0] * len(ranks)).tokens_per_step
            chain = ranks[0].tokens_per_step((1,) * nodes)
            paper = f"{ranks[0].tokens_per_step(PAPER):.3f}" if nodes == num_nodes(PAPER) else "-"
            rows.append((label, str(nodes), f"{chain:.3f}", paper, f"{tree:.3f}", f"{tree / chain:.2f}x"))
    columns = ("SSM", "nodes", "chain of the first", f"<{','.join(map(str, PAPER))}>", "best trees", "trees/chain")
    print_table(f"tokens per step, temperature {temperature:g}", columns, rows)


def print_served(every, llm: str, corpus, texts: int) -> None:
    """Tokens per step as walked and as served: SpecInfer's expansion and the best tree of as many nodes."""
    from specinfer_vllm.printing import print_table
    from specinfer_vllm.train.measure import Questions, serve, spread
    from specinfer_vllm.tree.shape import best_forest
    from specinfer_vllm.tree.static import StaticTree, num_nodes

    nodes = num_nodes(PAPER)
    best = best_forest([every.ranks(0)], nodes, 8, np.ones(nodes + 1), [0.0]).trees[0]
    served_ranks = every.of(spread(every.temperature, 0, texts)).ranks(0)
    questions = Questions.of(corpus, 0.0, texts)
    rows = []
    for name, tree in (("SpecInfer's expansion", StaticTree.of_expansion(PAPER)), ("best tree", best)):
        ssm = {"model": every.ssms[0], "tree": tree.paths}
        served = serve(llm, {"method": "tree", "ssms": [ssm]}, questions, compiled=False)
        told, found = served_ranks.tokens_per_step(tree), served.tokens_per_step
        rows.append((name, str(tree.num_nodes), f"{told:.3f}", f"{found:.3f}", f"{told / found - 1:+.1%}"))
    print_table(
        f"{texts} greedy answers served", ("tree", "nodes", "expected", "measured", "expected - measured"), rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
