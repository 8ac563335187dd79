"""How long slots are and how many there are: what requests need, within the memory that is there.

all seats, as long as the longest request may get     where that fits
all seats, as long as sequences are now               where that fits; longer as they grow
fewer seats
"""

from __future__ import annotations

import torch

from slime_core.engines.local.cache import BLOCK, slot_length, up
from slime_core.errors import EngineError
from slime_core.memory import available_memory

SHARE = 0.5
"""Part of the free memory that the cache may take: the trainer's gradients and optimizer come after it."""

STEP = 4 * BLOCK
"""Slots grow by whole steps, so that prompts of slightly different lengths do not each make them longer."""


def free_memory(device: str, held: int) -> int:
    """Bytes that a cache may take in place of one of ``held`` bytes."""
    if device == "cpu":
        return available_memory() + held
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + cached + held


def fitting(need: int, most: int, *, seats: int, tokens: int, context_len: int, positions: float) -> tuple[int, int]:
    """Seats and tokens of a slot for sequences of ``need`` tokens that may get ``most``.

    ``seats`` is how many are wished for, ``tokens`` what a slot has now, ``positions`` what memory holds in all.
    """
    whole = min(context_len, up(max(need, most), STEP))
    part = min(whole, up(max(need, tokens + tokens // 2), STEP))
    for length in (whole, part, need):
        if (seats + 1) * slot_length(length) <= positions:
            return seats, length
    for length in (part, need):
        fewer = int(positions // slot_length(length)) - 1
        if fewer >= 1:
            return fewer, length
    return 1, need


def check_size(tokens: int, position_bytes: int, memory: int) -> None:
    """One sequence of ``tokens`` and the spare slot fit.

    Raises:
        EngineError: ENG05.
    """
    size = 2 * slot_length(tokens) * position_bytes
    if size > memory:
        raise EngineError(
            f"the KV cache of a sequence of {tokens} tokens needs {size / 2**30:.1f} GiB",
            code="ENG05",
            why=f"{memory / 2**30:.1f} GiB are free",
            fix="lower rollout.rollout_max_context_len or rollout.rollout_max_response_len, or take a smaller model",
        )
