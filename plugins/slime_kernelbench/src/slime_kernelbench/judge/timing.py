"""From samples of time to what is told of speed, and what in them cannot be true. Pure; milliseconds throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_kernelbench.types import Flag, Timing

EXCESSIVE = 10.0
"""Speed-ups above this are not believed by themselves: they are put aside, not rewarded."""
HIDDEN_RATIO, HIDDEN_MS = 1.5, 0.2
"""A host clock further ahead of the device's events than this has seen work that the events have not."""
APART = 1.25
"""Two measurements of one kernel in different processes agree within this factor."""
FLOOR_SLACK = 0.8
PEAKS = {  # bytes/s of memory and FLOP/s (dense, tensor cores, no sparsity), from the vendors' data sheets
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100": (2.04e12, 312e12),
    "L40S": (0.864e12, 362e12),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Samples:
    """One measurement: by the device's events, caches flushed before each; and by the host's clock around a whole
    device's synchronisation, in calls of their own."""

    events: tuple[float, ...]
    host: tuple[float, ...]

    def __post_init__(self) -> None:
        values = (*self.events, *self.host)
        if len(self.events) < 3 or len(self.host) < 3 or not all(math.isfinite(one) and one > 0 for one in values):
            raise ValueError("a measurement needs three positive times by each clock")


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ranked = sorted(values)
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def half_width(values: Sequence[float]) -> float:
    """Half the width of a 95 % confidence interval of the median, from order statistics.

    The ranks are n/2 -+ 1.96 sqrt(n)/2, the normal approximation of the binomial (W. J. Conover, Practical
    Nonparametric Statistics, 3.2).

    Example:
        >>> half_width([1.0] * 30)
        0.0
    """
    ranked, count = sorted(values), len(values)
    reach = 1.96 * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - reach), 0)
    high = min(math.ceil(count / 2 + reach), count - 1)
    return (ranked[high] - ranked[low]) / 2


def floor_of(device: str, moved_bytes: int, flops: float) -> float:
    """Below this no kernel can be: the bytes of inputs and outputs and the reference's FLOPs over the device's peaks.

    0 for a device that is not in the table.
    """
    for name, (bandwidth, arithmetic) in PEAKS.items():
        if name in device:
            return 1e3 * max(moved_bytes / bandwidth, flops / arithmetic)
    return 0.0


def build_timing(
    *, device: str, first: Samples, again: Samples, eager: Samples, compiled: Samples | None, floor: float
) -> Timing:
    """Compare one candidate's times with those of the reference."""
    event = median(first.events)
    overhead = max(median(eager.host) - median(eager.events), 0.0)
    return Timing(
        device=device,
        candidate=event,
        candidate_ci=half_width(first.events),
        eager=median(eager.events),
        compiled=None if compiled is None else median(compiled.events),
        floor=floor,
        repeats=len(first.events),
        remeasured=median(again.events),
        host_over_event=max(median(first.host) - overhead, 0.0) / event,
    )


def suspicions(timing: Timing, first: Samples, again: Samples, eager: Samples) -> list[Flag]:
    """What in a timing cannot be true, or needs a second look.

    Work is hidden where three of four calls by the host's clock show it, in both measurements: a host that is busy
    with something else slows many calls, but not so many; where one measurement alone shows it, the timing is put
    aside. So is one whose calls took far longer in total than their number times the median: it tells of the calls
    that did least.
    """
    flags: list[Flag] = []
    overhead = max(median(eager.host) - median(eager.events), 0.0)
    pairs = [(median(one.events), sorted(one.host)[len(one.host) // 4] - overhead) for one in (first, again)]
    hidden = [(event, host) for event, host in pairs if host > HIDDEN_RATIO * event + HIDDEN_MS]
    if hidden:
        event, host = hidden[0]
        rule = "hidden_work" if len(hidden) == len(pairs) else "not_repeatable"
        detail = f"{event:.3f} ms by the device's events, {host:.3f} ms by the host's clock"
        flags.append(Flag(rule=rule, layer="timing", detail=detail))
    uneven = [(median(one.events), math.fsum(one.events) / len(one.events)) for one in (first, again)]
    if all(mean > HIDDEN_RATIO * event + HIDDEN_MS for event, mean in uneven):
        event, mean = uneven[0]
        detail = f"{event:.3f} ms at the median, {mean:.3f} ms on average"
        flags.append(Flag(rule="not_repeatable", layer="timing", detail=detail))
    fastest = min(timing.candidate, timing.remeasured)
    if fastest < FLOOR_SLACK * timing.floor:
        detail = f"{fastest:.4f} ms; moving its data alone takes {timing.floor:.4f} ms"
        flags.append(Flag(rule="below_floor", layer="timing", detail=detail))
    if timing.slower > APART * fastest and timing.slower - fastest > 0.02:
        detail = f"{timing.candidate:.4f} ms, in a fresh process {timing.remeasured:.4f} ms"
        flags.append(Flag(rule="not_repeatable", layer="timing", detail=detail))
    if timing.speedup > EXCESSIVE:
        flags.append(Flag(rule="excessive_speedup", layer="timing", detail=f"{timing.speedup:.1f} times"))
    return flags


CHEATS = frozenset({"hidden_work", "below_floor"})
"""Suspicions that no honest kernel gives rise to; the others put the timing aside."""
