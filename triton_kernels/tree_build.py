# SPDX-License-Identifier: Apache-2.0
"""Arrays of a batch of token trees from their parents in one launch, in the rows' order or put into depth-first order.

In    parent       [rows] int32                         index within the request, -1 at the root; a parent stands before
                                                        its children
      start        [requests + 1] int32                 rows of request r: start[r]:start[r+1], may be none
      prefix_len   [requests] int32                     committed tokens before the root
      block_table  [requests, max_blocks] int32         optional, for the slots; row stride free
      tokens       [rows] int32                         depth_first only: carried into the new order
      score        [rows] float32                       depth_first only: of siblings the highest comes first, of equal
                                                        ones the earlier row; NaN last
Out   depth        [rows] int32                         0 at a root
      position     [rows] int64                         prefix_len + depth
      ancestors    [rows, words] int64                  bit j of row i: node j is on i's path, i itself included
      slot         [rows] int64                         block * block_size + offset of sequence index prefix_len + row
      tokens, parent [rows] int32                       depth_first only: as above, in the new order
      source       [rows] int32                         depth_first only: row (of all rows) that stood here before
Work  scratch      [2, rows] int32                      depth_first only: contents undefined before and after

Rows past start[-1] are neither read nor written. All words of a row's bits are written.
Undefined: what a parent that does not stand before its child leads to (the walk ends there; it always ends);
block_table entries past a request's last row (never read).

A row walks up to its root, all rows of a tile at once: as many dependent reads as the deepest path has nodes, all in
cache, no barrier and no scratch. Bytes per row: 4 + 4 + 8 + 8 * words + 8. Depth-first order takes one program per
request: rows count themselves into the subtrees above them; a row's place is the sum, over its path, of 1 + the
subtrees of earlier siblings, which is rows^2 comparisons. Products with block numbers and rows are 64-bit.
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


@dataclass(frozen=True)
class OrderedTrees:
    """What depth_first writes, as in the contract, and the scratch that it works in."""

    tokens: torch.Tensor
    parent: torch.Tensor
    source: torch.Tensor
    arrays: TreeArrays
    scratch: torch.Tensor


@triton.jit
def _above(parent, first, node, on_path):
    """The nodes above; -1 above a root, and where a link does not rise: it would never end."""
    above = tl.load(parent + first + node, mask=on_path, other=-1)
    return tl.where(above < node, tl.maximum(above, -1), -1)


@triton.jit
def _scores(score, first, node, live):
    """Scores of some nodes; NaN, which has no order, as the lowest."""
    x = tl.load(score + first + node, mask=live, other=0.0)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _write_paths(
    parent, places, first, node, live, at, prefix, request, block_table, depth, position, ancestors, slot, words,
    table_stride, ancestors_stride, BLOCK_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """Walk up from nodes [BLOCK_ROWS] and write what their rows `at` (within the request) get."""
    word = tl.arange(0, BLOCK_WORDS)
    node = tl.where(live, node, -1)
    levels = tl.full([BLOCK_ROWS], -1, tl.int32)
    bits = tl.zeros([BLOCK_ROWS, BLOCK_WORDS], tl.int64)
    while tl.max(node, 0) >= 0:
        on_path = node >= 0
        levels += on_path.to(tl.int32)
        place = node
        if HAS_PLACES:
            place = tl.load(places + first + node, mask=on_path, other=0)
        bit = tl.full([BLOCK_ROWS], 1, tl.int64) << (place & 63).to(tl.int64)
        bits |= tl.where(on_path[:, None] & ((place >> 6)[:, None] == word[None, :]), bit[:, None], 0)
        node = _above(parent, first, node, on_path)

    row = first + at
    tl.store(depth + row, levels, mask=live)
    tl.store(position + row, prefix + levels, mask=live)
    bits_at = ancestors + (row * ancestors_stride)[:, None] + word[None, :]
    tl.store(bits_at, bits, mask=live[:, None] & (word < words)[None, :])
    if HAS_SLOTS:
        index = prefix + at
        table = block_table + request.to(tl.int64) * table_stride
        block = tl.load(table + index // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        tl.store(slot + row, block * BLOCK_SIZE + index % BLOCK_SIZE, mask=live)


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
    first = first.to(tl.int64)
    if tl.program_id(0) * BLOCK_ROWS >= rows:
        return
    local = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    _write_paths(
        parent, parent, first, local, local < rows, local, tl.load(prefix_len + request).to(tl.int64), request,
        block_table, depth, position, ancestors, slot, words, table_stride, ancestors_stride,
        BLOCK_SIZE, BLOCK_ROWS, BLOCK_WORDS, HAS_SLOTS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words"])
def _depth_first(
    tokens,
    parent,
    score,
    start,
    prefix_len,
    block_table,
    subtree,
    places,
    new_tokens,
    new_parent,
    source,
    depth,
    position,
    ancestors,
    slot,
    words,
    table_stride,
    ancestors_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIBLINGS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Program (request): sizes of subtrees, distances to the parents' places, places, then everything in its place."""
    request = tl.program_id(0)
    first = tl.load(start + request)
    rows = tl.load(start + request + 1) - first
    first = first.to(tl.int64)
    prefix = tl.load(prefix_len + request).to(tl.int64)

    for at in range(0, rows, BLOCK_ROWS):
        local = at + tl.arange(0, BLOCK_ROWS)
        tl.store(subtree + first + local, tl.zeros([BLOCK_ROWS], tl.int32), mask=local < rows)
    tl.debug_barrier()
    for at in range(0, rows, BLOCK_ROWS):
        local = at + tl.arange(0, BLOCK_ROWS)
        node = tl.where(local < rows, local, -1)
        while tl.max(node, 0) >= 0:
            tl.atomic_add(subtree + first + node, 1, mask=node >= 0)
            node = _above(parent, first, node, node >= 0)
    tl.debug_barrier()

    for at in range(0, rows, BLOCK_ROWS):
        local = at + tl.arange(0, BLOCK_ROWS)
        live = local < rows
        own_parent = _above(parent, first, local, live)
        own_score = _scores(score, first, local, live)
        distance = (own_parent >= 0).to(tl.int32)
        for other in range(0, rows, BLOCK_SIBLINGS):
            sibling = other + tl.arange(0, BLOCK_SIBLINGS)
            theirs = _above(parent, first, sibling, sibling < rows)
            their_score = _scores(score, first, sibling, sibling < rows)
            size = tl.load(subtree + first + sibling, mask=sibling < rows, other=0)
            equal = their_score[None, :] == own_score[:, None]
            ahead = (their_score[None, :] > own_score[:, None]) | (equal & (sibling[None, :] < local[:, None]))
            ahead = ahead & (theirs[None, :] == own_parent[:, None])
            distance += tl.sum(tl.where(ahead, size[None, :], 0), 1)
        tl.store(places + first + local, distance, mask=live)
    tl.debug_barrier()

    for at in range(0, rows, BLOCK_ROWS):
        local = at + tl.arange(0, BLOCK_ROWS)
        node = tl.where(local < rows, local, -1)
        place = tl.zeros([BLOCK_ROWS], tl.int32)
        while tl.max(node, 0) >= 0:
            place += tl.load(places + first + node, mask=node >= 0, other=0)
            node = _above(parent, first, node, node >= 0)
        # Distances are read until all places are known; sizes are not needed any more.
        tl.store(subtree + first + local, place, mask=local < rows)
    tl.debug_barrier()

    for at in range(0, rows, BLOCK_ROWS):
        local = at + tl.arange(0, BLOCK_ROWS)
        live = local < rows
        place = tl.load(subtree + first + local, mask=live, other=0)
        above = _above(parent, first, local, live)
        moved = tl.load(subtree + first + above, mask=above >= 0, other=-1)
        tl.store(new_tokens + first + place, tl.load(tokens + first + local, mask=live, other=0), mask=live)
        tl.store(new_parent + first + place, moved, mask=live)
        tl.store(source + first + place, (first + local).to(tl.int32), mask=live)
        _write_paths(
            parent, subtree, first, local, live, place, prefix, request, block_table, depth, position, ancestors,
            slot, words, table_stride, ancestors_stride,
            BLOCK_SIZE, BLOCK_ROWS, BLOCK_WORDS, HAS_SLOTS, True,
        )  # fmt: skip


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
    _check(parent, start, prefix_len, block_table)
    out = out or _allocated(rows, words_for(max_rows), parent.device, block_table is not None)
    _check_out(out, rows, max_rows, block_table is not None)
    if not rows or not requests or not max_rows:
        return out
    block_words = triton.next_power_of_2(out.ancestors.shape[1])
    block_rows = _tile(max_rows, block_words)
    _build[(triton.cdiv(max_rows, block_rows), requests)](
        parent,
        start,
        prefix_len,
        block_table,
        *_pointers(out, block_table),
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        HAS_SLOTS=block_table is not None,
        num_warps=4 if block_rows * block_words > 128 else 1,
    )
    return out


def depth_first(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    score: torch.Tensor,
    start: torch.Tensor,
    prefix_len: torch.Tensor,
    *,
    max_rows: int,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    out: OrderedTrees | None = None,
) -> OrderedTrees:
    """The trees in depth-first order, likeliest child first; arguments as for build, tensors as in the contract.

    Raises ValueError that names the tensor at fault.
    """
    rows, requests = len(parent), len(prefix_len)
    _check(parent, start, prefix_len, block_table)
    for name, tensor, dtype in (("tokens", tokens, torch.int32), ("score", score, torch.float32)):
        _check_list(name, tensor, dtype, rows)
    if out is None:
        lists = [torch.empty(rows, dtype=torch.int32, device=parent.device) for _ in range(3)]
        scratch = torch.empty(2, rows, dtype=torch.int32, device=parent.device)
        arrays = _allocated(rows, words_for(max_rows), parent.device, block_table is not None)
        out = OrderedTrees(*lists, arrays, scratch)
    for name in ("tokens", "parent", "source"):
        _check_list(name, getattr(out, name), torch.int32, rows)
    if out.scratch.dim() != 2 or len(out.scratch) != 2:
        raise ValueError(f"scratch: {tuple(out.scratch.shape)} must be [2, {rows}] int32")
    _check_list("scratch", out.scratch[1], torch.int32, rows)
    _check_out(out.arrays, rows, max_rows, block_table is not None)
    if not rows or not requests or not max_rows:
        return out
    block_words = triton.next_power_of_2(out.arrays.ancestors.shape[1])
    block_rows = _tile(max_rows, block_words)
    siblings = min(triton.next_power_of_2(max_rows), max(1, 4096 // block_rows), 64)
    _depth_first[(requests,)](
        tokens,
        parent,
        score,
        start,
        prefix_len,
        block_table,
        *out.scratch,
        out.tokens,
        out.parent,
        out.source,
        *_pointers(out.arrays, block_table),
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIBLINGS=siblings,
        BLOCK_WORDS=block_words,
        HAS_SLOTS=block_table is not None,
        num_warps=4 if block_rows * max(block_words, siblings) > 128 else 1,
    )
    return out


def _tile(max_rows: int, block_words: int) -> int:
    """Rows that a program walks at once: at most 2048 words of bits, 16 per thread."""
    return min(triton.next_power_of_2(max_rows), max(16, 1024 // block_words), 128)


def _pointers(out: TreeArrays, block_table: torch.Tensor | None) -> tuple:
    """The kernels' arguments from `depth` to `ancestors_stride`."""
    bits = out.ancestors
    table_stride = block_table.stride(0) if block_table is not None else 0
    return out.depth, out.position, bits, out.slot, bits.shape[1], table_stride, bits.stride(0)


def _check(parent, start, prefix_len, block_table) -> None:
    """Raise ValueError for inputs that the kernels do not take. Looks at no contents."""
    requests = len(prefix_len)
    for name, tensor in {"parent": parent, "start": start, "prefix_len": prefix_len}.items():
        _check_list(name, tensor, torch.int32, len(tensor))
    if len(start) != requests + 1:
        raise ValueError(f"start: has {len(start)} elements, {requests + 1} are needed for {requests} requests")
    if block_table is not None and (block_table.dtype != torch.int32 or len(block_table) != requests):
        raise ValueError(f"block_table: {tuple(block_table.shape)} {block_table.dtype} must be [{requests}, ...] int32")


def _check_list(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or len(tensor) < length or not tensor.is_contiguous():
        raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be a contiguous list of {length} {dtype}")


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
