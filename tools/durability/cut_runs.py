"""A run that is cut off at any moment and goes on: the whole loop on fakes, in this process.

    start(cut=20) -> None: its task was cancelled after 20 ms -> start(cut=26) -> None -> ... -> start() -> version

Ledger, checkpoints, data order, collector, plugins and the run directory are real; engines and trainer are fakes, so
that a start takes a fraction of a second. `chaos` kills whole processes instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from durability.fake_trainer import FakeTrainer
from slime_cli.trim import evaluations_kept, trim_figures
from slime_core import loop
from slime_core.checkpoint import Checkpoints
from slime_core.clusters.colocation import DedicatedDevices, TimeSharing
from slime_core.clusters.engine_set import engine_reservation
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.preemption import StopSignal

Made = Callable[[int], Any]
"""Makes what serves a start, an engine or a set of them; it is given the run directory's epoch."""


class CutRun:
    """A run in a folder; every ``start`` is what a new process would do.

    ``tokenizer`` speaks of ``vocab_size`` ids; a start that takes more than ``seconds`` raises TimeoutError. After a
    start ``trainer`` and ``engine`` are what it used.

    Example:
        whole, pieces = CutRun(tmp_path / "whole", config), CutRun(tmp_path / "pieces", config)
        whole.start()
        cut = 5.0
        while pieces.start(cut=cut) is None:
            cut *= 1.3
        assert pieces.final() == whole.final()
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        *,
        engine: Made | None = None,
        tokenizer: Any = None,
        vocab_size: int = 16,
        seconds: float = 30.0,
    ) -> None:
        self.path, self.config, self.vocab_size, self.seconds = path, config, vocab_size, seconds
        self.tokenizer = tokenizer or CharTokenizer()
        self.trainer: FakeTrainer = FakeTrainer()
        self.engine: Any = None
        self._engine = engine or (lambda epoch: FakeEngine(epoch=epoch))

    def start(self, *, cut: float = 0.0, stop: StopSignal | None = None) -> int | None:
        """Begin, or go on: the version it reached, or None where it was cut after ``cut`` milliseconds.

        Raises:
            SlimeError: what the run raises.
            TimeoutError: it hung.
        """
        plugins, self.trainer = load_plugins(self.config), FakeTrainer()
        try:
            return asyncio.run(asyncio.wait_for(self._start(plugins, cut, stop), self.seconds))
        finally:
            plugins.close()

    def prepare(self, plugins: Plugins, report: Report) -> None:
        """Do what is to be done to the parts of every start; nothing, unless a subclass says so."""

    async def _start(self, plugins: Plugins, cut: float, stop: StopSignal | None) -> int | None:
        fresh = not (self.path / "config.toml").exists()
        with RunDir.create("cut", at=self.path) if fresh else RunDir.reopen(self.path) as run_dir:
            report = Report(run_dir, self.config)
            found = Checkpoints(run_dir.checkpoints, keep=2, note=report.note).latest()
            trim_figures(run_dir, found.version if found else 0, evaluations=evaluations_kept(found))
            report.start()
            self.prepare(plugins, report)
            work = loop.run(self.config, plugins, report, cluster=self._cluster, checkpoint=found, stop=stop)
            task = asyncio.ensure_future(work)
            if cut:
                asyncio.get_running_loop().call_later(cut / 1000, task.cancel)
            try:
                return await task
            except asyncio.CancelledError:
                return None
            finally:
                report.finish()

    @asynccontextmanager
    async def _cluster(self, config: Config, plugins: Plugins, report: Report) -> AsyncIterator[RunComponents]:
        self.engine, ledger = self._engine(report.run_dir.epoch), SqliteLedger(report.run_dir.path)
        try:
            yield RunComponents(
                engines=self.engine,
                tokenizer=self.tokenizer,
                vocab_size=self.vocab_size,
                trainer=self.trainer,
                ledger=ledger,
                devices=TimeSharing(self.engine) if config.cluster.colocate else DedicatedDevices(),
                reserve_engine=engine_reservation(self.engine),
            )
        finally:
            await ledger.close()

    def final(self) -> dict[str, bytes]:
        """The files that a finished run ends with: its weights and what stands beside them."""
        return {path.name: path.read_bytes() for path in (self.path / "final").iterdir()}
