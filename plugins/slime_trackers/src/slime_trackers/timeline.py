"""The way of every sample through a run as spans on a timeline: queue, prefill, decode, reward, wait, train.

    sample   |request            |request        |reward|wait        |train|        one lane a sample that is under way
             |queue|prefill|decode|...
    loop     |rollout                                   |score|train       |sync|

Spans of a lane nest, and those inside a request add up to it. A lane is used again once its sample is trained, or is
so stale that it will not be.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_trackers.feed import read_reports, series_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slime_core.protocols import Span
    from slime_core.types import Batch, StepReport

LOOP = "loop"
"""The track of the loop; others are samples."""


class SpanWriter(Protocol):
    """Where finished spans go."""

    def open(self, run_dir: Path) -> None:
        """Begin."""

    def write(self, track: str, lane: int, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """One span, in seconds since the epoch."""

    def leave(self, track: str) -> None:
        """A sample has all its spans."""

    def flush(self) -> None:
        """A step is done."""

    def finish(self) -> None:
        """Begin to end, without waiting: no more spans come."""

    def close(self) -> None:
        """Wait, not for ever, until all is written."""


@dataclass(slots=True)
class SampleWay:
    """A sample that is under way."""

    lane: int
    end: float = 0.0  # of its last span
    open: int = 0  # spans
    steps: int = 0  # that were done when its last span ended


@dataclass(slots=True, eq=False)
class Timeline:
    """A sink and an observer of spans that writes them by sample; ``steps`` bounds how many steps, 0 is all.

    Example: Timeline(ChromeTrace(), ahead=config.rollout.max_staleness + 1)
    """

    writer: SpanWriter
    ahead: int = 1  # steps in which a sample that was generated is trained
    steps: int = 0
    _ways: dict[str, SampleWay] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)  # lanes that were used before
    _lanes: int = 0
    _batch: Sequence[str] = ()  # samples of the step in training
    _version: int = 0  # of the step under way
    _done: int = 0  # steps since the start
    _zero: float = field(default_factory=lambda: time.time() - time.monotonic())
    _closed: bool = False

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Open what is written to."""
        self._closed = True  # where one of these raises: spans come all the same
        for report in read_reports(run_dir / "metrics.jsonl"):
            self._version = report.version
        self.writer.open(run_dir)
        self._closed = False

    def write(self, report: StepReport) -> None:
        """A step or an evaluation is reported."""
        if self._closed:
            return
        try:
            self.writer.flush()
        except Exception:
            self._closed = True
            raise
        if not series_of(report)[0]:
            self._step(report.version)

    def close(self) -> None:
        """Write the last spans."""
        self._finish()
        self.writer.close()

    def batch(self, batch: Batch) -> None:
        """Note which samples the step trains on."""
        self._batch, self._version = batch.sample_ids, batch.version

    def begin(self, span: Span) -> None:
        """A span begins."""
        for name in () if self._closed else _samples_of(span):
            way = self._ways.get(name)
            if way is None:
                way = self._ways[name] = SampleWay(self._lane())
            way.open += 1

    def end(self, span: Span) -> None:
        """A span ends."""
        if self._closed:
            return
        start = span.start + self._zero
        end = start + (span.seconds or 0.0)
        samples = _samples_of(span)
        facts = {key: value for key, value in span.facts.items() if key not in ("sample", "samples")}
        if not samples:
            self.writer.write(LOOP, 0, span.name, start, end, {"version": self._version, **span.facts})
            if span.name == "train":
                self._train(start, end)
        for name in samples:
            if (way := self._ways.get(name)) is not None:
                self._end(name, way, span, start, end, facts)

    def _end(self, name: str, way: SampleWay, span: Span, start: float, end: float, facts: Mapping[str, Any]) -> None:
        sample = _sample_of(name)
        self.writer.write(sample, way.lane, span.name, start, end, facts)
        if span.name == "request":
            at = start
            for part in ("queue", "prefill"):
                if part in facts:
                    until = min(end, at + facts[part])
                    self.writer.write(sample, way.lane, part, at, until, {})
                    at = until
            if at > start:
                self.writer.write(sample, way.lane, "decode", at, end, {})
        way.end, way.open, way.steps = end, way.open - 1, self._done
        if sample != name or (span.name == "reward" and name.startswith("eval/")):
            self._leave(name)

    def _train(self, start: float, end: float) -> None:
        """Give every sample of the batch its part of the step."""
        self._version += 1
        for name in self._batch:
            way = self._ways.get(name) or SampleWay(self._lane(), end=start)
            self._ways[name] = way
            if start > way.end:
                self.writer.write(name, way.lane, "wait", way.end, start, {})
            self.writer.write(name, way.lane, "train", start, end, {"version": self._version})
            self._leave(name)
        self._batch = ()

    def _step(self, version: int) -> None:
        """Free the lanes of samples that no step will train, and end after the last step."""
        self._version = version
        self._done += 1
        for name, way in list(self._ways.items()):
            if not way.open and way.steps <= self._done - 1 - self.ahead:
                self._leave(name)
        if self._done == self.steps:
            self._finish()

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            for name in list(self._ways):
                self._leave(name)
            self.writer.finish()

    def _lane(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._lanes += 1
        return self._lanes

    def _leave(self, name: str) -> None:
        heapq.heappush(self._free, self._ways.pop(name).lane)
        if name == _sample_of(name):
            self.writer.leave(name)


def _sample_of(name: str) -> str:
    """The sample of a request; one beside another of its sample has a number behind ``~``, and its own lane."""
    return re.sub(r"~\d+$", "", name)


def _samples_of(span: Span) -> Iterable[str]:
    return (
        span.facts["samples"] if "samples" in span.facts else [span.facts["sample"]] if "sample" in span.facts else ()
    )
