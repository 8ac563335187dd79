"""Norms as transformers computes them, in float32, with what sequence parallelism asks of their weights; residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import nn
from torch._dynamo import maybe_mark_dynamic

from slime_core.trainers.compiling import Compiled

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the last axis, by ``config.normalization``; weights may be around 0 (1 is added).

    megatron-core's own without Apex and Transformer Engine refuses sequence parallelism: a rank sees some rows there,
    and the gradient of the weight is summed over ranks where ``weight.sequence_parallel`` says so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.compiled = False  # `PackedGPT.choose_compiling`
        self.offset = float(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.full((hidden_size,), 1 - self.offset, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same in the weight's dtype: residuals may be float32 beside others."""
        dtype = self.weight.dtype
        if self.bias is not None:
            weight, bias = (self.weight + self.offset).to(x.dtype), self.bias.to(x.dtype)
            return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps).to(dtype)
        if x.dtype == dtype == torch.float32:
            weight = self.weight + self.offset if self.offset else self.weight
            return nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)
        if not self.compiled:
            return rms_norm(x, self.weight, self.eps, self.offset)
        rows = x.flatten(0, -2)
        maybe_mark_dynamic(rows, 0)  # packs differ in length; the width is the model's
        normed: torch.Tensor = RMS_NORM(rows, self.weight, self.eps, self.offset)
        return normed.view(x.shape)


class SharedNorm(nn.Module):
    """RMSNorm of columns that tensor-parallel ranks share: this rank's columns, by the mean square of all."""

    def __init__(self, config: TransformerConfig, columns: int, group: Any) -> None:
        super().__init__()
        self.eps, self.columns, self.group = config.layernorm_epsilon, columns, group
        self.weight = nn.Parameter(torch.ones(columns // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns of this rank] to the same."""
        y = x.float()
        total = reduce_from_tensor_model_parallel_region(y.square().sum(-1, keepdim=True), group=self.group)
        total = copy_to_tensor_model_parallel_region(total, group=self.group)  # each rank's columns give a gradient
        return self.weight * (y * torch.rsqrt(total / self.columns + self.eps)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, in the weight's dtype (arXiv:1910.07467)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if offset:  # rounded once: a weight around 0 has more digits than its sum with 1
        return ((offset + weight.float()) * y).to(weight.dtype)
    return weight * y.to(weight.dtype)


RMS_NORM = Compiled(rms_norm)
"""`rms_norm` in few kernels, which keeps its input alone for the backward pass and no float32 copies of it."""


def wide_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """What adds to a residual in float32 and leaves it so; megatron-core's own makes it the other's dtype again."""

    def add(
        operands: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        hidden, bias = operands
        return residual + (hidden if bias is None else hidden + bias)

    return add
