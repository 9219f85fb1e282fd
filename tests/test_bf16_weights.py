# SPDX-License-Identifier: Apache-2.0
"""An SSM's matrices in bfloat16: what is rounded, what stays, and where it is not done."""

from types import SimpleNamespace

import pytest
import torch

from specinfer_vllm.propose import bf16_weights
from specinfer_vllm.propose.bf16_weights import Bf16Linear, Bf16Weights, matrix


def layer_of(weight: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def test_the_matrix_is_rounded_and_input_and_output_keep_their_type():
    torch.manual_seed(1)
    weight, x, bias = torch.randn(96, 64), torch.randn(5, 64), torch.randn(96)
    layer, method = layer_of(weight), Bf16Linear()
    method.process_weights_after_loading(layer)
    for added in (None, bias):
        check(method.apply(layer, x, added), torch.nn.functional.linear(x, weight, added))
    check(matrix(weight)(x), x @ weight.T)


def check(result: torch.Tensor, exact: torch.Tensor) -> None:
    assert result.dtype == torch.float32
    assert 1e-5 * exact.norm() < (result - exact).norm() < 0.01 * exact.norm()  # rounded, but no more than that


def test_embeddings_and_heads_are_left_alone():
    assert Bf16Weights().get_quant_method(torch.nn.Embedding(3, 4), "model.embed_tokens") is None


@pytest.mark.parametrize(
    ("llm", "quantization", "able", "expected"),
    [
        (torch.float32, None, True, True),
        (torch.bfloat16, None, True, False),
        (torch.float32, "awq", True, False),
        (torch.float32, None, False, False),
    ],
    ids=["fp32", "half already", "quantised", "a CPU without bfloat16"],
)
def test_where_it_pays(llm, quantization, able, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: able)
    monkeypatch.setattr(bf16_weights, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert bf16_weights.applies(SimpleNamespace(dtype=llm), SimpleNamespace(quantization=quantization)) == expected
