# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`hashing`'s sums of tiles as a Triton kernel: every word is read once. Imported on a GPU alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime_sglang.hashing_cpu import MIX, PLACE, TILE

BLOCK = 1024


@triton.jit
def _mixed(x, M1: tl.constexpr, M2: tl.constexpr):
    x ^= x >> 16
    x = x * tl.full((), M1, tl.uint32)
    x ^= x >> 13
    x = x * tl.full((), M2, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit(do_not_specialize=["count", "place"])
def _tiles(
    words, sums, count, place,
    F1: tl.constexpr, S1: tl.constexpr, T1: tl.constexpr, F2: tl.constexpr, S2: tl.constexpr, T2: tl.constexpr,
    M1: tl.constexpr, M2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the row a program; the piece's words begin at word ``place`` of the row."""
    tile = (place // TILE).to(tl.int64) + tl.program_id(0)
    begin = tile * TILE - place  # of the tile, in the piece; negative where an earlier piece began it
    high = tl.zeros((BLOCK,), tl.uint32)
    low = tl.zeros((BLOCK,), tl.uint32)
    for off in range(0, TILE, BLOCK):
        at = begin + off + tl.arange(0, BLOCK)
        inside = (at >= 0) & (at < count)
        word = tl.load(words + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        i = (at + place).to(tl.uint32)
        a = (i * tl.full((), F1, tl.uint32) + tl.full((), S1, tl.uint32)) ^ ((i << T1) | (i >> (32 - T1)))
        b = (i * tl.full((), F2, tl.uint32) + tl.full((), S2, tl.uint32)) ^ ((i << T2) | (i >> (32 - T2)))
        nothing = tl.zeros((BLOCK,), tl.uint32)
        high += tl.where(inside, _mixed(word ^ a, M1, M2), nothing)
        low += tl.where(inside, _mixed(word ^ b, M1, M2), nothing)
    one = tl.sum(high.to(tl.int64), axis=0)
    two = tl.sum(low.to(tl.int64), axis=0)
    out = sums + tile * 2  # pieces of a row run one after another, so nobody else adds to this tile now
    tl.store(out, (tl.load(out).to(tl.int64) + one).to(tl.int32))
    tl.store(out + 1, (tl.load(out + 1).to(tl.int64) + two).to(tl.int32))


def add(words: torch.Tensor, place: int, sums: torch.Tensor) -> None:
    """See `hashing._adder`."""
    if not len(words):
        return
    first, last = place // TILE, (place + len(words) - 1) // TILE
    (f1, s1, t1), (f2, s2, t2) = PLACE
    with torch.cuda.device(words.device):
        _tiles[(last - first + 1,)](
            words, sums, len(words), place,
            F1=f1, S1=s1, T1=t1, F2=f2, S2=s2, T2=t2, M1=MIX[0], M2=MIX[1], TILE=TILE, BLOCK=BLOCK,
        )  # fmt: skip
