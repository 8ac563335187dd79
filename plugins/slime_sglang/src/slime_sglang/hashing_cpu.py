"""`hashing`'s sums of tiles with numpy: blocks of words that a core's cache holds, spans of blocks on several threads.

For i = base + j with j inside a block whose size divides base, i * F + S = (j * F + S) + base * F and
rotl(i) = rotl(j) ^ rotl(base): what depends on j is worked out once.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

TILE = 8192  # words
SEED = 0x243F6A88
SEED2 = (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF
MIX = 0x85EBCA6B, 0xC2B2AE35
PLACE = (0x27D4EB2D, SEED, 15), (0x165667B1, SEED2, 13)  # factor, seed and turn of a and b


BLOCK = 8 * TILE  # words; a power of two
SPAN = 16 * BLOCK  # words, for one thread
THREADS = 8  # memory gives no more than a few of them what they could take
ALL = 0xFFFFFFFF


def add(words: torch.Tensor, place: int, sums: torch.Tensor) -> None:
    """See `hashing._adder`: ``words`` [n] int32 and ``sums`` [tiles, 2] int32, both on the CPU."""
    flat, into = words.numpy().view(np.uint32), sums.numpy().view(np.uint32)
    starts = [0, *range(SPAN - place % SPAN, len(flat), SPAN)]  # spans share no tile
    spans = [
        (flat[begin:end], place + begin, into) for begin, end in zip(starts, [*starts[1:], len(flat)], strict=True)
    ]
    if len(spans) < 2 or len(os.sched_getaffinity(0)) < 2:
        for span in spans:
            _span(*span)
    else:
        list(_pool().map(lambda span: _span(*span), spans))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="hashing")


def _span(words: Words, place: int, sums: Words) -> None:
    mixed, shifted = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    done = 0
    while done < len(words):
        inside = (place + done) % BLOCK
        count = min(len(words) - done, BLOCK - inside)
        base = place + done - inside
        for column, (factor, _, turn) in enumerate(PLACE):
            straight, turned = _block(column)
            x, y = mixed[:count], shifted[:count]
            np.add(straight[inside : inside + count], np.uint32(base * factor & ALL), out=x)
            x ^= turned[inside : inside + count]
            x ^= np.uint32(_rotated(base & ALL, turn))
            x ^= words[done : done + count]
            _mix(x, y)
            first, last = (place + done) // TILE, (place + done + count - 1) // TILE
            bounds = [0, *(tile * TILE - place - done for tile in range(first + 1, last + 1))]
            sums[first : last + 1, column] += np.add.reduceat(x, bounds, dtype=np.uint32)
        done += count


def _mix(x: Words, y: Words) -> None:
    """mix of words, in place; ``y`` is as long, and overwritten."""
    for shift, factor in ((16, MIX[0]), (13, MIX[1]), (16, None)):
        np.right_shift(x, np.uint32(shift), out=y)
        x ^= y
        if factor is not None:
            x *= np.uint32(factor)


@cache
def _block(column: int) -> tuple[Words, Words]:
    """j * F + S, and j turned, of every j of a block."""
    factor, seed, turn = PLACE[column]
    j: Any = np.arange(BLOCK, dtype=np.uint64)
    straight = (j * np.uint64(factor) + np.uint64(seed)) & np.uint64(ALL)
    turned = ((j << np.uint64(turn)) | (j >> np.uint64(32 - turn))) & np.uint64(ALL)
    return straight.astype(np.uint32), turned.astype(np.uint32)


def _rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & ALL
