"""Checksum of float32 parameters: the same for any backend, number of ranks, layout and device.

Of each tensor with bits b(0), b(1), ... (int32, row by row) two sums modulo 2^64:

    sum b(i)     and     sum b(i) * m(i),    m(i) = t(i mod 2^16) * (2 * (i div 2^16) + 1)

t(j) is odd and looks random: two rounds of multiply and fold of j + 1. The answer is a sha256 over names, shapes and
sums, in the order of names. A changed bit changes the first sum; a swap of elements the second; a swap of tensors
both under their names. Elements may be summed in any order, each once, by whichever rank has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

BLOCK = 1 << 16
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
ODD2 = 0xBF58476D1CE4E5B9 - (1 << 64)
AT_ONCE = 256  # blocks a kernel takes on a GPU


@lru_cache(maxsize=2)
def table(device: torch.device) -> torch.Tensor:
    """t(j) of j in [0, 2^16): [2^16] int64."""
    mixed = torch.arange(1, BLOCK + 1, dtype=torch.int64, device=device) * ODD
    for odd in (ODD2, ODD):
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * odd
    return mixed | 1


@torch.no_grad()
def sums(run: torch.Tensor, start: int) -> torch.Tensor:
    """Both sums of float32 elements in a row, of which the first is element ``start`` of its tensor: [2] int64."""
    flat = run.reshape(-1).view(torch.int32)
    mixed, done = table(flat.device), 0
    first, second = [], []
    while done < len(flat):
        block, inside = divmod(start + done, BLOCK)
        count = min(BLOCK - inside, len(flat) - done)
        many = 1 if inside else max(1, min((len(flat) - done) // BLOCK, AT_ONCE if flat.is_cuda else 1))
        bits = flat[done : done + max(count, many * BLOCK if many > 1 else 0)].to(torch.int64)
        first.append(bits.sum())
        if many > 1:  # whole blocks, a kernel for all of them
            odd = torch.arange(block, block + many, device=flat.device) * 2 + 1
            second.append(((bits.view(many, BLOCK) * mixed).sum(1) * odd).sum())
        else:
            multipliers = mixed[inside : inside + count]
            second.append(
                ((bits * multipliers).sum() if flat.is_cuda else torch.dot(bits, multipliers)) * (2 * block + 1)
            )
        done += len(bits)
    if not first:
        return torch.zeros(2, dtype=torch.int64, device=flat.device)
    return torch.stack((torch.stack(first).sum(), torch.stack(second).sum()))


def digest(tensors: Mapping[str, tuple[list[int], list[int]]]) -> str:
    """The hash over names, shapes and sums (signed 64-bit)."""
    text = "".join(f"{name} {shape} {first} {second}\n" for name, (shape, (first, second)) in sorted(tensors.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
