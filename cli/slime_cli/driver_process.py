"""The process of a detached run's driver: `slime run`, now and again, by the letter of `--detach`.

    python -m slime_cli.driver_process KEEPER

not started yet         the command as typed, in its run directory
it has, and was lost    `slime run --resume RUN_DIR`, as restarts do it: counted among them, and given up as they are
it has, and ended       how it ended

KEEPER is the process that started this one and that it dies with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_cli.failure import CliSession, Terminated, report_failure
from slime_cli.restarts import MEMORY, Death, Past, RestartCommand, given_up, pause, refusal
from slime_cli.signals import terminable
from slime_cli.starts import starts_of
from slime_core.clusters.detached import DETACHED, LETTER, LOG, code_of
from slime_core.errors import Preempted, SlimeError
from slime_core.parent import end_with
from slime_core.report import RunDir, history
from slime_core.report.text import say

LOOK = 0.5  # seconds between looks whether a process that was lost has let go of the run
LEFT = 300.0  # seconds that it may take: on a machine that is out of reach Ray ends it in time


@dataclass(slots=True, kw_only=True)
class Letter:
    """What the command that detached the run says to its driver, now and at every restart."""

    run_dir: str
    words: list[str]  # of the first start, after `slime`
    epoch: int  # of the run before that
    forced: list[str] = field(default_factory=list)
    until: float | None = None  # wall clock, of --stop-after
    verify_step: int = 0
    verbose: bool = False
    allowed: int = 0  # restarts
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def remaining(self) -> float | None:
        """Seconds of `--stop-after` that are left."""
        return None if self.until is None else max(1.0, self.until - time.time())


def deadline(seconds: float) -> float:
    """When ``seconds`` from now are over, for `Letter.until`: machines share no clock but that of the wall."""
    return time.time() + seconds


def main() -> int:
    """Run; the answer is the exit code."""
    end_with(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block some
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with os.fdopen(int(os.environ.pop(LETTER)), encoding="utf-8") as file:
        letter = Letter(**json.load(file))
    os.environ[DETACHED] = "1"
    run_dir = RunDir(Path(letter.run_dir))
    session = CliSession(verbose=letter.verbose, run_dir=run_dir, secrets=frozenset(letter.secrets.values()))
    try:
        words = next_words(letter, run_dir, session)
    except BaseException as error:
        return report_failure(error, session)
    if words is None:
        return code_of(run_dir.read_info())
    from slime_cli.main import main as slime

    return slime(words)


def next_words(letter: Letter, run_dir: RunDir, session: CliSession) -> list[str] | None:
    """Words after `slime` of this start; None where the run has ended already.

    Raises:
        SlimeError: it was lost too often, or gets no further: how it ended first.
        Preempted: a stop was requested before it resumed.
    """
    info = run_dir.read_info()
    started = any((start.get("epoch") or 0) > letter.epoch for start in starts_of(run_dir))
    if not (started and run_dir.config.is_file()):
        wait_for_the_lock(run_dir)  # which the command holds until it has seen this process
        stop_after = [] if letter.remaining is None else ["--stop-after", str(letter.remaining)]
        return [letter.words[0], *stop_after, *letter.words[1:]]
    if info.get("status") not in ("running", "failed"):
        return None
    lost = death_of(run_dir, info)
    deaths = [*(Death(**death) for death in info.get("deaths") or ()), lost]
    if reason := refusal(deaths, letter.allowed):
        error = given_up(deaths, reason)
        error.why += "" if len(deaths) > 1 else f"; {reason}"
        raise error
    say(f"RESTART {len(deaths)} of {letter.allowed} in {pause(len(deaths)):g} s, after: {lost.summary}")
    try:
        with terminable():
            time.sleep(pause(len(deaths)))
            wait_for_the_lock(run_dir)
    except Terminated:
        fix = f"slime run --resume {run_dir.path}"
        raise Preempted("interrupted before resuming (SIGTERM)", why="nothing is lost", fix=fix) from None
    remember(Past(deaths=deaths, allowed=letter.allowed, secrets=letter.secrets))
    again = RestartCommand(
        session, forced=letter.forced, stop_after=letter.remaining, verify_step=letter.verify_step, as_json=False
    )
    return again.words(run_dir, lost.version)


def death_of(run_dir: RunDir, info: Mapping[str, Any]) -> Death:
    """The end of the driver's last process, recorded in the run directory alone."""
    start = starts_of(run_dir)[-1]
    version = max((step["version"] for step in history.steps_of(run_dir)), default=0)
    after = f" after {info['error']}" if info.get("status") == "failed" else ""
    error = SlimeError(
        f"the driver, process {start.get('pid')} on {start.get('host')}, was lost{after}",
        code="SLM01",
        where=str(run_dir.path / LOG),
        why="it was killed, or its machine was lost; it could not say",
        fix=f"slime run --resume {run_dir.path}",
    )
    return Death.of(error, version)


def wait_for_the_lock(run_dir: RunDir) -> None:
    """Give a process that is on its way out the time for it; the run itself refuses one that stays (CFG16)."""
    end = time.monotonic() + LEFT
    while run_dir.holder() is not None and time.monotonic() < end:
        time.sleep(LOOK)


def remember(past: Past) -> None:
    """Leave it where `restarts.past` finds it."""
    memory = os.memfd_create("slime-restart", 0)
    with os.fdopen(os.dup(memory), "w", encoding="utf-8") as file:
        json.dump(asdict(past), file)
    os.lseek(memory, 0, os.SEEK_SET)
    os.environ[MEMORY] = str(memory)


if __name__ == "__main__":
    sys.exit(main())
