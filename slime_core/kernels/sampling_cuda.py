# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The functions of the module without ``_cuda`` as Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def sample(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


def log_softmax_at(*arguments: Any) -> Tensor:
    raise NotImplementedError
