# SPDX-License-Identifier: Apache-2.0
"""Tree attention over latents: checked against triton_kernels/reference/mla_attention.py, then timed.

    python -m specinfer_vllm.bench.kernels.mla_attention [--tiny]

Timed is one layer of DeepSeek's shape: the tree's rows, and one-token decode with the same kernel. The bytes that count
are the least possible ones: every latent once, queries and outputs once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.bench.kernels.tree_attention import BLOCK_SIZE, TOLERANCE, attention_error, shuffled_blocks
from specinfer_vllm.triton_kernels.mla_attention import mla_attention
from specinfer_vllm.triton_kernels.reference import mla_attention as reference
from specinfer_vllm.triton_kernels.reference.tree_build import build

LATENT, ROPE = 512, 64


def inputs(
    device: torch.device,
    contexts: Sequence[int],
    nodes: Sequence[int],
    heads: int = 16,
    latent: int = LATENT,
    rope: int = ROPE,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    copies: int = 1,
) -> list[dict[str, object]]:
    """Arguments of mla_attention, for so many copies of the same requests that share nothing but their queries.

    Blocks lie in random order. Behind a request's last slot everything is NaN, as is block 0, where the table points.
    """
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, device=device, generator=generator)
    lengths = [context + count for context, count in zip(contexts, nodes, strict=True)]
    table, unused = shuffled_blocks(lengths * copies, BLOCK_SIZE)
    cache = normal(int(table.max()) + 1, BLOCK_SIZE, latent + rope).to(dtype)
    for block, offset in unused:
        cache[block, offset:] = torch.nan
    parent, start = measure.random_forest(nodes, 0)
    prefix = torch.tensor(contexts, dtype=torch.int32)
    bits = build(parent, start, prefix, max_rows=max(nodes)).ancestors
    shared = {
        "query": normal(len(parent), heads, latent + rope).to(dtype),
        "cache": cache,
        "query_start": start.to(device),
        "prefix_len": prefix.to(device),
        "max_rows": max(nodes),
        "max_keys": max(lengths),
        "scale": 192**-0.5,
        "latent_dim": latent,
        "rope_dim": rope,
        "ancestors": None if causal else bits.to(device),
    }
    return [shared | {"block_table": mine} for mine in table.to(device).chunk(copies)]


def _error(device: torch.device, case: dict[str, object]) -> float:
    (arguments,) = inputs(device, **case)
    return attention_error(mla_attention, reference.mla_attention, device, **arguments)


MIXED = {"contexts": (0, 17, 500, 4096, 2000), "nodes": (1, 16, 33, 64, 0)}
CHECKED: dict[str, dict[str, object]] = {
    "trees, 16 heads": MIXED,
    "trees, 128 heads, fp16": MIXED | {"heads": 128, "dtype": torch.float16},
    "chain, 20 heads, fp32": {"contexts": (9000, 33), "nodes": (24, 5), "heads": 20, "causal": True}
    | {"dtype": torch.float32},
    "one request, 128 heads": {"contexts": (20000,), "nodes": (4,), "heads": 128},
}


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Errors of outputs and of lse, whichever is larger."""
    small = {"contexts": (20, 0), "nodes": (5, 1), "heads": 4, "latent": 32, "rope": 16}
    for name, case in CHECKED.items():
        tolerance = TOLERANCE[case.get("dtype", torch.bfloat16)]
        yield measure.checked(name, tolerance, _error, device, case | small if tiny else case)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per call for contexts, batches, heads and nodes."""
    sizes = ((20,), (1,), (4,), (1, 3)) if tiny else ((1024, 8192, 32768), (1, 8, 64), (16, 128), (1, 4, 16, 64))
    contexts, batches, every_heads, every_nodes = sizes
    for context, batch, heads in itertools.product(contexts, batches, every_heads):
        decode = None
        for nodes in every_nodes:
            row: measure.Row = {"context": context, "batch": batch, "heads": heads, "nodes": nodes}
            width = LATENT + ROPE
            size = 2 * batch * ((context + nodes) * width + nodes * heads * (width + LATENT))
            copies = measure.copies_for(2 * batch * context * width, device)
            if time.monotonic() > deadline:
                yield row | {"us": measure.LATE}
                continue
            if 3 * copies * 2 * batch * context * width + (1 << 30) > measure.free_bytes(device):
                yield row | {"us": measure.NO_MEMORY}
                continue
            several = inputs(device, [context] * batch, [nodes] * batch, heads, causal=nodes == 1, copies=copies)
            calls = [partial(mla_attention, **arguments) for arguments in several]
            found = measure.attempted(deadline, measure.graph_time, calls)
            decode = found if decode is None else decode
            yield row | measure.time_cells(found, size, device) | {"tree/decode": measure.ratio(found, decode)}


if __name__ == "__main__":
    measure.main(check, times, __doc__)
