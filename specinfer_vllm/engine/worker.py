# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with the tree runner and the tree attention backend."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from specinfer_vllm.patches import cpu_attention, cpu_worker, logits_processors


class TreeCPUWorker(CPUWorker):
    """Named by `worker_cls`, so only engines that serve a tree ever import it."""

    def init_device(self) -> None:
        """As upstream, with our runner and backend in the place of vLLM's."""
        from specinfer_vllm.engine.runner_v1 import TreeCPUModelRunner

        cpu_attention.register()
        with cpu_worker.runner_class(TreeCPUModelRunner), logits_processors.every_processor():
            super().init_device()

    def tree_stats(self) -> dict[str, Any]:
        """Counters since the start, for `collective_rpc("tree_stats")`."""
        return self.model_runner.drafter.stats.as_dict()

    def shutdown(self) -> None:
        """As upstream; a plain engine in this process gets vLLM's own backend again."""
        super().shutdown()
        cpu_attention.unregister()
