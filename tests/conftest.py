# SPDX-License-Identifier: Apache-2.0
"""What every test may rely on: the environment, the real model, fast tests before those that start an engine."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch, vLLM or transformers.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: starts in a third of the time
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)  # stable: the rest of the order stays


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = [item for item in session.items if item.path.name == "test_triton_interpreter.py"]
    if chosen and not session.config.option.collectonly and os.environ.get("TRITON_INTERPRET") != "1":
        chosen[0].module.start([item.callspec.params["kernel"] for item in chosen])


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct in fp32."""
    from specinfer_vllm.bench import smollm2

    return smollm2.model_path()


@pytest.fixture(scope="session")
def ssm_path(model_path: Path) -> Path:
    """An SSM for any test that needs one: the first two and the last two layers of the model, untrained."""
    from specinfer_vllm.bench import smollm2

    return smollm2.cut(model_path, layers=[0, 1, 28, 29])


@pytest.fixture(scope="session")
def second_ssm_path(model_path: Path) -> Path:
    """Another SSM, weaker and half the size: the first layer and the last."""
    from specinfer_vllm.bench import smollm2

    return smollm2.cut(model_path, layers=[0, 29])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second thread, and wait for it where the machine is shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
