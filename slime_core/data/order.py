"""The order of rows as pure functions: which row stands at a place of an epoch, and which task at a position.

Nothing is held that grows with the data, and nothing depends on what was drawn before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from slime_core.seeds import seed_of

ROUNDS = 8
SMALL = 1 << 12  # up to here a permutation is drawn whole, and every one is equally likely
MASK = (1 << 64) - 1


class Permutation:
    """A permutation of ``range(n)`` that is a function of its key; ``at(i)`` needs no table for large n.

    Up to :data:`SMALL` rows it is a Fisher-Yates shuffle. Above, a Feistel network over the next power of four that is
    walked until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Example:
        order = Permutation(10, seed_of(7, "shuffle", 0))
        assert sorted(order.at(i) for i in range(10)) == list(range(10))
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one row, not {n}")
        self.n = n
        self._table = _shuffled(n, key) if n <= SMALL else None
        self._half = ((n - 1).bit_length() + 1) // 2
        self._keys = [_mix(key + r * 0x9E3779B97F4A7C15) for r in range(ROUNDS)]

    def at(self, place: int) -> int:
        """The row at a place, both from 0 to n - 1."""
        if not 0 <= place < self.n:
            raise IndexError(place)
        if self._table is not None:
            return self._table[place]
        value = self._network(place)
        while value >= self.n:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        low_mask = (1 << self._half) - 1
        left, right = value >> self._half, value & low_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & low_mask)
        return left << self._half | right


def pick(weights: Sequence[float], seed: int, position: int) -> int:
    """The task at a position of the run: index i with probability ``weights[i] / sum(weights)``."""
    if len(weights) == 1:
        return 0
    edges = list(accumulate(weights))
    draw = (seed_of(seed, "task", position) >> 11) * 2.0**-53  # in [0, 1), 53 bits
    return min(bisect_right(edges, draw * edges[-1]), len(weights) - 1)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 bits to 64 bits, one to one."""
    value &= MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def _shuffled(n: int, key: int) -> list[int]:
    table = list(range(n))
    for i in range(n - 1, 0, -1):
        # 64 random bits scaled to [0, i]: the bias is below i / 2**64
        j = _mix(key + i * 0x9E3779B97F4A7C15) * (i + 1) >> 64
        table[i], table[j] = table[j], table[i]
    return table
