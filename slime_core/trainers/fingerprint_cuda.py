# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`fingerprint.sums` of many runs as one Triton kernel, which reads every element once. Imported on a GPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

TILE = 1 << 14  # elements of a run that a program sums
BLOCK = 1024


@triton.jit
def _sums(tiles, sums, ODD: tl.constexpr, ODD2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add one tile's sums to its run's; ``tiles`` are [n, 4] int64: run, address, element of its tensor, count."""
    tile = tiles + tl.program_id(0) * 4
    run, element, count = tl.load(tile), tl.load(tile + 2), tl.load(tile + 3)
    words = tl.load(tile + 1).to(tl.pointer_type(tl.int32))
    first = tl.zeros((BLOCK,), tl.int64)
    second = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, TILE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        bits = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
        i = element + at
        mixed = ((i & 0xFFFF) + 1) * ODD
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * ODD2
        mixed = ((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * ODD) | 1
        first += bits
        second += bits * mixed * ((i >> 16) * 2 + 1)
    tl.atomic_add(sums + run * 2, tl.sum(first, 0))  # integers: in any order
    tl.atomic_add(sums + run * 2 + 1, tl.sum(second, 0))


def sums(runs: Sequence[tuple[torch.Tensor, int]], odd: int, odd2: int) -> torch.Tensor:
    """See `fingerprint.all_sums`; ``odd`` and ``odd2`` are its multipliers."""
    flat = [run.reshape(-1) for run, _ in runs]
    counts = np.array([len(run) for run in flat])
    many = -(-counts // TILE)
    number = np.repeat(np.arange(len(runs)), many)
    inside = (np.arange(len(number)) - np.repeat(np.cumsum(many) - many, many)) * TILE
    address, element = np.array([[run.data_ptr() for run in flat], [start for _, start in runs]], dtype=np.int64)
    tiles = np.stack((number, address[number] + 4 * inside, element[number] + inside, counts[number] - inside), 1)
    device = flat[0].device
    totals = torch.zeros(len(runs), 2, dtype=torch.int64, device=device)
    if len(tiles):
        on_device = torch.from_numpy(tiles).to(device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _sums[(len(tiles),)](on_device, totals, ODD=odd, ODD2=odd2, TILE=TILE, BLOCK=BLOCK)
    return totals
