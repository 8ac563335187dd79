"""Costs in, parts of about equal cost out: which sequences each data-parallel rank trains on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Part = tuple[float, list[int]]
"""Sum of costs, and whose they are."""


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide indices into ``parts`` lists of about equal sums, the heaviest first; some are empty where costs are few.

    The largest differencing method (Karmarkar and Karp 1982; for more than two parts Korf 1998): every cost begins as
    a partition of its own, with empty parts beside it. The two partitions whose sums differ most become one, the
    heaviest part of either with the lightest of the other, until one is left. O(n log n) such steps.

    Example: karmarkar_karp([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]   # 16 and 14
    """
    heap = [(-cost, number, [(cost, [number])]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    fresh = len(heap)  # breaks ties, so that equal costs are dealt alike everywhere
    while len(heap) > 1:
        *_, one = heapq.heappop(heap)
        *_, other = heapq.heappop(heap)
        both = _joined(one, other, parts)
        least = both[-1][0] if len(both) == parts else 0.0
        heapq.heappush(heap, (least - both[0][0], fresh, both))
        fresh += 1
    found = [sorted(members) for _, members in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def _joined(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Two partitions as one, heaviest first: the heaviest of ``one`` with the lightest of ``other``, and so on."""
    gap = parts - len(other)  # parts of ``other`` that are empty meet the heaviest of ``one``
    merged = one[:gap]
    for (cost, members), (more, others) in zip(one[gap:], reversed(other)):
        merged.append((cost + more, members + others))
    alone = len(other) - max(len(one) - gap, 0)
    return sorted([*merged, *other[:alone]], key=lambda part: -part[0])
