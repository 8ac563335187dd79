"""Checksum of float32 parameters and router biases: the same for any backend, number of ranks, layout and device.

Of each tensor with bits b(0), b(1), ... (int32, row by row) two sums modulo 2^64:

    sum b(i)     and     sum b(i) * m(i),    m(i) = t(i mod 2^16) * (2 * (i div 2^16) + 1)

t(j) is odd and looks random: two rounds of multiply and fold of j + 1. The answer is a sha256 over names, shapes and
sums, in the order of names. A changed bit changes the first sum; a swap of elements the second; a swap of tensors
both under their names. Elements may be summed in any order, each once, by whichever rank has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

BLOCK = 1 << 16
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
ODD2 = 0xBF58476D1CE4E5B9 - (1 << 64)


@lru_cache(maxsize=2)
def table(device: torch.device) -> torch.Tensor:
    """t(j) of j in [0, 2^16): [2^16] int64."""
    mixed = torch.arange(1, BLOCK + 1, dtype=torch.int64, device=device) * ODD
    for odd in (ODD2, ODD):
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * odd
    return mixed | 1


@torch.no_grad()
def all_sums(runs: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Both sums of each run of float32 elements, with the element of its tensor that is its first: [n, 2] int64.

    On a GPU one kernel takes all of them.
    """
    if not runs:
        return torch.zeros(0, 2, dtype=torch.int64)
    if runs[0][0].is_cuda:
        from slime_core.trainers import fingerprint_cuda

        return fingerprint_cuda.sums(runs, ODD, ODD2)
    return torch.stack([_of_run(run.reshape(-1).view(torch.int32), start) for run, start in runs])


def sums(run: torch.Tensor, start: int) -> torch.Tensor:
    """:func:`all_sums` of one run: [2] int64."""
    return all_sums([(run, start)])[0]


def _of_run(bits: torch.Tensor, start: int) -> torch.Tensor:
    mixed, totals, done = table(bits.device), torch.zeros(2, dtype=torch.int64), 0
    while done < len(bits):  # a block fits into a core's cache
        block, inside = divmod(start + done, BLOCK)
        part = bits[done : done + BLOCK - inside].to(torch.int64)
        second = torch.dot(part, mixed[inside : inside + len(part)]) * (2 * block + 1)
        totals += torch.stack((part.sum(), second))
        done += len(part)
    return totals


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, str]:
    """Both sums of each tensor's values in ``dtype``, as 32 hex digits by name; equal on every device.

    What an engine serves in ``dtype`` has those of the trainer's wider tensors.
    """
    if not tensors:
        return {}
    sizes = [tensor.numel() for tensor in tensors.values()]
    values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).to(dtype).float()
    rows = all_sums([(run, 0) for run in values.split(sizes)]).tolist()
    return {name: f"{a % 2**64:016x}{b % 2**64:016x}" for name, (a, b) in zip(tensors, rows, strict=True)}


def digest(tensors: Mapping[str, tuple[list[int], list[int]]]) -> str:
    """The hash over names, shapes and sums (signed 64-bit)."""
    text = "".join(f"{name} {shape} {first} {second}\n" for name, (shape, (first, second)) in sorted(tensors.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
