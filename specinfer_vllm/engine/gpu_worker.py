# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with the tree runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from specinfer_vllm.patches import speculator


class TreeGPUWorker(Worker):
    """Named by `worker_cls`, so only engines that serve a tree ever import it."""

    def _make_model_runner(self) -> Any:
        """The V2 runner with trees; upstream has made this a hook for subclasses."""
        from specinfer_vllm.engine.runner_v2 import TreeGPUModelRunnerV2
        from specinfer_vllm.engine.speculator import TreeSpeculator

        with speculator.speculator_built_by(TreeSpeculator):
            return TreeGPUModelRunnerV2(self.vllm_config, self.device)

    def tree_stats(self) -> dict[str, Any]:
        """Counters since the start, for `collective_rpc("tree_stats")`."""
        return self.model_runner.tree_stats()
