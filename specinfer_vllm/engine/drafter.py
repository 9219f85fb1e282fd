# SPDX-License-Identifier: Apache-2.0
"""What a worker drafts with: the configured proposers behind one ensemble, and the trees of the last step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from specinfer_vllm.attention.cpu_kernel import kernel
from specinfer_vllm.config import TreeOptions
from specinfer_vllm.engine.requests import RequestSlots
from specinfer_vllm.engine.sampling import samples_drafts
from specinfer_vllm.engine.step import DraftedTrees
from specinfer_vllm.metrics import TreeStats
from specinfer_vllm.patches.llvmlite_library import disown_dict
from specinfer_vllm.patches.speculative_config import tree_config
from specinfer_vllm.propose.ensemble import Ensemble
from specinfer_vllm.propose.ngram import NgramProposer
from specinfer_vllm.propose.primer import find_primer
from specinfer_vllm.propose.proposer import DraftBatch, DraftSampling, Observation, Proposer
from specinfer_vllm.propose.recycling import RecyclingProposer
from specinfer_vllm.verify.rules import RULES, Rule

disown_dict()  # the draft-free proposers have imported numba by now


def free_proposer(name: str, vllm_config: VllmConfig) -> Proposer:
    """The draft-free proposer of that name."""
    options, model = tree_config(vllm_config).tree, vllm_config.model_config
    if name == "ngram":
        return NgramProposer(model.get_vocab_size())
    return RecyclingProposer(
        vocab_size=model.get_vocab_size(),
        num_slots=vllm_config.scheduler_config.max_num_seqs,
        shared=options.share_recycling,
        primer=find_primer(options.primer, model.model, model.revision),
    )


def rule_of(options: TreeOptions) -> Rule:
    """The acceptance rule of sampled requests."""
    return RULES["naive" if options.verifier in ("auto", "greedy") else options.verifier]


class TreeDrafter:
    """vLLM's runner builds this as its drafter (method `custom_class`); the tree runner drives it.

    It knows nothing of a runner: what it needs of a step comes as arrays.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = tree_config(vllm_config).tree
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self.slots = RequestSlots(num_slots, self.options.seed, vllm_config.model_config.get_vocab_size())
        self.rule = rule_of(self.options)
        self.ssms = self._ssms(vllm_config)
        self.free = [free_proposer(name, vllm_config) for name in self.options.free_proposers]
        self.ensemble = Ensemble(
            [*self.ssms, *self.free],
            merge=self.options.merge,
            batch_nodes=self.options.batch_nodes,
            row_cost=self.options.cost_of_row,
            branches=self.options.branches,
            may_fail=vllm_config.parallel_config.tensor_parallel_size == 1,
        )
        self.stats = TreeStats()
        self.drafted = DraftedTrees()

    def _ssms(self, vllm_config: VllmConfig) -> list[Proposer]:
        if not self.options.ssms:
            return []
        from specinfer_vllm.propose.ssm import SsmProposer

        return [SsmProposer(vllm_config, index) for index in range(len(self.options.ssms))]

    def sampling(self, slots: np.ndarray) -> DraftSampling | None:
        """How the requests on `slots` [requests] int64 want their children; None when none samples any."""
        sampled = self.slots.sampled[slots]
        if self.rule.drafting == "any" or not sampled.any():
            return None
        of = self.slots
        return DraftSampling(
            self.rule.drafting, sampled, of.temperature[slots], of.top_k[slots], of.top_p[slots], of.seed[slots]
        )

    @property
    def owners(self) -> list[str]:
        """Names of the proposers, indexed by draw_owner."""
        return self.ensemble.names

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the SSMs; called by the runner once the LLM is loaded, so that memory profiling sees both."""
        for ssm in self.ssms:
            ssm.load()
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what is compiled on first use, so that no request waits for it."""
        kernel()
        tokens = np.zeros((1, 8), np.int32)
        one, eight = np.ones(1, np.int32), np.full(1, 8, np.int32)
        batch = DraftBatch(np.zeros(1, np.int64), tokens, np.zeros(1, np.int64), eight.astype(np.int64), one, eight)
        best = np.zeros((1, self.num_successors), np.int32)
        seen = Observation(np.zeros(1, np.int64), one, best, best.astype(np.float32))
        for proposer in self.free:
            proposer.start(0)
            if proposer.num_successors:
                proposer.observe(seen)
            proposer.propose(batch)
            proposer.finish(0)

    def start(self, request_id: str, params: SamplingParams | None, prompt_len: int, refused: str | None) -> None:
        """A request entered the batch; see RequestSlots.start."""
        sampled = params is not None and samples_drafts(params, self.options)
        slot = self.slots.start(request_id, params, prompt_len, refused, sampled)
        if slot is not None:
            self.ensemble.start(slot)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Requests ended or were preempted: forget everything about them."""
        for request_id in sorted(request_ids):  # a set, which every rank walks in an order of its own
            slot = self.slots.finish(request_id)
            if slot is not None:
                self.ensemble.finish(slot)

    def draft(self, request_ids: Sequence[str], batch: DraftBatch, requests: np.ndarray) -> None:
        """Draft the next trees. requests [k] int64: the requests of the batch that draft, indices into request_ids."""
        trees = self.ensemble.propose(batch)
        self.drafted.replace([request_ids[i] for i in requests], trees, self.ensemble.laws, batch.max_nodes)
        self.stats.proposer_failures.update(self.ensemble.take_failures())

    def observe(self, observation: Observation) -> None:
        """Show the proposers what the LLM said on the accepted paths."""
        self.ensemble.observe(observation)

    @property
    def num_successors(self) -> int:
        """How many best next tokens per row `observe` wants; 0 when nobody looks at them."""
        return self.ensemble.num_successors

    def propose(self, *args, **kwargs) -> None:
        """vLLM's interface for custom proposers; the tree runner never calls it, and a stock runner must not draft."""
        raise RuntimeError("token trees need the specinfer_vllm worker; unset worker_cls or use the tree worker")
