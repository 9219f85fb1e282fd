# SPDX-License-Identifier: Apache-2.0
"""The walk that accepts nodes: greedy, naive, multi-step, without replacement; all requests in one launch per step.

In    logits       [rows, vocab] fp16/bf16/fp32     processed: over the temperature, -inf where masked; read in place
      tokens       [rows] int32 or int64            token at each row; negative at placeholders, which nothing matches
      parent       [rows] int32                     index within the request, -1 at the root; a parent stands before its
                                                    children; siblings carry different tokens
      start        [requests + 1] int32             rows of request r: start[r]:start[r+1], may be none
      seed         [requests] int64                 the request's seed; None = every request is greedy
      position     [rows] int64                     position of the token that the row emits
      greedy       [requests] bool, optional        these take the most probable token, of equal ones the lowest id
      draws        DraftRows, optional              the sampled draws and the laws they were made from
Out   tokens       [requests, max_depth + 1] int64  emitted tokens, -1 behind the last
      rows         [requests, max_depth + 1] int64  row whose logits gave the token: the root, then the accepted nodes
      num_tokens   [requests] int32                 accepted nodes + 1; 0 for a request without rows
Work  residual     [requests, 2, vocab] float32     with draws only; contents undefined before and after

At the node where a request stands, with R = softmax(logits):

    for each draw x made under it, in order, from the law D: accept with min(1, R[x] / D[x]), else R = norm(relu(R - D))
    y ~ R; a child that carries y is accepted, else the walk ends

Without draws this is naive sampling. With D = q it is SpecInfer's Algorithm 2, and top-(k-1)+1. With D = q without its
SSM's earlier draws under the node, uniform over the rest once the support is exhausted, it is recursive rejection (RSD,
Sequoia). Coins are those of verify/coins.py, keyed by (seed, position, purpose, index): 53 bits of splitmix64.

A row whose logits hold NaN, +inf or nothing but -inf emits `vocab`, which no child carries: its walk ends. Undefined:
laws that do not sum to 1; draws listed under another row than their node's parent; drawn tokens past the vocabulary.

A program walks one request and streams the vocabulary in blocks. A visited node costs one read of its logits, each
refused draw one more of R and of q and one write of R; sampling reads one block again. Sums are float32 within a block,
float64 between blocks and against coins. Products of rows and strides are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specinfer_vllm.triton_kernels import tuning

SAMPLE = tl.constexpr(1)  # purposes of coins, as in verify/coins.py
ACCEPT = tl.constexpr(2)
CHILDREN = 64  # rows looked at together for the child that carries a token
# How draws are made, as the kernel's DRAWING; 0 = no draws.
WITHOUT_REPLACEMENT = tl.constexpr(2)
DRAWINGS = {"iid": 1, "without_replacement": WITHOUT_REPLACEMENT.value}


@dataclass(frozen=True)
class DraftRows:
    """The sampled draws of a batch. One-hot children are not listed: they are met by the token sampled in the end.

    start    [rows + 1] int32         draws made under row i: start[i]:start[i+1], in the order of drawing (all of the
                                      first SSM, then the second's)
    row      [draws] int32            row that carries the draw's token
    law      [draws] int32            row of `laws` it was sampled from
    laws     [laws, vocab] fp16/bf16/fp32    q as sampled from, after temperature, top-k and top-p
    mass     [laws] float64           sum of each law, and
    support  [laws] int32             how many tokens have a probability: law_sums(laws), for draws without replacement
    """

    start: torch.Tensor
    row: torch.Tensor
    law: torch.Tensor
    laws: torch.Tensor
    mass: torch.Tensor | None = None
    support: torch.Tensor | None = None


@dataclass(frozen=True)
class Walk:
    """What verify writes, as in the contract."""

    tokens: torch.Tensor
    rows: torch.Tensor
    num_tokens: torch.Tensor

    @classmethod
    def empty(cls, requests: int, width: int, device: torch.device | str) -> Walk:
        """Buffers to write to, contents undefined; width = max_depth + 1."""
        return cls(
            tokens=torch.empty(requests, width, dtype=torch.int64, device=device),
            rows=torch.empty(requests, width, dtype=torch.int64, device=device),
            num_tokens=torch.empty(requests, dtype=torch.int32, device=device),
        )

    def check(self, requests: int, width: int) -> None:
        """Raise ValueError for tensors of another shape or type than a walk writes."""
        for name in ("tokens", "rows"):
            tensor = getattr(self, name)
            if tensor.shape != (requests, width) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} must be [{requests}, {width}] int64")
        check_list("num_tokens", self.num_tokens, torch.int32, requests)


@triton.jit
def mix(x):
    """splitmix64's output function (Steele, Lea, Flood 2014) on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def key_of(seed, position):
    """What verify/coins.py makes of a request's seed and a position, before the purpose comes in."""
    return mix(mix(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))


@triton.jit
def coin_of(key):
    """A uniform number in [0, 1), float64, from a key."""
    return (mix(key) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def block_sums(line, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Largest logit of a row, and each block's largest and sum of exp(logit - largest), [BLOCKS]."""
    every = tl.arange(0, BLOCKS)
    maxima = tl.full([BLOCKS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCKS], tl.float32)
    for block in range(0, (VOCAB + BLOCK - 1) // BLOCK):
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(line + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)), 0)
        maxima = tl.where(every == block, highest, maxima)
        sums = tl.where(every == block, total, sums)
    maximum = tl.max(maxima, 0)
    scale = tl.exp(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    return maximum, maxima, sums.to(tl.float64) * scale


@triton.jit
def weights_of(line, maximum, halves, side, token, inside, VOCAB: tl.constexpr, DRAWING: tl.constexpr):
    """R of some tokens up to a factor: exp(logit - maximum) while side is -1, then what half `side` keeps."""
    if DRAWING == 0:
        weight = _weights_of_logits(line, maximum, token, inside)
    else:
        if side < 0:
            weight = _weights_of_logits(line, maximum, token, inside)
        else:
            weight = tl.load(halves + side * VOCAB + token, mask=inside, other=0.0)
    return weight


@triton.jit
def _weights_of_logits(line, maximum, token, inside):
    return tl.exp(tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32) - maximum)


@triton.jit
def subtract(
    line, maximum, halves, side, kept, inverse, q, scale, shift,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DRAWING: tl.constexpr,
):  # fmt: skip
    """Write relu(R - scale * q - shift) to half `kept`, R = weights * inverse. Returns its sum in each block."""
    every = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float32)
    for block in range(0, (VOCAB + BLOCK - 1) // BLOCK):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        weight = weights_of(line, maximum, halves, side, token, inside, VOCAB, DRAWING)
        drafted = tl.load(q + token, mask=inside, other=0.0).to(tl.float32)
        raw = tl.where(inside, tl.maximum(weight * inverse - (drafted * scale + shift), 0.0), 0.0)
        tl.store(halves + kept * VOCAB + token, raw, mask=inside)
        sums = tl.where(every == block, tl.sum(raw, 0), sums)
    # Other threads read these as single tokens next.
    tl.debug_barrier()
    return sums.to(tl.float64)


@triton.jit
def sampled_from(
    line, maximum, halves, side, sums, coin,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DRAWING: tl.constexpr,
):  # fmt: skip
    """Inverse-CDF sample of R: never a token without weight, whatever the coin."""
    every = tl.arange(0, BLOCKS)
    wanted = coin * tl.sum(sums, 0)
    block = tl.sum((tl.cumsum(sums, 0) <= wanted).to(tl.int32), 0)
    block = tl.minimum(block, tl.max(tl.where(sums > 0, every, 0), 0))  # the product can round up to the total
    wanted -= tl.sum(tl.where(every < block, sums, 0.0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weight = weights_of(line, maximum, halves, side, token, token < VOCAB, VOCAB, DRAWING)
    # The block's own sum may round above its last partial sum.
    last = tl.max(tl.where(weight > 0, token, 0), 0)
    reached = (tl.cumsum(weight.to(tl.float64), 0) > wanted) & (weight > 0)
    return tl.minimum(tl.min(tl.where(reached, token, VOCAB), 0), last)


@triton.jit
def most_probable(line, maximum, maxima, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The lowest token with the largest logit."""
    block = tl.min(tl.where(maxima == maximum, tl.arange(0, BLOCKS), BLOCKS - 1), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(line + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where((x == maximum) & (token < VOCAB), token, VOCAB - 1), 0)


@triton.jit
def drafted_from(own, law, previous, taken, earlier, law_mass, law_support, VOCAB: tl.constexpr):
    """(scale, shift): the draw came from scale * q + shift on the tokens its SSM had not drawn before; R is 0 on those.

    taken, earlier: mass and number of the draws before it from the law `previous`.
    """
    taken = tl.where(law == previous, taken, 0.0)
    earlier = tl.where(law == previous, earlier, 0)
    # Rounding must not leave less than the drawn token itself weighs.
    left = tl.maximum(tl.load(law_mass + law) - taken, own)
    exhausted = earlier >= tl.load(law_support + law)
    scale = tl.where(exhausted | (left <= 0), 0.0, 1.0 / tl.where(left > 0, left, 1.0))
    shift = tl.where(exhausted, 1.0 / tl.maximum(VOCAB - earlier, 1).to(tl.float64), 0.0)
    return scale, shift, taken + own, earlier + 1


@triton.jit
def _try_draws(
    line, maximum, sums, halves, key, row, tokens, draw_start, draw_row, draw_law, laws, law_mass, law_support,
    laws_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DRAWING: tl.constexpr,
):  # fmt: skip
    """Accept one of the row's draws, or leave the residual. Returns (its row, -1 if all are refused; side; sums)."""
    first = tl.load(draw_start + row)
    end = tl.load(draw_start + row + 1)
    draw = first
    accepted = first * 0 - 1
    side = first * 0 - 1
    previous = first * 0 - 1
    earlier = first * 0
    inverse = 1.0 / tl.sum(sums, 0)
    taken = inverse * 0
    while (draw < end) & (accepted < 0):
        carrier = tl.load(draw_row + draw)
        x = tl.load(tokens + carrier).to(tl.int64)
        law = tl.load(draw_law + draw)
        q = laws + law.to(tl.int64) * laws_stride
        own = tl.load(q + x).to(tl.float64)
        scale = inverse * 0 + 1
        shift = inverse * 0
        if DRAWING == WITHOUT_REPLACEMENT:
            scale, shift, taken, earlier = drafted_from(
                own, law, previous, taken, earlier, law_mass, law_support, VOCAB
            )
            previous = law
        weight = weights_of(line, maximum, halves, side, x, x >= 0, VOCAB, DRAWING).to(tl.float64)
        coin = coin_of(mix(mix(key ^ ACCEPT) ^ (draw - first).to(tl.uint64)))
        if coin * (scale * own + shift) < weight * inverse:
            accepted = carrier
        else:
            kept = tl.where(side == 0, 1, 0)
            rest = subtract(
                line, maximum, halves, side, kept, inverse.to(tl.float32), q, scale.to(tl.float32),
                shift.to(tl.float32), VOCAB, BLOCK, BLOCKS, DRAWING,
            )  # fmt: skip
            left = tl.sum(rest, 0)
            # Nothing left is rounding, as a refused x has R[x] < D[x]: R stays as it is.
            sums = tl.where(left > 0, rest, sums)
            inverse = tl.where(left > 0, 1.0 / tl.where(left > 0, left, 1.0), inverse)
            side = tl.where(left > 0, kept, side)
        draw += 1
    return accepted, side, sums


@triton.jit
def child_of(tokens, parent, first, rows, node, token, BLOCK: tl.constexpr):
    """Index of the child of `node` that carries `token`, -1 without one."""
    found = node * 0 - 1
    for at in range(0, rows, BLOCK):
        local = at + tl.arange(0, BLOCK)
        theirs = tl.load(tokens + first + local, mask=local < rows, other=-1)
        above = tl.load(parent + first + local, mask=local < rows, other=-2)
        hit = (theirs == token) & (above == node)
        found = tl.maximum(found, tl.max(tl.where(hit, local, -1), 0))
    return found


# tokens and parent are views that begin where a step has its rows: no code is made anew for that.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["tokens", "parent"])
def _verify(
    logits,
    tokens,
    parent,
    start,
    seed,
    position,
    greedy,
    draw_start,
    draw_row,
    draw_law,
    laws,
    law_mass,
    law_support,
    residual,
    out_tokens,
    out_rows,
    num_tokens,
    width,
    logits_stride,
    laws_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_CHILDREN: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    DRAWING: tl.constexpr,
    HAS_COINS: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
):
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(start + request)
    rows = tl.load(start + request + 1) - first
    best_only = rows < 0
    if HAS_GREEDY:
        best_only = tl.load(greedy + request) != 0
    halves = residual
    if DRAWING != 0:
        halves = residual + request * 2 * VOCAB
    count = rows * 0
    node = tl.where(rows > 0, 0, -1)
    while (node >= 0) & (count < width):
        row = (first + node).to(tl.int64)
        line = logits + row * logits_stride
        maximum, maxima, sums = block_sums(line, VOCAB, BLOCK, BLOCKS)
        total = tl.sum(sums, 0)
        accepted = node * 0 - 1
        token = node * 0 + VOCAB
        if (total > 0) & (total < float("inf")):
            if HAS_COINS:
                if best_only:
                    token = most_probable(line, maximum, maxima, VOCAB, BLOCK, BLOCKS)
                else:
                    key = key_of(tl.load(seed + request), tl.load(position + row))
                    side = node * 0 - 1
                    if DRAWING != 0:
                        carrier, side, sums = _try_draws(
                            line, maximum, sums, halves, key, row, tokens, draw_start, draw_row, draw_law, laws,
                            law_mass, law_support, laws_stride, VOCAB, BLOCK, BLOCKS, DRAWING,
                        )  # fmt: skip
                        if carrier >= 0:
                            accepted = carrier - first
                            token = tl.load(tokens + carrier).to(tl.int32)
                    if accepted < 0:
                        coin = coin_of(mix(key ^ SAMPLE))
                        token = sampled_from(line, maximum, halves, side, sums, coin, VOCAB, BLOCK, BLOCKS, DRAWING)
            else:
                token = most_probable(line, maximum, maxima, VOCAB, BLOCK, BLOCKS)
        if accepted < 0:
            accepted = child_of(tokens, parent, first, rows, node, token, BLOCK_CHILDREN)
        tl.store(out_tokens + request * width + count, token.to(tl.int64))
        tl.store(out_rows + request * width + count, row)
        count += 1
        # A child stands behind its parent; a link that does not rise would never end.
        node = tl.where(accepted > node, accepted, -1)
    tl.store(num_tokens + request, count)
    column = tl.arange(0, BLOCK_WIDTH)
    behind = (column >= count) & (column < width)
    none = tl.full([BLOCK_WIDTH], -1, tl.int64)
    tl.store(out_tokens + request * width + column, none, mask=behind)
    tl.store(out_rows + request * width + column, none, mask=behind)


@triton.jit
def _law_sums(laws, mass, support, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Program (law)."""
    law = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(0, VOCAB, BLOCK):
        token = at + tl.arange(0, BLOCK)
        q = tl.load(laws + law * stride + token, mask=token < VOCAB, other=0.0).to(tl.float32)
        sums += q.to(tl.float64)
        counts += (q > 0).to(tl.int32)
    tl.store(mass + law, tl.sum(sums, 0))
    tl.store(support + law, tl.sum(counts, 0))


def law_sums(laws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mass [laws] float64, support [laws] int32) of laws [laws, vocab], as DraftRows takes them; once per draft."""
    mass = torch.empty(len(laws), dtype=torch.float64, device=laws.device)
    support = torch.empty(len(laws), dtype=torch.int32, device=laws.device)
    if len(laws):
        plan = tuning.verify_plan(tuning.architecture(laws.device), laws.shape[1])
        _law_sums[(len(laws),)](
            laws, mass, support, laws.stride(0), VOCAB=laws.shape[1], BLOCK=plan.block, num_warps=plan.num_warps
        )
    return mass, support


def residual_size(requests: int, vocab: int) -> int:
    """float32 elements that a call with draws works in."""
    return 2 * requests * vocab


def verify(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    start: torch.Tensor,
    *,
    max_depth: int,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    draws: DraftRows | None = None,
    drawing: str = "iid",
    residual: torch.Tensor | None = None,
    out: Walk | None = None,
) -> Walk:
    """Walk every tree; tensors as in the contract above, all on one device. No host sync.

    max_depth: depth of the deepest node, known on the host. drawing: how each SSM's draws were made, `iid` (multi-step
    speculative sampling; also k-1 best + 1 sampled) or `without_replacement`. residual, out: allocated when missing.
    Raises ValueError that names the tensor or option at fault.
    """
    check_trees(logits, tokens, parent, start, max_depth, seed, position, greedy)
    requests, vocab = len(start) - 1, logits.shape[1]
    if draws is not None:
        check_draws(draws, drawing, len(tokens), vocab, seed)
        residual = workspace(residual, residual_size(requests, vocab), logits.device)
    width = max_depth + 1
    out = out or Walk.empty(requests, width, logits.device)
    out.check(requests, width)
    if not requests:
        return out
    plan = tuning.verify_plan(tuning.architecture(logits.device), vocab)
    _verify[(requests,)](
        *pointers((logits, tokens, parent, start), (seed, position, greedy), draws, residual, out),
        width,
        logits.stride(0),
        draws.laws.stride(0) if draws else 0,
        VOCAB=vocab,
        BLOCK=plan.block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, plan.block)),
        BLOCK_CHILDREN=CHILDREN,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        DRAWING=DRAWINGS[drawing] if draws else 0,
        HAS_COINS=seed is not None,
        HAS_GREEDY=greedy is not None,
        num_warps=plan.num_warps,
    )
    return out


def pointers(
    trees: tuple[torch.Tensor, ...],
    keys: tuple[torch.Tensor | None, ...],
    draws: DraftRows | None,
    residual: torch.Tensor | None,
    out: Walk,
) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a kernel of acceptance takes first, in its order."""
    given = (None,) * 6
    if draws is not None:
        given = draws.start, draws.row, draws.law, draws.laws, draws.mass, draws.support
    return *trees, *keys, *given, residual, out.tokens, out.rows, out.num_tokens


def check_trees(logits, tokens, parent, start, max_depth, seed, position, greedy) -> None:
    """Raise ValueError for shapes and dtypes that the kernel does not take. Looks at no contents."""
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point() or logits.dtype == torch.float64:
        raise ValueError(f"logits: {tuple(logits.shape)} {logits.dtype} must be [rows, vocab] fp16, bf16 or fp32")
    rows, requests = len(tokens), len(start) - 1
    if len(logits) < rows:
        raise ValueError(f"logits: {len(logits)} rows, {rows} are needed")
    if max_depth < 0:
        raise ValueError(f"max_depth: {max_depth} must be at least 0")
    wanted = {"tokens": (tokens, None, rows), "parent": (parent, torch.int32, rows)}
    wanted["start"] = (start, torch.int32, requests + 1)
    if seed is not None:
        wanted |= {"seed": (seed, torch.int64, requests), "position": (position, torch.int64, rows)}
    if greedy is not None:
        wanted["greedy"] = (greedy, torch.bool, requests)
        if seed is None:
            raise ValueError("greedy: says who is greedy among sampled requests, so that seed and position are needed")
    for name, (tensor, dtype, length) in wanted.items():
        check_list(name, tensor, dtype, length)


def check_list(name: str, tensor: torch.Tensor | None, dtype: torch.dtype | None, length: int) -> None:
    """Raise ValueError unless it is a contiguous list of so many numbers; dtype None = int32 or int64."""
    dtypes = (torch.int32, torch.int64) if dtype is None else (dtype,)
    if tensor is None or tensor.dim() != 1 or len(tensor) < length or not tensor.is_contiguous():
        raise ValueError(f"{name}: must be a contiguous list of at least {length}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype} must be {dtypes[-1]}")


def check_draws(draws: DraftRows, drawing: str, rows: int, vocab: int, seed: torch.Tensor | None) -> None:
    """Raise ValueError for draws that the kernel does not take. Looks at no contents."""
    if drawing not in DRAWINGS:
        raise ValueError(f"drawing: {drawing!r} must be one of {', '.join(DRAWINGS)}")
    if seed is None:
        raise ValueError("draws: sampled draws need seed and position; greedy requests take none")
    check_list("draws.start", draws.start, torch.int32, rows + 1)
    check_list("draws.row", draws.row, torch.int32, 0)
    check_list("draws.law", draws.law, torch.int32, len(draws.row))
    if draws.laws.dim() != 2 or draws.laws.shape[1] != vocab or draws.laws.stride(1) != 1:
        raise ValueError(f"draws.laws: {tuple(draws.laws.shape)} must be [laws, {vocab}], contiguous in a row")
    if drawing == "without_replacement":
        if draws.mass is None or draws.support is None:
            raise ValueError("draws.mass, draws.support: needed without replacement; law_sums gives them")
        check_list("draws.mass", draws.mass, torch.float64, len(draws.laws))
        check_list("draws.support", draws.support, torch.int32, len(draws.laws))


def workspace(residual: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    """The workspace for residuals, of so many elements. ValueError when it is too small."""
    if residual is None:
        residual = torch.empty(size, dtype=torch.float32, device=device)
    if residual.dtype != torch.float32 or residual.numel() < size or not residual.is_contiguous():
        raise ValueError(f"residual: {residual.numel()} {residual.dtype} must be {size} float32, contiguous")
    return residual
