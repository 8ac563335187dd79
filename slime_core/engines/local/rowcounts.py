"""How many rows a forward pass may have so that a row's bits do not depend on the count.

Matrix products block their sums by their shape: below 16 rows other kernels run, and with two threads and long sums
(896 and more were seen) the blocks change with the number of rows too. So the counts are measured, once, on the
model's own linear layers with this process's threads: those that agree bit for bit with REFERENCE rows are allowed,
and a pass is padded to one of them. Elementwise kernels round the tail of a thread's share differently, so counts are
multiples of a step that leaves no tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

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


def measure(model: nn.Module, threads: int) -> RowCounts:
    """Allowed counts for a model on the CPU."""
    layers = _distinct(model)
    widths = [layer.out_features for layer in layers]
    dtype = layers[0].weight.dtype if layers else torch.float32
    step = _step(widths, threads, VECTOR_BYTES // dtype.itemsize)
    counts = [count for count in CANDIDATES if count % step == 0]
    for layer in layers:
        counts = _agreeing(layer, counts)
    return RowCounts(tuple(counts), counts[-1])


def _distinct(model: nn.Module) -> list[nn.Linear]:
    found: dict[tuple[int, int, bool], nn.Linear] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.setdefault((module.in_features, module.out_features, module.bias is not None), module)
    return list(found.values())


def _step(widths: Iterable[int], threads: int, vector: int) -> int:
    """Rows after which every layer's output ends on a whole vector in every thread's share."""
    for step in STEPS:
        if all(step * width % (threads * vector) == 0 for width in widths):
            return step
    return STEPS[-1]


def _agreeing(layer: nn.Linear, counts: Sequence[int]) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    flops = 2 * layer.in_features * layer.out_features
    counts = [count for count in counts if count <= REFERENCE or count * flops <= PROBE_FLOPS]
    made = torch.randn(counts[-1], layer.in_features, generator=generator).to(layer.weight.dtype)
    wanted = torch.cat([layer(_filled(made, begin)) for begin in range(0, len(made), REFERENCE)])
    kept = []
    for count in counts:
        low, high = layer(made[:count]), layer(made[len(made) - count :])
        if torch.equal(low, wanted[:count]) and torch.equal(high, wanted[len(made) - count : len(made)]):
            kept.append(count)
    return kept


def _filled(made: torch.Tensor, begin: int) -> torch.Tensor:
    """REFERENCE rows from ``begin``, from the start again where they run out."""
    rows = made[begin : begin + REFERENCE]
    return rows if len(rows) == REFERENCE else torch.cat([rows, made[: REFERENCE - len(rows)]])
