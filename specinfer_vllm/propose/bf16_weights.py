# SPDX-License-Identifier: Apache-2.0
"""An SSM's matrices in bfloat16 beside an LLM in fp32, on CPUs that multiply them.

A draft step reads all of the SSM's weights for a few rows, so its time is their size. Activations, norms and K/V stay
in the LLM's dtype, as the shared KV pool wants. Exact all the same: the SSM's law is whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

BF16 = torch.bfloat16


def applies(llm: ModelConfig, ssm: ModelConfig) -> bool:
    """Whether this SSM should have its matrices in bfloat16: it is not quantised, the LLM in fp32, the CPU able."""
    able = current_platform.is_cpu() and torch.cpu._is_avx512_bf16_supported()
    return able and llm.dtype == torch.float32 and ssm.quantization is None


class Bf16Linear(UnquantizedLinearMethod):
    """A linear layer whose matrix is in bfloat16 and whose input and output are not."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Round the matrix, and let vLLM pack it for its CPU kernels: they read it twice as fast as torch's."""
        layer.weight = torch.nn.Parameter(layer.weight.to(BF16), requires_grad=False)
        super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, out] of x [rows, in], in x's dtype."""
        result = super().apply(layer, x.to(BF16)).to(x.dtype)
        return result if bias is None else result + bias


def matrix(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """weight [out, in] as a function from x [rows, in] to [rows, out] in x's dtype, in the same way."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method = Bf16Linear()
    method.process_weights_after_loading(layer)
    return lambda x: method.apply(layer, x)


class Bf16Weights(QuantizationConfig):
    """vLLM's way to give layers another linear method."""

    def get_name(self) -> str:
        """For messages."""
        return "specinfer_bf16"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """That of the LLM."""
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have none."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Nothing is read from the model's folder."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Bf16Weights:
        """There is nothing to configure."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Bf16Linear | None:
        """Linear layers only: embeddings and head are shared with what reads fp32."""
        return Bf16Linear() if isinstance(layer, LinearBase) else None
