# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with the tree runner and the tree attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from specinfer_vllm.patches import cpu_attention, cpu_worker, logits_processors, speculator


class TreeCPUWorker(CPUWorker):
    """Named by `worker_cls`, so only engines that serve a tree ever import it."""

    def init_device(self) -> None:
        """As upstream, with our runner and backend in the place of vLLM's."""
        cpu_attention.register()
        with self._our_runner():
            super().init_device()

    @contextmanager
    def _our_runner(self) -> Iterator[None]:
        if self.use_v2_model_runner:
            from specinfer_vllm.engine.runner_v2 import TreeCPUModelRunnerV2
            from specinfer_vllm.engine.speculator import TreeSpeculator

            with cpu_worker.runner_v2_class(TreeCPUModelRunnerV2), speculator.speculator_built_by(TreeSpeculator):
                yield
        else:
            from specinfer_vllm.engine.runner_v1 import TreeCPUModelRunner

            with cpu_worker.runner_class(TreeCPUModelRunner), logits_processors.every_processor():
                yield

    def tree_stats(self) -> dict[str, Any]:
        """Counters since the start, for `collective_rpc("tree_stats")`."""
        return self.model_runner.tree_stats()

    def shutdown(self) -> None:
        """As upstream; a plain engine in this process gets vLLM's own backend again."""
        super().shutdown()
        cpu_attention.unregister()
