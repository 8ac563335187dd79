"""Whether attention goes to cuDNN, and for which lengths: on Hopper it takes 0.6 of FlashAttention 2's time."""

from __future__ import annotations

import os
from functools import cache

import torch

CUDNN = 91500  # versions above it are right for lengths that 128 does not divide, and torch prefers those alone
STEPS, LEAST = 16, 64
"""cuDNN plans a length at its first call, for some 40 ms: lengths are filled up to one of 16 between powers of two,
and to a multiple of 64. That is a sixteenth more rows at most."""


@cache
def has_cudnn(device: torch.device) -> bool:
    """Whether torch's scaled_dot_product_attention goes to cuDNN first: on Hopper and Blackwell, by default."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":  # torch's own switch
        return False
    known = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return known and (torch.backends.cudnn.version() or 0) > CUDNN and torch.backends.cuda.cudnn_sdp_enabled()


def filled(length: int) -> int:
    """The rows that a sequence is filled up to: see ``STEPS``."""
    step = max((1 << length.bit_length() - 1) // STEPS, LEAST)
    return -(-length // step) * step
