# SPDX-License-Identifier: Apache-2.0
"""Trees as lists of parents, and memory that is reserved without being backed, for the tests of the Triton kernels."""

import mmap

import numpy as np
import torch

MAP_NORESERVE = 0x4000  # Linux; Python 3.11 does not name it


def random_tree(rng, rows):
    return [-1, *(int(rng.integers(0, i)) for i in range(1, rows))][:rows]


def chain(rows):
    return list(range(-1, rows - 1))


def star(rows):
    return [-1] + [0] * (rows - 1)


def comb(rows):
    """A spine with one leaf at each of its nodes."""
    return [-1] + [max(0, (i - 1) // 2 * 2 - 1) if i > 2 else 0 for i in range(1, rows)]


def mapped(elements, dtype):
    """A tensor of that many elements of which only what is written takes memory."""
    size = elements * dtype.itemsize
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.from_numpy(np.frombuffer(area, np.uint8)).view(dtype)
