"""`--stop-after 40m`: ask a run to stop while a checkpoint still fits, by the steps seen.

|-- steps --|-- one more does not fit --|-- what cannot be interrupted --|-- checkpoint --|-- margin --| limit
            ^ requested after a step              ^ requested within a step that takes longer
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from slime_core.preemption import StopSignal
    from slime_core.types import StepReport

REASON = "--stop-after"
CALM = ("rollout", "checkpoint")
"""Parts of a step that a stop interrupts, or that are counted on their own."""
_TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


class Seconds(click.ParamType):
    """``40m``, ``1h30m``, ``90s`` or plain seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        if isinstance(value, (int, float)):
            return float(value)
        seconds = parse_seconds(value)
        if seconds is None:
            self.fail(f"{value!r} is not a time: write 40m, 90s, 2h, 1h30m or seconds", param, ctx)
        return seconds


def parse_seconds(text: str) -> float | None:
    """Seconds of ``1h30m``, ``90s``, ``2400``; None where it is no time above 0."""
    match = _TIME.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        return None
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    return total if total > 0 else None


def process_age() -> float:
    """Seconds since this process began, so that imports count too; 0 if the system has no figure."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


class StopAfter:
    """A tracker that requests the stop early enough for the run to end, saved, ``limit`` seconds after ``began``.

    It estimates from finished steps: before the first one only the margin is kept.
    """

    def __init__(
        self, limit: float, stop: StopSignal, *, began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._end, self._stop, self._clock = began + limit, stop, clock
        self._margin = min(30.0, max(1.0, 0.02 * limit))
        self._steps: deque[float] = deque(maxlen=5)  # whole wall seconds of the last ones
        self._hard: deque[float] = deque(maxlen=5)  # seconds that a stop waits for
        self._last: tuple[str, float] | None = None  # stage and time of the step before
        self._timer: asyncio.TimerHandle | None = None

    @property
    def reserve(self) -> float:
        """Seconds before the end at which the stop must be requested at the latest."""
        hard = max(self._hard, default=0.0)
        return self._margin + 1.5 * (hard + (self._stop.checkpoint_seconds or hard))

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Nothing to open; the clock runs already."""

    def arm(self) -> None:
        """Set the timer; called inside the event loop, and again after each step."""
        if self._timer is not None:
            self._timer.cancel()
        remaining = self._end - self.reserve - self._clock()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, remaining), self._stop.request, REASON)

    def write(self, report: StepReport) -> None:
        """See how long a step takes; ask where another one does not fit."""
        now = self._clock()
        if any(key.startswith("eval/") for key in report.metrics):
            return  # its time counts with the step that comes after
        if self._last is not None and self._last[0] == report.stage:
            self._steps.append(now - self._last[1])
        else:  # setting up a stage is no part of a step
            self._steps.append(sum(report.seconds.values()))
        self._hard.append(sum(seconds for part, seconds in report.seconds.items() if part not in CALM))
        self._last = report.stage, now
        if now + max(self._steps) + self.reserve > self._end:
            self._stop.request(REASON)
        self.arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
