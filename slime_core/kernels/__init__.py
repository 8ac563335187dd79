"""Kernels of the embedded engine and of the FSDP trainer: Triton on a GPU, plain PyTorch elsewhere.

Every public function has a reference in PyTorch, which also runs where triton is absent. Functions of the engine read
nothing on the host, so that a CUDA graph can capture them.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def by_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernel runs for ``tensor``: on a GPU, or interpreted (``TRITON_INTERPRET=1``)."""
    return (tensor.is_cuda or _interpreted()) and tensor.dtype != torch.float64 and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
