# SPDX-License-Identifier: Apache-2.0
"""Where a request's grammar masks stand in vLLM's buffer, by release (vllm/v1/structured_output/__init__.py)."""

from __future__ import annotations

from typing import Any

from specinfer_vllm.patches.patch import is_version_in, vllm_version


class PackedMasks032:
    """0.32: the rows of the requests stand behind each other, root and scheduled nodes."""

    def __init__(self, stride: int) -> None:
        """stride: most rows of one request."""
        self.stride = stride

    def starts(self, counts: list[int]) -> list[int]:
        """First row of each request, and the number of rows in all; counts: rows of each."""
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        return starts

    def entry(self, manager: Any, request: Any, grammar: Any, row: int, applies: bool) -> tuple:
        """What `_fill_bitmasks` takes for one row."""
        return grammar, row, applies


class StridedMasks033(PackedMasks032):
    """0.33: each request owns `stride` rows, of which those behind its last node are not read."""

    def starts(self, counts: list[int]) -> list[int]:
        """As PackedMasks032.starts."""
        return [i * self.stride for i in range(len(counts) + 1)]

    def entry(self, manager: Any, request: Any, grammar: Any, row: int, applies: bool) -> tuple:
        """As PackedMasks032.entry; a row that is open keeps tokens out that would end the reasoning unseen."""
        masked = () if applies else manager._masked_reasoning_ends(request)
        return grammar, row, applies, masked


def mask_layout(stride: int) -> PackedMasks032:
    """The layout of the vLLM in this process."""
    kind = StridedMasks033 if is_version_in(vllm_version(), ">=0.33") else PackedMasks032
    return kind(stride)
