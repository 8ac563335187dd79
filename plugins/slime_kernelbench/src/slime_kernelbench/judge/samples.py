"""A part of a large output, chosen after it was made: elements `(offset + step * i) % size`, on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_kernelbench.judge.wire import ITEMSIZES, Leaf, Tree

LARGEST = 1 << 17
"""Elements of one output that are compared; smaller ones are compared whole. Where one of 10,000 is wrong, all that
are looked at of one call are right with probability 0.9999^(2^17) = 2e-6."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Pattern:
    """Which elements. Both numbers are drawn by the judge when the output exists already."""

    offset: int
    step: int

    def indices(self, size: int, largest: int = LARGEST) -> NDArray[np.int64] | None:
        """Positions in row-major order; None for all of them. No position comes twice: step and size are coprime."""
        if size <= largest:
            return None
        step = self.step % size or 1
        while math.gcd(step, size) != 1:
            step += 1
        return (self.offset + step * np.arange(largest, dtype=np.int64)) % size


def sampled(tree: Tree, pattern: Pattern) -> Tree:
    """The tree with each large tensor cut down to its sample, in one dimension."""
    if isinstance(tree, dict):
        return {key: sampled(item, pattern) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(sampled(item, pattern) for item in tree)
    if not isinstance(tree, Leaf):
        return tree
    chosen = pattern.indices(math.prod(tree.shape))
    if chosen is None:
        return tree
    items = np.frombuffer(tree.data, dtype=np.dtype(f"V{ITEMSIZES[tree.dtype]}"))
    data = items[chosen].tobytes()
    return Leaf(dtype=tree.dtype, shape=(len(chosen),), data=data, kind=tree.kind, device=tree.device)


def forms(tree: Tree) -> Tree:
    """Dtypes and shapes of a tree's tensors, as text: what a sample alone does not tell."""
    if isinstance(tree, dict):
        return {key: forms(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [forms(item) for item in tree]
    return f"{tree.dtype} {tree.shape}" if isinstance(tree, Leaf) else str(tree)
