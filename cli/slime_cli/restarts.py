"""Restarts of a run that lost a process, server or machine: `slime run --resume`, or why not.

    lost, or hung -> how often? -> said -> a pause -> this process becomes `slime run --resume RUN_DIR`
                        `- too often, or no step since the last restart: the first cause, and the last one

The same process id runs another program from its first line on, so nothing of what failed is left in memory, and
there is one way to go on. What it must know of its past (how often, why, secrets that are written nowhere) crosses in
a block of memory without a name.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slime_cli.failure import CliSession, Terminated, placed, report_failure
from slime_cli.signals import kill_descendants
from slime_cli.starts import end, save_error
from slime_core.errors import END_NOW, Hung, Preempted, SlimeError, remade
from slime_core.plugins.backends import cluster_of
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.config.schema import Config
    from slime_core.report import Report, RunDir

MEMORY = "SLIME_RESTART"
"""Variable with the descriptor of what crosses."""
ON_RAY = 3  # restarts of a run on a Ray cluster whose config says nothing
FIRST, LONGEST = 2.0, 60.0  # seconds of the first pause, which doubles, and of the longest
LEAVE = 30.0  # seconds in which a run that hangs must have been left in order
LATER = ("CFG17", "CFG18")
"""No cluster, or no room in it: after a machine was lost it may have both again."""


@dataclass(slots=True, kw_only=True)
class Death:
    """How one process of the run ended: its error, and the version that it had reached."""

    version: int
    kind: str
    error: dict[str, Any]

    @classmethod
    def of(cls, error: SlimeError, version: int) -> Death:
        """From the error itself."""
        return cls(version=version, kind=type(error).__name__, error=error.as_dict())

    @property
    def summary(self) -> str:
        """One line."""
        return f"{self.error['code']} {self.error['what']} (at version {self.version})"


@dataclass(slots=True, kw_only=True)
class Past:
    """What a restarted process knows of those before it; nothing in one that a person started."""

    deaths: list[Death] = field(default_factory=list)
    allowed: int = 0
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Which restart this is; 0: none."""
        return len(self.deaths)

    def tell(self, report: Report, version: int) -> None:
        """Say in the run's log and figures that it was restarted."""
        if self.deaths:
            report.restarted(version, self.number, self.allowed, self.deaths[-1].summary)


def past() -> Past:
    """Data left by the process before this one; read once."""
    word = os.environ.pop(MEMORY, "")
    if not word.isdigit():
        return Past()
    with os.fdopen(int(word), encoding="utf-8") as file:
        data = json.load(file)
    return Past(**{**data, "deaths": [Death(**death) for death in data["deaths"]]})


def allowed(config: Config) -> int:
    """How many restarts a run may have."""
    if config.cluster.max_restarts >= 0:
        return config.cluster.max_restarts
    return ON_RAY if cluster_of(config).remote else 0


def refusal(deaths: Sequence[Death], limit: int) -> str:
    """Why a run that ended in these ways is not restarted; empty where it is.

    The version at which it ended must be higher than the time before, unless it found no cluster to run on.
    """
    if len(deaths) > limit:
        return f"{limit} restart(s) were allowed (cluster.max_restarts)"
    if len(deaths) > 1 and deaths[-1].version <= deaths[-2].version and deaths[-1].error["code"] not in LATER:
        return f"step {deaths[-1].version + 1} was not finished after the restart either: it would end so again"
    return ""


def given_up(deaths: Sequence[Death], reason: str) -> SlimeError:
    """The first cause, and the last one."""
    first = deaths[0]
    error = remade(first.kind, first.error, SlimeError)
    if len(deaths) > 1:
        others = [f"restart {number} ended with {death.summary}" for number, death in enumerate(deaths) if number]
        last = f"{deaths[-1].error['where']}: {deaths[-1].error['why']}"
        error.why = "\n".join(filter(None, [error.why, f"at version {first.version}", *others, last, reason]))
    return error


class Restarts:
    """Wrap a run: an error that a restart may fix restarts it instead of ending the command.

    Example:
        with Restarts(session, past, settings, command):
            run.fresh(None)
    """

    def __init__(self, session: CliSession, before: Past, settings: Settings, command: RestartCommand) -> None:
        self._session, self._past, self._settings, self._command = session, before, settings, command
        self._ending = threading.Event()  # the run is over, for better or worse

    def __enter__(self) -> None:
        self._session.on_hang = self.insist

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run_dir = self._session.run_dir
        self._ending.set()
        if isinstance(error, SlimeError) and not isinstance(error, Preempted) and run_dir is not None:
            self.after(error, run_dir)

    def insist(self, error: SlimeError) -> None:
        """See that a run that hangs ends: what hangs may be a thread of this process, for which leaving would wait."""
        threading.Thread(target=self._insist, args=(error,), daemon=True, name="slime-insist").start()

    def _insist(self, error: SlimeError) -> None:
        run_dir = self._session.run_dir
        if run_dir is not None and not self._ending.wait(LEAVE):
            end(run_dir, "failed", {"error": error.code})
            try:
                self.after(error, run_dir)
            except SlimeError as other:
                error = other
        else:
            time.sleep(LEAVE + LONGEST)
        code = report_failure(error, self._session)
        kill_descendants()
        END_NOW(code)

    def after(self, error: SlimeError, run_dir: RunDir) -> None:
        """Restart the run; where that is of no use, return or raise the command's end.

        Raises:
            SlimeError: the first error of a run that was restarted in vain.
            Preempted: a signal came before the restart.
        """
        version = run_dir.read_info().get("version") or 0
        deaths = [*self._past.deaths, Death.of(error, version)]
        limit = allowed(self._settings.config)
        again = mendable(error) or (error.code in LATER and self._past.number > 0)
        reason = refusal(deaths, limit) if again else "no process was lost: it would end so again"
        if reason:
            if self._past.deaths and (again or version <= self._past.deaths[-1].version):
                raise given_up(deaths, reason) from error
            return
        self._say(error, run_dir, len(deaths), limit)
        self._settings.plugins.close()
        try:
            time.sleep(pause(len(deaths)))
        except Terminated:
            fix = f"slime run --resume {run_dir.path}"
            raise Preempted("interrupted before resuming (SIGTERM)", why="nothing is lost", fix=fix) from None
        carried = Past(deaths=deaths, allowed=limit, secrets=unsaved(self._settings))
        self._command.become(run_dir, carried, version)

    def _say(self, error: SlimeError, run_dir: RunDir, number: int, limit: int) -> None:
        from slime_core.config.dump import scrub

        secrets = self._session.secrets
        say(scrub(placed(error, run_dir).render(), secrets))
        with suppress(OSError):
            trace = scrub("".join(traceback.format_exception(error)), secrets)
            say(f"  full traceback: {save_error(run_dir, 'traceback', trace)}")
        say(f"RESTART {number} of {limit} in {pause(number):g} s: {run_dir.path}")


def mendable(error: SlimeError) -> bool:
    """Whether what failed was lost, rather than wrong: the same work may succeed."""
    return error.lost or isinstance(error, Hung)


def pause(number: int) -> float:
    """Seconds before the restart of this number."""
    return float(min(LONGEST, FIRST * 2 ** (number - 1)))


def unsaved(settings: Settings) -> dict[str, str]:
    """Values of the keys that ``config.toml`` does not have because they are secret."""
    from slime_core.config.dump import REDACTED, redacted, texts_in

    config = settings.config
    hidden = dict(texts_in(redacted(config, settings.loaded.secrets).model_dump(mode="json")))
    plain = dict(texts_in(config.model_dump(mode="json")))
    return {key: plain[key] for key, text in hidden.items() if REDACTED in text and key in plain}


class RestartCommand:
    """The command line of this process, and what it becomes: `slime run --resume`, in the folder and environment here.

    Make it before anything changes either.
    """

    def __init__(
        self, session: CliSession, *, forced: Sequence[str], stop_after: float | None, verify_step: int, as_json: bool
    ) -> None:
        self._forced, self._stop_after, self._verify_step = tuple(forced), stop_after, verify_step
        self._as_json, self._session = as_json, session
        self._environment, self._folder = dict(os.environ), Path.cwd()

    def words(self, run_dir: RunDir, version: int) -> list[str]:
        """Words after `slime`; a step that was verified before ``version`` is not verified again."""
        words = ["run", "--resume", str(run_dir.path)]
        words += [word for key in self._forced for word in ("--force-key", key)]
        if self._stop_after is not None:
            words += ["--stop-after", str(self._stop_after)]  # counts from the start of the process, which stays
        if self._verify_step > version:
            words += ["--verify-step", str(self._verify_step)]
        return words + ["--json"] * self._as_json + ["--verbose"] * self._session.verbose

    def become(self, run_dir: RunDir, carried: Past, version: int) -> NoReturn:
        """End every child, and run the command in place of this program."""
        kill_descendants()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        memory = os.memfd_create("slime-restart", 0)
        with os.fdopen(os.dup(memory), "w", encoding="utf-8") as file:
            json.dump(asdict(carried), file)
        os.lseek(memory, 0, os.SEEK_SET)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the folder's own is closed by now
                if int(name) > 2:
                    os.set_inheritable(int(name), int(name) == memory)
        os.chdir(self._folder)
        program = [*_program(self._session.argv), *self.words(run_dir, version)]
        os.execve(program[0], program, {**self._environment, MEMORY: str(memory)})


def _program(argv: Sequence[str]) -> list[str]:
    """This interpreter with its options and script, as they were given; or with the command's module."""
    argv_full: list[Any] = list(sys.orig_argv)
    head = argv_full[: len(argv_full) - len(argv)]
    if argv and len(head) > 1 and argv_full[len(head) :] == list(argv):
        return [sys.executable, *head[1:]]
    return [sys.executable, "-P", "-m", "slime_cli.main"]
