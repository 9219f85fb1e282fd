# SPDX-License-Identifier: Apache-2.0
"""Tree attention by our kernel against torch and, where they are installed, FlashInfer and xFormers: errors and times.

    python -m specinfer_vllm.bench.kernels.tree_libraries [--tiny]

These are what the option tree_attention lets attend in the kernel's place (specinfer_vllm/attention/libraries.py). Each
time is that of one layer, once the step's masks are made and planned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specinfer_vllm.attention.libraries import LIBRARIES, AttentionKind, Library
from specinfer_vllm.attention.tree_call import TreeCall
from specinfer_vllm.bench.kernels import measure
from specinfer_vllm.bench.kernels.tree_attention import LONG, MIXED, TOLERANCE, inputs, shrunk
from specinfer_vllm.triton_kernels.tree_attention import FP8, tree_attention

# Few kinds of bf16 and one head size: FlashInfer compiles a kernel for each.
CHECKED: dict[str, dict[str, object]] = {
    "trees": MIXED | {"kv_heads": 8},
    "a level of each tree, window, HND": LONG | {"last": 4, "window": 3000, "layout": "HND"},
    "window, soft cap, interleaved": LONG | {"window": 300, "soft_cap": 20.0, "layout": "interleaved"},
    "sinks": LONG | {"sinks": True},
    "fp8 e4m3 with scales": LONG | {"cache_dtype": torch.float8_e4m3fn, "scales": True},
}
TIMED: dict[str, object] = {"contexts": (8192,) * 8, "nodes": (16,) * 8, "kv_heads": 8}
TINY: dict[str, object] = {"contexts": (20,), "nodes": (5,), "head_dim": 32}


def obstacle(library: Library, device: torch.device) -> str:
    """Why it cannot run here, empty where it can."""
    if not library.is_installed:
        return f"{library.package} is not installed"
    return "needs a GPU" if library.needs and device.type == "cpu" else ""


def kind_of(arguments: dict[str, object]) -> AttentionKind:
    """What a library is asked about."""
    query = arguments["query"]
    return AttentionKind(
        head_size=query.shape[2],
        dtype=query.dtype,
        has_sinks="sinks" in arguments,
        has_soft_cap="soft_cap" in arguments,
        is_quantised=arguments["key"].dtype in FP8,
        is_amd=bool(torch.version.hip),
        capability=torch.cuda.get_device_capability(query.device) if query.is_cuda else None,
    )


def _error(library: Library, arguments: dict[str, object]) -> float:
    output = torch.full_like(arguments["query"], torch.nan)
    library.attend(TreeCall(**arguments, output=output))
    return measure.relative_error(output, tree_attention(**arguments))


def check(device: torch.device, tiny: bool) -> Iterator[measure.Check]:
    """Distance of each library's output to the kernel's; both round, so twice what the kernel may be off."""
    for library in LIBRARIES.values():
        if missing := obstacle(library, device):
            measure.say(f"SKIP  {library.name}: {missing}")
            continue
        for name, case in CHECKED.items():
            arguments = inputs(device, **(shrunk(case) if tiny else case))
            if unknown := library.unknown(kind_of(arguments)):
                measure.say(f"SKIP  {library.name}, {name}: does not know {', '.join(unknown)}")
                continue
            tolerance = 2 * TOLERANCE[arguments["query"].dtype]
            yield measure.checked(f"{library.name}, {name}", tolerance, _error, library, arguments)


def times(device: torch.device, tiny: bool, deadline: float) -> Iterator[measure.Row]:
    """Microseconds per call of the kernel and of each library that takes this attention."""
    arguments = inputs(device, **(TINY if tiny else TIMED))
    step: measure.Row = {"context": TINY["contexts"][0] if tiny else TIMED["contexts"][0]}
    step |= {"batch": len(arguments["prefix_len"]), "nodes": arguments["max_rows"]}
    found = measure.attempted(deadline, measure.call_time, lambda: tree_attention(**arguments))
    yield {"by": "our kernel"} | step | measure.time_cells(found)
    call = TreeCall(**arguments, output=torch.empty_like(arguments["query"]))
    for library in LIBRARIES.values():
        if not obstacle(library, device) and not library.unknown(kind_of(arguments)):
            found = measure.attempted(deadline, measure.call_time, lambda attend=library.attend: attend(call))
            yield {"by": library.name} | step | measure.time_cells(found)


if __name__ == "__main__":
    measure.main(check, times, __doc__)
