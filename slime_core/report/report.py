"""The report of a run, as the loop sees it: steps, evaluations, samples and notes go in, and nothing ever comes back.

    step ----> metrics.jsonl, trackers, live line          evaluation -> metrics.jsonl, trackers, live line
    samples -> samples.jsonl (best and worst)              note -------> log/run.log, terminal

A sink that raises is logged once and then skipped; training continues. Figures that ``metrics.jsonl`` does
not take are retried: no checkpoint is written without them, so that a resumed run has every version once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from os.path import samestat
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.config.dump import redacted, to_toml
from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.report.alarms import Alarms
from slime_core.report.samples import SampleLog
from slime_core.report.sinks import JsonlSink, evaluation_report

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.config.schema import Config
    from slime_core.errors import SlimeError
    from slime_core.protocols import Sink
    from slime_core.report.rundir import RunDir
    from slime_core.types import Group, StepReport

LONG = 5.0  # seconds of a phase after which a display says that it goes on
OTHER = "other"  # seconds of a step between its parts; not of a stage's first step, nor of evaluations


class Live(Protocol):
    """A display; every method may be called from the loop at any time."""

    def start(self, config: Config, run_dir: Path) -> None:
        """Training is about to begin."""

    def starting(self, text: str) -> None:
        """What the start is busy with, until the first step is done."""

    def waiting(self, phase: str, seconds: float, progress: str) -> None:
        """A phase goes on since ``seconds``; called every few seconds of a long one."""

    def step(self, report: StepReport, wall: float) -> None:
        """A step took ``wall`` seconds."""

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """An evaluation set has its figures."""

    def note(self, text: str) -> None:
        """A sentence."""

    def close(self) -> None:
        """Restore the terminal."""


class Report:
    """Everything that a run reports; ``live`` is None without a terminal.

    Example:
        report = Report(run_dir, config, sinks=[], live=make_live(sys.stderr))
        report.start()
        report.step(StepReport(version=1, stage="main", step=0, of=40, metrics={"reward/mean": 0.5}, seconds={}))
        report.finish()
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: Config,
        sinks: Sequence[Sink] = (),
        live: Live | None = None,
        *,
        secrets: Iterable[str] = (),
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.secrets = frozenset(secrets)  # values that nothing that is written may hold
        self._live = live
        self._jsonl = JsonlSink()
        self._sinks: list[Sink] = [self._jsonl, *sinks]
        self._samples = SampleLog(run_dir.samples, config.report.save_samples)
        self._last: StepReport | None = None
        self._folder: int | None = None  # the run directory, open
        self._phase_file: int | None = None  # likewise
        self._alarms = Alarms()
        self._mark = time.monotonic()
        self.doing: tuple[str, float] = ("", self._mark)  # the phase that is under way, and since when (monotonic)
        self.on_hang: Callable[[SlimeError], None] | None = None
        self.progress: Callable[[], str] = str  # how far the phase that is under way is, as text

    @property
    def version(self) -> int:
        """Completed steps, as far as was reported."""
        return self._last.version if self._last is not None else 0

    def phase(self, name: str) -> None:
        """What the run does from here on; empty: nothing that has a name."""
        self.doing = (name, time.monotonic())
        self._write_phase(name)
        if name:
            self.starting(f"first step: {name}")

    def _write_phase(self, name: str) -> None:
        """Replace the line of ``log/phase``, which programs that watch the run read; some 10 microseconds."""
        with suppress(OSError):
            if self._phase_file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._phase_file = os.open(self.run_dir.phase, flags, 0o666)
            os.pwrite(self._phase_file, f"{name:<32.32} {time.time():.3f}\n".encode(), 0)

    def hung(self, error: SlimeError) -> None:
        """A part of the run hangs, and the run is about to be ended."""
        if self.on_hang is not None:
            self.on_hang(error)

    def start(self) -> None:
        """Write ``config.toml``, start the trackers and the live line."""
        self._folder = os.open(self.run_dir.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._write_phase("")
        config = redacted(self.config, self.secrets)
        self.run_dir.write_config(to_toml(config))
        plain = config.model_dump(mode="json")
        self._call_sinks(lambda sink: sink.start(self.run_dir.path, plain))
        self._show(lambda live: live.start(self.config, self.run_dir.path))
        self._mark = time.monotonic()

    def starting(self, text: str) -> None:
        """What the run is busy with before its first step: to the live line and to ``log/run.log``."""
        if self._last is None:
            self.log(f"start: {text}")
            self._show(lambda live: live.starting(text))

    @contextmanager
    def during(self, phase: str, progress: Callable[[], str] = str) -> Iterator[None]:
        """The block is what the run does: a phase that is no part of a step."""
        self.doing, self.progress = (phase, time.monotonic()), progress
        try:
            yield
        finally:
            self.doing, self.progress = ("", time.monotonic()), str

    @asynccontextmanager
    async def watched_live(self) -> AsyncIterator[None]:
        """Show, inside this block, that a long phase goes on, and how far it is."""
        task = asyncio.create_task(self._show_waiting())
        try:
            yield
        finally:
            task.cancel()

    async def _show_waiting(self) -> None:
        while True:
            await asyncio.sleep(LONG)
            phase, since = self.doing
            if phase and (seconds := time.monotonic() - since) >= LONG:
                self._show(partial(_show_phase, phase, seconds, self.progress()))

    def step(self, report: StepReport) -> None:
        """One finished step; sinks see under `OTHER` what of its time is in no part."""
        now = time.monotonic()
        wall, parts = now - self._mark, sum(report.seconds.values())
        if self._last is None or self._last.stage != report.stage:
            wall = parts  # setting up a stage is not part of its first step
        else:
            report = replace(report, seconds={**report.seconds, OTHER: max(0.0, wall - parts)})
        self._mark, self._last = now, report
        self._call_sinks(lambda sink: sink.write(report))
        self._show(lambda live: live.step(report, wall))
        for line in self._alarms.see(report):
            self.note(line)

    def evaluation(self, name: str, version: int, metrics: dict[str, float], *, beside: bool = False) -> None:
        """One evaluation set at ``version``; the metric ``seconds`` counts as a time, not as a result.

        ``beside`` is True if steps ran meanwhile.
        """
        self._guard("metrics.jsonl", lambda: self._jsonl.evaluation(name, version, metrics))
        as_step = evaluation_report(name, version, metrics, self._last)
        for sink in list(self._sinks):
            if sink is not self._jsonl:
                self._one(sink, lambda sink=sink: sink.write(as_step))  # type: ignore[misc]
        self._show(lambda live: live.evaluation(name, version, metrics))
        if not beside:
            self._mark = time.monotonic()

    def samples(self, version: int, groups: Sequence[Group]) -> None:
        """Keep the best and the worst samples of the step that made ``version``."""
        self._guard("samples.jsonl", lambda: self._samples.write(version, groups))

    def note(self, text: str) -> None:
        """A sentence for people: to the terminal and to ``log/run.log``."""
        self.log(text)
        self._show(lambda live: live.note(text))

    def log(self, text: str) -> None:
        """A sentence for ``log/run.log`` alone."""
        try:
            with (self.run_dir.log / "run.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
        except OSError:
            return

    def restarted(self, version: int, number: int, of: int, cause: str) -> None:
        """Report automatic restart ``number`` of ``of`` from ``version``."""
        self._guard("metrics.jsonl", lambda: self._jsonl.restart(version, number, of, cause))
        self.note(f"RESTART {number} of {of}, from version {version}, after: {cause}")

    def add(self, sink: Sink) -> None:
        """Add a tracker before :meth:`start`."""
        self._sinks.append(sink)

    def check(self) -> None:
        """See that the run directory is still there.

        Raises:
            StorageError: STO111 it was removed or moved.
        """
        try:
            present = self._folder is None or samestat(os.fstat(self._folder), self.run_dir.path.stat())
        except FileNotFoundError:
            present = False
        if not present:
            raise StorageError(
                "the run directory was removed or moved during the run",
                code="STO111",
                where=str(self.run_dir.path),
                why="what this process writes would not be found again",
                fix="after a move: slime run --resume NEW_PATH\nafter a removal: start the run again",
            )

    def flush(self) -> None:
        """See that the run directory is there, and has every figure.

        Raises:
            StorageError: STO111 as :meth:`check`; STO109, STO110, STO121 or STO00 ``metrics.jsonl`` takes no line.
        """
        self.check()
        try:
            self._jsonl.flush()
        except OSError as error:
            raise storage_error(error, self.run_dir.metrics, "metrics.jsonl cannot be written") from error

    def finish(self) -> None:
        """Flush and close everything."""
        self._call_sinks(lambda sink: sink.close())
        self._show(lambda live: live.close())
        for descriptor in (self._folder, self._phase_file):
            if descriptor is not None:
                os.close(descriptor)
        self._folder = self._phase_file = None

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            self._one(sink, lambda sink=sink: call(sink))  # type: ignore[misc]

    def _one(self, sink: Sink, call: Callable[[], Any]) -> None:
        if not self._guard(type(sink).__name__, call) and sink is not self._jsonl:
            self._sinks.remove(sink)

    def _show(self, call: Callable[[Live], None]) -> None:
        if (live := self._live) is not None:
            self._guard("live", lambda: call(live))

    def _guard(self, name: str, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Exception as error:
            text = f"warning: {name} failed; training continues: {type(error).__name__}: {error}"
            self.log(text)
            if name != "live":
                self._show(lambda live: live.note(text))
            return False
        return True


def _show_phase(phase: str, seconds: float, progress: str, live: Live) -> None:
    live.waiting(phase, seconds, progress)
