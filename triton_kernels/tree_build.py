# SPDX-License-Identifier: Apache-2.0
"""Depths, positions, ancestor bits and slots of a batch of token trees from their parents, in one launch.

In    parent       [rows] int32                         index within the request, -1 at the root; a parent stands before
                                                        its children
      start        [requests + 1] int32                 rows of request r: start[r]:start[r+1], may be none
      prefix_len   [requests] int32                     committed tokens before the root
      block_table  [requests, max_blocks] int32         optional, for the slots; row stride free
Out   depth        [rows] int32                         0 at a root
      position     [rows] int64                         prefix_len + depth
      ancestors    [rows, words] int64                  bit j of row i: node j is on i's path, i itself included
      slot         [rows] int64                         block * block_size + offset of sequence index prefix_len + row

Rows past start[-1] are neither read nor written. All words of a row's bits are written.
Undefined: what a parent that does not stand before its child leads to (the walk ends there; it always ends);
block_table entries past a request's last row (never read).

A row walks up to its root, all rows of a tile at once: as many dependent reads as the deepest path has nodes, all in
cache, no barrier and no scratch. Bytes per row: 4 + 4 + 8 + 8 * words + 8. Tokens play no part: depths and bits come
from the parents. Products with block numbers and rows are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORD_BITS = 64


@dataclass(frozen=True)
class TreeArrays:
    """What build writes, as in the contract; slot is None without a block table."""

    depth: torch.Tensor
    position: torch.Tensor
    ancestors: torch.Tensor
    slot: torch.Tensor | None


@triton.jit(do_not_specialize=["words"])
def _build(
    parent,
    start,
    prefix_len,
    block_table,
    depth,
    position,
    ancestors,
    slot,
    words,
    table_stride,
    ancestors_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Program (rows of a request, request)."""
    request = tl.program_id(1)
    first = tl.load(start + request)
    rows = tl.load(start + request + 1) - first
    if tl.program_id(0) * BLOCK_ROWS >= rows:
        return
    local = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = local < rows
    row = first.to(tl.int64) + local
    word = tl.arange(0, BLOCK_WORDS)

    node = tl.where(live, local, -1)
    levels = tl.full([BLOCK_ROWS], -1, tl.int32)
    bits = tl.zeros([BLOCK_ROWS, BLOCK_WORDS], tl.int64)
    while tl.max(node, 0) >= 0:
        on_path = node >= 0
        levels += on_path.to(tl.int32)
        bit = tl.full([BLOCK_ROWS], 1, tl.int64) << (node & 63).to(tl.int64)
        bits |= tl.where(on_path[:, None] & ((node >> 6)[:, None] == word[None, :]), bit[:, None], 0)
        above = tl.load(parent + first.to(tl.int64) + node, mask=on_path, other=-1)
        # Parents stand before children; a link that does not rise would never end.
        node = tl.where(above < node, above, -1)

    prefix = tl.load(prefix_len + request).to(tl.int64)
    tl.store(depth + row, levels, mask=live)
    tl.store(position + row, prefix + levels, mask=live)
    bits_at = ancestors + (row * ancestors_stride)[:, None] + word[None, :]
    tl.store(bits_at, bits, mask=live[:, None] & (word < words)[None, :])
    if HAS_SLOTS:
        index = prefix + local
        table = block_table + request.to(tl.int64) * table_stride
        block = tl.load(table + index // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        tl.store(slot + row, block * BLOCK_SIZE + index % BLOCK_SIZE, mask=live)


def words_for(max_rows: int) -> int:
    """Words of ancestor bits for trees of up to so many rows, at least 1."""
    return max(1, -(-max_rows // WORD_BITS))


def build(
    parent: torch.Tensor,
    start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    out: TreeArrays | None = None,
) -> TreeArrays:
    """The trees' arrays; tensors as in the contract above, all on one device. No host sync.

    max_rows: upper bound of one request's rows, known on the host. out: buffers to write to, allocated when missing;
    its ancestors may have more words than needed. Raises ValueError that names the tensor at fault.
    """
    rows, requests = len(parent), len(prefix_len)
    for name, tensor in {"parent": parent, "start": start, "prefix_len": prefix_len}.items():
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be a contiguous list of int32")
    if len(start) != requests + 1:
        raise ValueError(f"start: has {len(start)} elements, {requests + 1} are needed for {requests} requests")
    if block_table is not None and (block_table.dtype != torch.int32 or len(block_table) != requests):
        raise ValueError(f"block_table: {tuple(block_table.shape)} {block_table.dtype} must be [{requests}, ...] int32")
    out = out or _allocated(rows, words_for(max_rows), parent.device, block_table is not None)
    _check_out(out, rows, max_rows, block_table is not None)
    if not rows or not requests or not max_rows:
        return out
    words = out.ancestors.shape[1]
    block_words = triton.next_power_of_2(words)
    # At most 2048 words of bits in a program, 16 per thread.
    block_rows = min(triton.next_power_of_2(max_rows), max(16, 1024 // block_words), 128)
    _build[(triton.cdiv(max_rows, block_rows), requests)](
        parent,
        start,
        prefix_len,
        block_table,
        out.depth,
        out.position,
        out.ancestors,
        out.slot,
        words,
        block_table.stride(0) if block_table is not None else 0,
        out.ancestors.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        HAS_SLOTS=block_table is not None,
        num_warps=4 if block_rows * block_words > 128 else 1,
    )
    return out


def _allocated(rows: int, words: int, device: torch.device, slots: bool) -> TreeArrays:
    return TreeArrays(
        depth=torch.empty(rows, dtype=torch.int32, device=device),
        position=torch.empty(rows, dtype=torch.int64, device=device),
        ancestors=torch.empty(rows, words, dtype=torch.int64, device=device),
        slot=torch.empty(rows, dtype=torch.int64, device=device) if slots else None,
    )


def _check_out(out: TreeArrays, rows: int, max_rows: int, slots: bool) -> None:
    """Raise ValueError for an output that the kernel would write past or in another type."""
    expected = {"depth": torch.int32, "position": torch.int64, "ancestors": torch.int64}
    if slots:
        expected["slot"] = torch.int64
    for name, dtype in expected.items():
        tensor = getattr(out, name)
        if tensor is None or tensor.dtype != dtype or len(tensor) < rows or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: must have at least {rows} rows of {dtype}, contiguous in the last dimension")
    if out.ancestors.dim() != 2 or out.ancestors.shape[1] < words_for(max_rows):
        raise ValueError(f"ancestors: {tuple(out.ancestors.shape)} must have {words_for(max_rows)} words or more")
