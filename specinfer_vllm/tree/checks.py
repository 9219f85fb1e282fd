# SPDX-License-Identifier: Apache-2.0
"""What arrays must hold to be token trees; each check raises ValueError that names the array, the place and the reason.

Array names, shapes and meanings are those of topology.TokenTrees.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

INT16, INT32, INT64, FLOAT32 = np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


def as_integers(name: str, values: npt.ArrayLike, dtype: np.dtype) -> np.ndarray:
    """`values` as an array of `dtype`. ValueError: not integers, or integers that do not fit."""
    array = np.asarray(values)
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name}: has type {array.dtype}, give integers")
    cast = array.astype(dtype)
    if np.count_nonzero(cast != array):
        raise ValueError(f"{name}: {array[cast != array].flat[0]} does not fit {dtype}")
    return cast


def as_floats(name: str, values: npt.ArrayLike) -> np.ndarray:
    """`values` as an array of float32. ValueError: not numbers."""
    array = np.asarray(values)
    if array.dtype == FLOAT32:
        return array
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: has type {array.dtype}, give numbers")
    return array.astype(FLOAT32)


def per_request(name: str, values: npt.ArrayLike, requests: int) -> np.ndarray:
    """One count per request [requests] int64, from such an array or from one number for all.

    ValueError: a negative number, or neither one number nor one per request.
    """
    counts = as_integers(name, values, INT64)
    if counts.ndim == 0:
        counts = counts.repeat(requests)
    if counts.shape != (requests,):
        raise ValueError(f"{name}: has shape {counts.shape}, give one number per request ({requests}) or one for all")
    if np.count_nonzero(counts < 0):
        raise ValueError(f"{name}: {counts.min()} is negative, give 0 or more nodes")
    return counts


def check_offsets(name: str, offsets: np.ndarray, end: int, what: str, least: int) -> None:
    """Offsets run from 0 to `end` and give each request `least` or more of `what`."""
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(
            f"{name}: must run from 0 to {end}, the number of {what}, with one entry more than there are requests"
        )
    counts = offsets[1:] - offsets[:-1]
    if np.count_nonzero(counts < least):
        request = int(counts.argmin())
        raise ValueError(f"{name}: request {request} has {counts[request]} {what}, give it {least} or more")


def check_layout(offsets: np.ndarray, tokens: np.ndarray, **others: np.ndarray) -> None:
    """All row arrays have one dimension and one length, the offsets' last entry."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens: has shape {tokens.shape}, must have one dimension")
    for name, array in others.items():
        if array.shape != tokens.shape:
            raise ValueError(f"{name}: has shape {array.shape} where tokens has {tokens.shape}")
    check_offsets("offsets", offsets, len(tokens), "rows", least=1)


def check_parents(offsets: np.ndarray, parent: np.ndarray, local: np.ndarray) -> None:
    """Every row but the first of a request has an earlier row of the request as its parent. local [rows] int64."""
    if np.count_nonzero(parent.take(offsets[:-1]) != -1):
        raise ValueError("parent: must be -1 at each root (a request's first row)")
    if np.count_nonzero(wrong := parent >= local):
        raise ValueError(f"parent: {_where(offsets, wrong)} stands before its parent")
    orphans = parent < 0
    if np.count_nonzero(orphans) != len(offsets) - 1:
        raise ValueError(
            f"parent: {_where(offsets, orphans & (local > 0))} has none; only a request's first row is a root"
        )


def check_depths(offsets: np.ndarray, depth: np.ndarray, parent_row: np.ndarray) -> None:
    """A root has depth 0 and any other row one more than its parent. parent_row [rows] int64, the own row at a root."""
    expected = depth.take(parent_row) + 1
    expected[offsets[:-1]] = 0
    if np.count_nonzero(wrong := depth != expected):
        raise ValueError(f"depth: {_where(offsets, wrong)} is not one below its parent")


def check_nodes(offsets: np.ndarray, tokens: np.ndarray, score: np.ndarray, parent_row: np.ndarray) -> None:
    """Scores never rise along a path, node tokens are not negative, and siblings differ in theirs."""
    roots = offsets[:-1]
    if np.count_nonzero(score.take(roots)):
        raise ValueError("score: must be 0 (certain) at each root")
    fair = score <= score.take(parent_row)  # False at nan, too
    if np.count_nonzero(fair) != len(fair):
        raise ValueError(f"score: {_where(offsets, ~fair)} scores higher than its parent, or is no number")
    step = (parent_row << 32) | tokens
    step[roots] = ~roots  # unlike any node's; a root's token may be any number
    wrong = step < 0
    if np.count_nonzero(wrong) != len(roots):
        wrong[roots] = False
        raise ValueError(f"tokens: {_where(offsets, wrong)} has a negative token")
    ordered = np.sort(step)
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        raise ValueError(
            f"tokens: {_where(offsets, _repeats(step))} repeats a sibling's token; make it one node with several draws"
        )


def check_draws(
    offsets: np.ndarray, draw_offsets: np.ndarray, draw_node: np.ndarray, draw_owner: np.ndarray, draw_law: np.ndarray
) -> None:
    """Every draw is on a node of its own request, and every node carries a draw."""
    if draw_node.ndim != 1 or draw_owner.shape != draw_node.shape:
        raise ValueError(f"draw_owner: has shape {draw_owner.shape} for draw_node of shape {draw_node.shape}")
    if draw_law.shape != draw_node.shape:
        raise ValueError(f"draw_law: has shape {draw_law.shape} for draw_node of shape {draw_node.shape}")
    check_offsets("draw_offsets", draw_offsets, len(draw_node), "draws", least=0)
    if len(draw_offsets) != len(offsets):
        raise ValueError(f"draw_offsets: has {len(draw_offsets)} entries where offsets has {len(offsets)}")
    if np.count_nonzero(draw_owner < 0):
        raise ValueError(f"draw_owner: {draw_owner.min()} is no proposer")
    if np.count_nonzero(draw_law < -1):
        raise ValueError(f"draw_law: {draw_law.min()} is no law; give -1 for a draw that was not sampled")
    draws = draw_offsets[1:] - draw_offsets[:-1]
    row = offsets[:-1].repeat(draws) + draw_node
    if np.count_nonzero((draw_node < 1) | (row >= offsets[1:].repeat(draws))):
        raise ValueError("draw_node: must be a node of the draw's own request (1 to its number of nodes)")
    bare = np.ones(offsets[-1], bool)
    bare[row] = False
    bare[offsets[:-1]] = False
    if np.count_nonzero(bare):
        raise ValueError(f"draw_node: {_where(offsets, bare)} carries no draw")


def _where(offsets: np.ndarray, wrong: np.ndarray) -> str:
    """The first row where `wrong` [rows] bool holds, in words."""
    row = int(wrong.argmax())
    request = int(offsets.searchsorted(row, side="right")) - 1
    return f"row {row - offsets[request]} of request {request}"


def _repeats(values: np.ndarray) -> np.ndarray:
    """Where a value stood before [n] bool."""
    repeats = np.ones(len(values), bool)
    repeats[np.unique(values, return_index=True)[1]] = False
    return repeats
