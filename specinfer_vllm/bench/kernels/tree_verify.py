# SPDX-License-Identifier: Apache-2.0
"""The walks of greedy, naive, mss and without replacement: checked against the torch reference, then timed.

    python -m specinfer_vllm.bench.kernels.tree_verify [--tiny]

A coin that lies closer to an edge than rounding reaches may fall either way, so requests with such a coin are not
compared; nearly all mass is on few tokens, as in an LLM's laws, so that there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.triton_kernels.reference import tree_verify as reference
from specinfer_vllm.triton_kernels.tree_verify import DraftRows, Walk, law_sums, verify

RULES = ("greedy", "naive", "mss", "without_replacement")
CLOSE = 1e-5  # what float32 sums over a vocabulary may be off by, as a distance between coin and edge
FAVOURITES, LEAD = 16, 18.0  # likely tokens of a row and how far their logits stand above the others'
NOISE = 2.0  # of an SSM's logits around the LLM's: draws are refused often enough that the rules' walks differ


@dataclass(frozen=True)
class Batch:
    """Arguments of verify for sampled requests, the draws apart. Every rule takes them, exact or not."""

    trees: dict[str, object]
    keys: dict[str, torch.Tensor]
    draws: DraftRows

    def arguments(self, rule: str) -> dict[str, object]:
        """Arguments of verify for a rule."""
        if rule == "greedy":
            return self.trees
        if rule == "naive":
            return self.trees | self.keys
        drawing = "iid" if rule == "mss" else rule
        return self.trees | self.keys | {"draws": self.draws, "drawing": drawing}


@dataclass(frozen=True)
class Size:
    """requests x nodes rows of logits [vocab]; laws per node with children."""

    requests: int
    nodes: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    ssms: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.requests} x {self.nodes} nodes, vocabulary {self.vocab}, SSMs {self.ssms}"


FULL = Size(64, 32, 128_256)
TINY = Size(6, 9, 90)
CHECKED = [
    Size(33, 24, 1000, torch.float32, ssms=2),
    Size(33, 24, 32_000, torch.float16),
    Size(33, 32, 128_256, ssms=2),
]


def inputs(device: torch.device, size: Size, seed: int = 0) -> Batch:
    """Random trees whose children are drawn from laws near the LLM's; two of three are listed as draws.

    With two SSMs a node's first draws count as the first one's. Laws are float32, logits of the size's dtype.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parent, start = measure.random_forest([size.nodes] * size.requests, seed)
    children: dict[int, list[int]] = {}
    depth: list[int] = []
    for row, above in enumerate(parent.tolist()):
        first = row - row % size.nodes
        depth.append(0 if above < 0 else depth[first + above] + 1)
        if above >= 0:
            children.setdefault(first + above, []).append(row)
    logits = torch.randn(len(parent), size.vocab, device=device, generator=generator)
    likely = torch.randint(size.vocab, (len(parent), FAVOURITES), device=device, generator=generator)
    logits.scatter_(1, likely, LEAD + torch.randn(likely.shape, device=device, generator=generator))
    inner = sorted(children)
    # A law per node and SSM, one node's side by side: the LLM's with noise on the logits.
    laws = logits[inner].repeat_interleave(size.ssms, dim=0)
    laws += NOISE * torch.randn(laws.shape, device=device, generator=generator)
    laws = laws.softmax(1)
    mixed = laws.view(len(inner), size.ssms, -1).mean(1) if size.ssms > 1 else laws
    most = max(map(len, children.values()))
    drawn = torch.multinomial(mixed, most, generator=generator).tolist()

    tokens, draw_start, draw_row, draw_law = [0] * len(parent), [0] * (len(parent) + 1), [], []
    for index, row in enumerate(inner):
        mine = children[row]
        for child, token in zip(mine, drawn[index], strict=False):
            tokens[child] = token
        listed = [child for place, child in enumerate(mine) if place % 3 != 2]
        draw_row += listed
        draw_law += [index * size.ssms + (size.ssms * place // len(listed)) for place in range(len(listed))]
        draw_start[row + 1] = len(listed)
    integers = {"start": draw_start, "row": draw_row, "law": draw_law}
    lists = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in integers.items()}
    lists["start"] = lists["start"].cumsum(0, dtype=torch.int32)
    trees = {
        "logits": logits.to(size.dtype),
        "tokens": torch.tensor(tokens, device=device),
        "parent": parent.to(device),
        "start": start.to(device),
        "max_depth": max(depth),
    }
    position = torch.tensor(depth, device=device) + torch.arange(len(parent), device=device) // size.nodes * 1000
    seeds = torch.randint(-(2**62), 2**62, (size.requests,), device=device, generator=generator)
    mass, support = laws.sum(1, dtype=torch.float64), (laws > 0).sum(1, dtype=torch.int32)
    return Batch(
        trees, {"seed": seeds, "position": position}, DraftRows(**lists, laws=laws, mass=mass, support=support)
    )


def mismatches(
    batch: Batch, rule: str, accept: Callable[..., Walk] = verify, twin: Callable[..., Walk] = reference.verify
) -> int:
    """Requests whose walks differ although no coin was close to an edge. RuntimeError when few remain.

    accept, twin: a kernel and its reference
    """
    arguments = batch.arguments(rule)
    requests = len(batch.keys["seed"])
    margin = torch.empty(requests, dtype=torch.float64)
    made, expected = accept(**arguments), twin(**arguments, margin=margin)
    clear = margin.to(made.tokens.device) > CLOSE
    if clear.sum() < requests / 2:
        raise RuntimeError(f"only {int(clear.sum())} of {requests} requests have no coin close to an edge")
    return int((_differ(made, expected) & clear).sum())


def _differ(made: Walk, expected: Walk) -> torch.Tensor:
    """Which requests' walks are not the same, [requests] bool."""
    tokens, rows = (made.tokens != expected.tokens).any(1), (made.rows != expected.rows).any(1)
    return tokens | rows | (made.num_tokens != expected.num_tokens)


def mixed(batch: Batch) -> Batch:
    """Every third request greedy; a row without a law."""
    requests = len(batch.keys["seed"])
    greedy = torch.arange(requests, device=batch.keys["seed"].device) % 3 == 0
    logits = batch.trees["logits"].clone()
    logits[int(batch.trees["start"][1]), 0] = torch.nan
    return replace(batch, trees=batch.trees | {"logits": logits}, keys=batch.keys | {"greedy": greedy})


def _sums_error(batch: Batch) -> float:
    mass, support = law_sums(batch.draws.laws)
    return measure.relative_error(mass, batch.draws.mass) + float((support != batch.draws.support).sum())


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Requests whose walk is not the reference's, of which none may be."""
    for size in [replace(TINY, ssms=2)] if tiny else CHECKED:
        try:
            batch = inputs(device, size)
        except Exception as error:
            yield measure.Check(str(size), measure.first_line(error), 0)
            continue
        for rule in RULES:
            yield measure.checked(f"{rule}, {size}", 0, mismatches, batch, rule)
        yield measure.checked(f"mss, some greedy, a row of NaN, {size}", 0, mismatches, mixed(batch), "mss")
        yield measure.checked(f"sums of laws, {size}", 1e-12, _sums_error, batch)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per launch. The bytes that count are one read of the logits of each visited node."""
    size = TINY if tiny else FULL
    row_bytes = size.vocab * size.dtype.itemsize
    try:
        batches = _batches(device, size, row_bytes)
    except torch.OutOfMemoryError:
        yield {"rule": "all", "us": measure.NO_MEMORY}
        return
    for rule in RULES:
        arguments = [batch.arguments(rule) for batch in batches]
        visited = sum(int(verify(**each).num_tokens.sum()) for each in arguments) / len(arguments)
        row: measure.Row = {"rule": rule, "requests": size.requests, "nodes": size.nodes, "vocab": size.vocab}
        row["visited"] = visited / size.requests
        found = measure.attempted(deadline, measure.graph_time, [partial(verify, **each) for each in arguments])
        yield row | measure.time_cells(found, int(visited) * row_bytes, device)


def _batches(device: torch.device, size: Size, row_bytes: int) -> list[Batch]:
    """As many batches as it takes for the rows that a step visits not to stay in the L2 cache."""
    first = inputs(device, size)
    visited = int(verify(**first.arguments("naive")).num_tokens.sum())
    copies = measure.copies_for(visited * row_bytes, device)
    return [first, *(inputs(device, size, seed) for seed in range(1, copies))]


if __name__ == "__main__":
    measure.main(check, times, __doc__)
