"""How many rows a forward pass may have so that a row's bits do not depend on the count.

Matrix products block their sums by their shape: below 16 rows other kernels run, and with two threads and long sums
(896 and more were seen) the blocks change with the number of rows too. So the counts are measured, once, on the
model's own products with this process's threads: those that agree bit for bit with REFERENCE rows are allowed, and a
pass is padded to one of them. Elementwise kernels treat the tail of each thread's share with other code, which rounds
an exp or tanh differently, so a count is also one that leaves no tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REFERENCE = 64
CANDIDATES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
PROBE_FLOPS = 2e10
"""A candidate that would cost more to measure than this is left out."""

VECTOR_BYTES = 128
"""Two AVX-512 vectors: what one turn of an elementwise loop takes."""

GRAIN = 32768
"""Elements for which torch adds a thread to an elementwise kernel."""

GRAINS = (2048, GRAIN)
"""The first is that of exp, tanh and the like."""


@dataclass(slots=True, frozen=True)
class RowCounts:
    """Allowed counts, ascending; empty where any count will do."""

    allowed: tuple[int, ...] = ()
    most: int = 1024  # rows of one pass

    def pad(self, rows: int) -> int:
        """The smallest allowed count that holds ``rows``, or a multiple of the largest."""
        if not self.allowed:
            return rows
        for count in self.allowed:
            if count >= rows:
                return count
        return -(-rows // self.most) * self.most


@dataclass(slots=True, frozen=True)
class Product:
    """One kind of matrix product of a model: [N, inputs] -> [N, outputs]."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    run: Callable[[torch.Tensor], torch.Tensor]
    bent: bool  # an elementwise function may follow over all of [N, outputs]


def measure(products: Sequence[Product], threads: int) -> RowCounts:
    """Allowed counts for a model on the CPU."""
    counts = [
        count
        for count in CANDIDATES
        if all(tailless(count * p.outputs, threads, p.dtype.itemsize) for p in products if p.bent)
    ]
    counts = sorted({*counts, REFERENCE})
    for product in products:
        counts = _agreeing(product, counts)
    return RowCounts(tuple(counts), counts[-1])


def tailless(size: int, threads: int, itemsize: int) -> bool:
    """Whether every thread's share of an elementwise kernel over ``size`` elements is whole vectors."""
    vector = VECTOR_BYTES // itemsize
    shares = [-(-size // min(threads, -(-size // grain))) for grain in GRAINS]
    return size % vector == 0 and all(share % vector == 0 for share in shares)


def _agreeing(product: Product, counts: Sequence[int]) -> list[int]:
    flops = 2 * product.inputs * product.outputs
    counts = [count for count in counts if count <= REFERENCE or count * flops <= PROBE_FLOPS]
    total = max(counts)
    made = torch.randn(total, product.inputs, generator=torch.Generator().manual_seed(0)).to(product.dtype)
    pieces = [made[begin : begin + REFERENCE] for begin in range(0, total, REFERENCE)]
    pieces[-1] = torch.cat([pieces[-1], made[: REFERENCE - len(pieces[-1])]])
    wanted = torch.cat([product.run(piece) for piece in pieces])[:total]
    kept = []
    for count in counts:
        low, high = product.run(made[:count]), product.run(made[total - count :])
        if torch.equal(low, wanted[:count]) and torch.equal(high, wanted[total - count :]):
            kept.append(count)
    return kept
