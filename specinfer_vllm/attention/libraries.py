# SPDX-License-Identifier: Apache-2.0
"""What may compute the attention of tree rows in our kernel's place: a cross-check and a fallback, off by default.

All read the trees on the host. Host-free: the modules, and the packages behind them, are imported when they attend.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import torch

from specinfer_vllm.attention.tree_call import TreeCall

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AttentionKind:
    """What a library is asked about: a layer's attention, or a model's as far as it is known before its layers are.

    dtype       of the model, None = not known
    capability  of an NVIDIA GPU, None = not known
    """

    head_size: int
    dtype: torch.dtype | None = None
    has_sinks: bool = False
    has_soft_cap: bool = False
    is_quantised: bool = False
    is_amd: bool = False
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Library:
    """One of them, and what it knows.

    name           value of the option tree_attention
    module         of this folder, whose `attend` takes a TreeCall
    needs          module that must be there, "" = nothing beside torch
    package        which brings it
    dtypes         of queries, keys and values
    head_sizes     () = all multiples of head_multiple
    is_for_nvidia  it does not run on other GPUs
    newest         compute capability of the newest NVIDIA GPUs that it runs on, None = all
    """

    name: str
    module: str
    needs: str = ""
    package: str = ""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_sizes: tuple[int, ...] = ()
    head_multiple: int = 1
    sinks: bool = True
    soft_cap: bool = True
    quantised: bool = True
    is_for_nvidia: bool = False
    newest: tuple[int, int] | None = None

    @property
    def is_installed(self) -> bool:
        """Whether Python finds what it needs; nothing is imported."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def attend(self, call: TreeCall) -> None:
        """Write call.output."""
        importlib.import_module(f"specinfer_vllm.attention.{self.module}").attend(call)

    def unknown(self, kind: AttentionKind) -> list[str]:
        """What of this attention it does not know, by name."""
        heads = kind.head_size in self.head_sizes if self.head_sizes else kind.head_size % self.head_multiple == 0
        is_newer = None not in (self.newest, kind.capability) and kind.capability > self.newest
        found = {
            f"heads of {kind.head_size}": not heads,
            f"dtype {kind.dtype}": kind.dtype not in (None, *self.dtypes),
            "sinks": kind.has_sinks and not self.sinks,
            "a soft cap": kind.has_soft_cap and not self.soft_cap,
            "quantised K/V": kind.is_quantised and not self.quantised,
            "AMD GPUs": kind.is_amd and self.is_for_nvidia,
            f"a device of compute capability {'.'.join(map(str, kind.capability or ()))}": is_newer,
        }
        return [name for name, is_so in found.items() if is_so]


LIBRARIES = {
    each.name: each
    for each in (
        Library("torch", "dense_masks"),
        Library(
            "flashinfer",
            "flashinfer_masks",
            needs="flashinfer",
            package="flashinfer-python",
            dtypes=(torch.float16, torch.bfloat16),
            head_sizes=(64, 128, 256),  # as vLLM asks it for, up to our backend's largest
            sinks=False,
            quantised=False,
            is_for_nvidia=True,
        ),
        Library(
            "xformers",
            "xformers_masks",
            needs="xformers",
            package="xformers",
            head_multiple=8,
            sinks=False,
            soft_cap=False,
            quantised=False,
            is_for_nvidia=True,
            newest=(9, 0),  # of its one kernel that takes any bias
        ),
    )
}
