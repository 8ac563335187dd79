"""Norms as transformers computes them, in float32, with what sequence parallelism asks of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the last axis, by ``config.normalization``.

    megatron-core's own without Apex and Transformer Engine refuses sequence parallelism: a rank sees some rows there,
    and the gradient of the weight is summed over ranks where ``weight.sequence_parallel`` says so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        if self.bias is not None:
            return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        if x.dtype == torch.float32:
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)
