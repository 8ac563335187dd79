"""How many rows a forward pass may have so that a row's bits do not depend on the count.

Matrix products block their sums by their shape: below 16 rows other kernels run, and with two threads and long sums
(896 and more were seen) the blocks change with the number of rows too. So the counts are measured, once, on the
model's own linear layers with this process's threads: those that agree bit for bit with REFERENCE rows are allowed,
and a pass is padded to one of them. Elementwise kernels round the tail of a thread's share differently, so counts are
multiples of a step that leaves no tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

REFERENCE = 64
CANDIDATES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STEPS = (16, 32, 64)
PROBE_FLOPS = 2e10
"""A candidate that would cost more to measure than this is left out."""

VECTOR_BYTES = 128
"""Two AVX-512 vectors: what one turn of an elementwise loop takes."""


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


def measure(products: Sequence[Product], threads: int) -> RowCounts:
    """Allowed counts for a model on the CPU."""
    vector = VECTOR_BYTES // (products[0].dtype.itemsize if products else 4)
    step = _step([product.outputs for product in products], threads, vector)
    counts = [count for count in CANDIDATES if count % step == 0]
    for product in products:
        counts = _agreeing(product, counts)
    return RowCounts(tuple(counts), counts[-1])


def _step(widths: Iterable[int], threads: int, vector: int) -> int:
    """Rows after which every product's output ends on a whole vector in every thread's share."""
    for step in STEPS:
        if all(step * width % (threads * vector) == 0 for width in widths):
            return step
    return STEPS[-1]


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
