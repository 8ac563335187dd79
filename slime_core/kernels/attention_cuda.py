# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The functions of the module without ``_cuda`` as Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def paged(*arguments: Any) -> Tensor:
    raise NotImplementedError


def varlen(*arguments: Any) -> Tensor:
    raise NotImplementedError
