"""Passes beside each other: each of a CPU's threads runs one of its own, over a part of the rows.

A pass of few rows is some hundred calls, most of them too short for two threads, and in every product two threads wait
for each other. Passes that share nothing wait for each other once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from slime_core.engines.local.attention import RowCounts, Segment

P = TypeVar("P")
R = TypeVar("R")

MOST = 4
"""Lanes; each call is short, and Python runs one of them at a time."""


class Lanes:
    """``count`` threads that run calls beside each other, each with one of torch's threads; the caller is the first.

    Example:
        lanes = Lanes(2)
        with lanes.alone():
            low, high = lanes.map(forward, [rows[:32], rows[32:]])
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "lane", _alone) if count > 1 else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The caller has one thread too, unless there is one lane."""
        before = torch.get_num_threads()
        if self._pool is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if self._pool is not None:
                torch.set_num_threads(before)

    def map(self, function: Callable[[P], R], parts: Sequence[P]) -> list[R]:
        """``function`` of every part."""
        if self._pool is None or len(parts) < 2:
            return [function(part) for part in parts]
        others = [self._pool.submit(_inferring, function, part) for part in parts[1:]]
        try:
            first = function(parts[0])
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]


def _alone() -> None:
    torch.get_num_threads()  # the first call of a thread sets what others were told last
    torch.set_num_threads(1)


@torch.inference_mode()
def _inferring(function: Callable[[P], R], part: P) -> R:
    return function(part)


def passes(rows: int, lanes: int, counts: RowCounts) -> list[slice]:
    """``rows`` rows cut into passes of allowed counts, as many beside each other as there are lanes."""
    parts: list[slice] = []
    first = 0
    while first < rows:
        share = -(-(rows - first) // max(1, lanes - len(parts)))
        size = counts.pad(min(share, counts.most))
        parts.append(slice(first, first + size))
        first += size
    return parts


def shares(segments: Sequence[Segment], lanes: int) -> list[list[Segment]]:
    """Segments of a pack as packs for ``lanes`` passes beside each other, of about as many rows each."""
    parts: list[list[Segment]] = []
    total, begin = segments[-1].end, 0
    for segment in segments:
        if not parts or (segment.begin + segment.end) * lanes > 2 * total * len(parts):
            begin = segment.begin
            parts.append([])
        parts[-1].append(Segment(segment.slot, segment.position, segment.begin - begin, segment.end - begin))
    return parts
