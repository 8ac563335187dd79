"""Numbers of rows of which a product gives every row the same bits, measured on this machine.

Linear layers block their sums by their shape too: below 16 rows other kernels run, and with two threads and long sums
(896 and more were seen) the blocks change with the number of rows. So the counts of rows are measured, once, on the
model's own products with this process's threads: those that agree bit for bit with REFERENCE rows are allowed, and a
pass is padded to one of them. Elementwise kernels treat the tail of each thread's share with other code, which rounds
an exp or tanh differently, so a count is also one that leaves no tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

REFERENCE = 64
CANDIDATES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
PROBE_FLOPS = 2e10
"""A candidate that would cost more to measure than this is left out."""

PROBE_ROWS = 512
"""Rows that a small candidate is measured with: in bfloat16 few rows may agree by chance with other bits."""

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
    rows = torch.randn(total, product.inputs, generator=torch.Generator().manual_seed(0)).to(product.dtype)
    pieces = [rows[begin : begin + REFERENCE] for begin in range(0, total, REFERENCE)]
    pieces[-1] = torch.cat([pieces[-1], rows[: REFERENCE - len(pieces[-1])]])
    reference = torch.cat([product.run(piece) for piece in pieces])[:total]
    sizes = []
    for count in counts:
        starts = np.linspace(0, total - count, max(2, PROBE_ROWS // count)).astype(int).tolist()
        if all(torch.equal(product.run(rows[a : a + count]), reference[a : a + count]) for a in starts):
            sizes.append(count)
    return sizes
