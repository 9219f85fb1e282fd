# SPDX-License-Identifier: Apache-2.0
"""The SSMs of the V2 runner, in two parts that CUDA graphs can hold: reading what was committed, and drafting."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from specinfer_vllm.config import ONE_PER_RANK
from specinfer_vllm.engine.draft_exchange import DraftExchange
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.device_ssm import DeviceSsm, DeviceStep, Drafted

logger = logging.getLogger("vllm.specinfer")


class SsmDrafting:
    """All SSMs of the options, drafting for the same batch.

    every     the SSMs; placed: those whose weights are on this rank
    exchange  of what the ranks draft, when each has SSMs of its own
    states    of each placed SSM [max_num_reqs, hidden]: at every request's last token
    max_rows  of a pass: more were neither compiled nor profiled
    failures  how often each raised
    may_fail  whether requests go on without an SSM that raises
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        options = tree_config(vllm_config).tree
        self.device, self.max_requests = device, vllm_config.scheduler_config.max_num_seqs
        self.every = [DeviceSsm(vllm_config, index) for index in range(len(options.ssms))]
        is_spread = options.ssm_placement == ONE_PER_RANK and any(ssm.is_whole for ssm in self.every)
        self.exchange = DraftExchange.of(self.every, options) if is_spread else None
        self.placed = self.every if self.exchange is None else [self.every[index] for index in self.exchange.mine]
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.states: dict[str, torch.Tensor] = {}
        self.failures: Counter[str] = Counter()
        self.may_fail = vllm_config.parallel_config.tensor_parallel_size == 1  # or one rank would draft differently
        self.groups: list[int] = []
        self.block_tables: Any = None

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the weights of this rank's SSMs."""
        for ssm in self.placed:
            ssm.load()
            size = self.max_requests, ssm.model_config.get_hidden_size()
            self.states[ssm.name] = torch.zeros(size, dtype=ssm.model_config.dtype, device=self.device)

    @property
    def layer_names(self) -> set[str]:
        """Their attention layers on this rank."""
        return {name for ssm in self.placed for name in ssm.layer_names}

    def bind(self, attn_groups: Sequence[Sequence[Any]], block_tables: Any) -> None:
        """Their layers are in the KV cache now; block_tables: vLLM's BlockTables."""
        self.groups = [ssm.bind(attn_groups) for ssm in self.placed]
        self.block_tables = block_tables

    def profile(self, rows: int) -> None:
        """Take the memory that a step of so many rows takes."""
        if self.exchange is not None:
            self.exchange.reserve(self.max_requests, self.device)
        for ssm in self.placed:
            ssm.logits(ssm.warm_up(rows)[: self.max_requests * ssm.options.width])

    # -- a step --------------------------------------------------------------------------------------------------------

    def reset(self, slots: torch.Tensor) -> None:
        """New requests begin on slots [k] int64, with valid K/V."""
        for ssm in self.every:
            ssm.lost.index_fill_(0, slots, False)  # an assignment would copy the number from the host, and wait

    def read(self, step: DeviceStep) -> None:
        """Catch up with what was committed."""
        for ssm, table in self._tables(step):
            self._attempt(self._read, ssm, step, table)

    def _read(self, ssm: DeviceSsm, step: DeviceStep, table: torch.Tensor) -> None:
        self.states[ssm.name][: len(step.counts)] = ssm.read(step, table)

    def draft(self, step: DeviceStep) -> list[Drafted | None]:
        """What each SSM of this rank draws, None where one failed; all have read the step."""
        return [self._attempt(self._draft, ssm, step, table) for ssm, table in self._tables(step)]

    def _draft(self, ssm: DeviceSsm, step: DeviceStep, table: torch.Tensor) -> Drafted:
        most = max(self.max_rows // ssm.widest_level, 1)
        parts = [slice(first, first + most) for first in range(0, len(step.counts), most)]
        states = self.states[ssm.name][: len(step.counts)]
        return Drafted.joined([ssm.draft(step.part(each), table[each], states[each]) for each in parts])

    def shared(self, drafted: list[Drafted | None], requests: int) -> list[Drafted | None]:
        """What all SSMs drew, from what this rank's did."""
        return drafted if self.exchange is None else self.exchange.share(drafted, requests, self.device)

    def _tables(self, step: DeviceStep) -> list[tuple[DeviceSsm, torch.Tensor]]:
        """Each SSM with the block table of its KV cache group [requests, blocks] int32."""
        tables = [self.block_tables.input_block_tables[group][: len(step.counts)] for group in self.groups]
        return list(zip(self.placed, tables, strict=True))

    def _attempt(
        self,
        part: Callable[[DeviceSsm, DeviceStep, torch.Tensor], Any],
        ssm: DeviceSsm,
        step: DeviceStep,
        table: torch.Tensor,
    ) -> Any:
        """What a part of an SSM's step returns; None when it raised, and the requests go on without it."""
        try:
            return part(ssm, step, table)
        except Exception:
            if not self.may_fail:
                raise
            if not self.failures[ssm.name]:
                logger.exception("SSM %r failed and is left out of this step; further failures are counted", ssm.name)
            self.failures[ssm.name] += 1
            ssm.lost.index_fill_(0, step.slots, True)
            return None
