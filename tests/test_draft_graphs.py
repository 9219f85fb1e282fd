# SPDX-License-Identifier: Apache-2.0
"""Numbers of requests that drafting is captured for: vLLM's, a full batch, and none whose rows no model is made for."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402

from specinfer_vllm.engine.draft_graphs import DraftGraphs  # noqa: E402

SIZES = [1, 2, 4, 8, 16, 32]


def sizes(mode=CUDAGraphMode.FULL_AND_PIECEWISE, seqs=6, tokens=2048, row_limit=1) -> list[int]:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
    )
    graphs = DraftGraphs(config, torch.device("cpu"), mode, row_limit)
    assert config.compilation_config.cudagraph_capture_sizes == SIZES  # which the LLM's graphs are made for
    found = [each.num_reqs for descs in graphs._capture_descs.values() for each in descs]
    assert graphs.needs_capture() == bool(found)
    return sorted(found)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object())


def test_a_full_batch_has_a_graph():
    assert sizes(seqs=6) == [1, 2, 4, 6]
    assert sizes(seqs=8) == [1, 2, 4, 8]


def test_no_pass_has_more_rows_than_a_step():
    assert sizes(seqs=16, tokens=100, row_limit=10) == [1, 2, 4, 8, 10]
    assert sizes(seqs=16, tokens=9, row_limit=10) == []


def test_vllms_largest_size_is_the_largest():
    assert sizes(seqs=100) == SIZES


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_without_full_graphs_of_the_llm_there_are_none(mode):
    assert sizes(mode) == []
