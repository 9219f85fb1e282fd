# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary of an SSM: the token ids its head is narrowed to, in a file beside its weights.

The head is most of what a small SSM costs: 28 of the 35 million weights that two layers of SmolLM2-135M and its head
read per token. The folder stays an ordinary model with its whole head; the narrow one is cut out when it is loaded.
Exact all the same: q is the law over the narrowed vocabulary, and what cannot be drafted is left to the LLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

FILE = "draft_vocab.npy"


@dataclass(frozen=True)
class NarrowHead:
    """Logits of some tokens only.

    ids        [narrow] int64
    multiply   states [rows, hidden] to [rows, narrow], by the rows of the model's head
    scale, soft_cap    what the model does to its logits: soft_cap * tanh(logits / soft_cap), then times scale
    """

    ids: torch.Tensor
    multiply: Callable[[torch.Tensor], torch.Tensor]
    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(
        cls, model: torch.nn.Module, ids: np.ndarray, matrix: Callable[[torch.Tensor], Callable] | None = None
    ) -> NarrowHead:
        """From a model that vLLM loaded. matrix: makes `multiply` of the head's rows [narrow, hidden]; None = plain.

        ValueError where the model's head is no plain matrix.
        """
        import torch

        weight = getattr(getattr(model, "lm_head", None), "weight", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point() or len(weight) <= ids[-1]:
            kind = type(model).__name__
            raise ValueError(f"the head of {kind} is no plain matrix; remove {FILE} from the SSM's folder")
        chosen = torch.from_numpy(ids).to(weight.device)
        rows = weight.detach()[chosen].contiguous()
        processor = getattr(model, "logits_processor", None)
        scale, cap = getattr(processor, "scale", 1.0), getattr(processor, "soft_cap", None)
        multiply = (lambda states: states @ rows.T) if matrix is None else matrix(rows)
        return cls(chosen, multiply, scale, cap)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, narrow] from states [rows, hidden]."""
        logits = self.multiply(states)
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh() * self.soft_cap
        return logits * self.scale if self.scale != 1.0 else logits


def read_draft_vocab(model: str, revision: str | None, num_tokens: int) -> np.ndarray | None:
    """The ids of a folder's or hub model's draft vocabulary, rising, int64 [narrow]; None without one.

    num_tokens: ids from there on are never drafted. ValueError for a file that is damaged or holds other ids.
    """
    from transformers.utils import cached_file

    found = cached_file(
        model,
        FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    return check_ids(Path(found), num_tokens)


def check_ids(file: Path, num_tokens: int) -> np.ndarray:
    """The ids in a file, int64 [narrow]. ValueError that says what is wrong with it."""
    remedy = "make the SSM again, or remove the file to use its whole head"
    try:
        ids = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file}: damaged ({error}); {remedy}") from None
    is_list = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
    if not is_list or ids[0] < 0 or ids[-1] >= num_tokens or (np.diff(ids.astype(np.int64)) <= 0).any():
        raise ValueError(f"{file}: must hold rising token ids below {num_tokens}; {remedy}")
    return ids.astype(np.int64)
