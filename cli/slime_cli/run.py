"""`slime run`: train a recipe's model into a run directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession, Terminated, ended_by_code, exit_refused, loop_kept
from slime_cli.libraries import quiet_libraries, warnings_noted
from slime_cli.signals import Signals, drive as drive, terminable as terminable
from slime_cli.starts import begin, end
from slime_cli.stop_after import REASON, Seconds, StopAfter, process_age
from slime_cli.summary import StepRange, say_answer, say_end
from slime_cli.watched import watched
from slime_cli.words import KEY_WORDS, PASSING, KeyCommand
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.resume import ResumedRun
    from slime_cli.settings import Settings
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.preemption import StopSignal
    from slime_core.report import Report, RunDir

EPILOG = """\b
Every key of the config is a flag, and section.key=VALUE works too:
  slime run --plugin rm_math --num-rollout 20 --seed 7
  slime run recipe.toml train.lr=1e-6 --no-colocate plugin.rm_math.digits=3
  slime run --hf-checkpoint ./model --prompt-data my.jsonl --custom-rm-path my_reward.py:reward
  slime run --resume runs/demo-0 --num-rollout 200
All keys: slime config keys.   --num-rollout counts in the last stage.
Ctrl-C or SIGTERM: checkpoint and end in order; twice: at once."""


@click.command("run", cls=KeyCommand, context_settings=PASSING, epilog=EPILOG, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[RECIPE] [--KEY VALUE]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run lies; default runs/NAME-N.")
@click.option(
    "--resume", metavar="RUN_DIR|auto", help="Go on with a run; auto: its newest unfinished one, or a new one."
)
@click.option("--force-key", "forced", multiple=True, metavar="KEY", help="Resume though KEY changed; repeatable.")
@click.option("--stop-after", type=Seconds(), metavar="TIME", help="Checkpoint and end within 40m, 90s, 1h30m.")
@click.option("--detach", is_flag=True, help="Run on the Ray cluster, and return; `slime attach` follows.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
@click.option("--verify-step", type=click.IntRange(min=1), metavar="N", help="Recompute step N slowly; compare.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.pass_obj
def command(
    session: CliSession,
    words: tuple[str, ...],
    run_dir: Path | None,
    resume: str | None,
    forced: tuple[str, ...],
    stop_after: float | None,
    detach: bool,
    dry_run: bool,
    verify_step: int | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Train. RECIPE is a TOML file, or PLUGIN/NAME; without one, the default recipe of the named plugin."""
    session.verbose = session.verbose or verbose
    limit = None if stop_after is None else stop_after - process_age()
    from slime_cli.restarts import RestartCommand, Restarts, past
    from slime_cli.settings import plans

    check_flags(resume, forced, dry_run)
    before = session.past = past()
    again = RestartCommand(
        session, forced=forced, stop_after=stop_after, verify_step=verify_step or 0, as_json=as_json
    )
    with Signals() as signals:
        settings, old = settings_of(words, run_dir, resume, session)
        try:
            check_step(settings, verify_step or 0)
            if dry_run:
                from slime_cli.dry_run import make_plan, print_plan

                plan = asyncio.run(make_plan(settings, run_dir))
                click.echo(json.dumps(plan, indent=1, sort_keys=True, default=str)) if as_json else print_plan(plan)
                return
            plans(settings)
            if detach:
                from slime_cli.submit import Detach, submit

                order = Detach(
                    session=session,
                    words=words,
                    run_dir=run_dir,
                    resume=resume,
                    old=old,
                    forced=forced,
                    stop_after=stop_after,
                    verify_step=verify_step or 0,
                )
                return say_answer(submit(order, settings), as_json)
            run = Run(settings=settings, session=session, signals=signals, limit=limit, verify_step=verify_step or 0)
            with Restarts(session, before, settings, again):
                answer = run.fresh(run_dir) if old is None else run.again(old, forced)
        finally:
            settings.plugins.close()
    say_answer(answer, as_json)


def check_flags(resume: str | None, forced: tuple[str, ...], dry_run: bool) -> None:
    """Refuse options that mean nothing together.

    Raises:
        ConfigError: CFG00.
    """
    from slime_core.errors import ConfigError

    if forced and not resume:
        raise ConfigError(
            "--force-key lets a changed key pass at a resume, and nothing is resumed",
            code="CFG00",
            where="command line: --force-key",
            fix="--resume RUN_DIR --force-key KEY",
        )
    if resume and dry_run:
        raise ConfigError(
            "--dry-run plans a new run, --resume continues an existing one",
            code="CFG00",
            where="command line: --dry-run --resume",
            fix=f"slime show {resume} says where a resume would start",
        )


def settings_of(
    words: tuple[str, ...], run_dir: Path | None, resume: str | None, session: CliSession
) -> tuple[Settings, Path | None]:
    """The config and plugins of a command line, and the run that it resumes, if any."""
    if resume is not None:
        from slime_cli.resume import choose

        return choose(resume, run_dir, words, session)
    from slime_cli.settings import load_settings

    return load_settings(words, session), None


def check_step(settings: Settings, number: int, done: int = 0) -> None:
    """Refuse to verify a step that the run does not have, or no longer makes.

    Raises:
        ConfigError: CFG04.
    """
    from slime_core.config.load import stages
    from slime_core.errors import ConfigError

    if number and settings.config.rollout.debug_rollout_only:
        raise ConfigError(
            "--verify-step with debug_rollout_only",
            code="CFG04",
            where="--verify-step",
            why="no step trains, so there is no gradient to verify",
            fix="leave one of them out",
        )
    steps = sum(stage.rollout.num_rollout for stage in stages(settings.config))
    if number > steps:
        raise ConfigError(
            f"--verify-step {number} is after the last of the run's {steps} steps",
            code="CFG04",
            where="--verify-step",
            fix=f"name a step from {done + 1} to {steps}",
        )
    if 0 < number <= done:
        raise ConfigError(
            f"--verify-step {number}: {done} steps are done",
            code="CFG04",
            where="--verify-step",
            fix=f"slime replay RUN --step {number}" if number else "",
        )


class Run:
    """One `slime run`: its settings, and what may end it."""

    def __init__(
        self,
        *,
        settings: Settings,
        session: CliSession,
        signals: Signals,
        limit: float | None = None,
        verify_step: int = 0,
    ) -> None:
        from slime_core.clusters.machine import preload, resolve_machine
        from slime_core.notices import notices_to

        self.settings, self.session, self.signals, self.verify_step = settings, session, signals, verify_step
        self._notices: list[str] = []  # said once the run directory is named
        with notices_to(self._notices.append):
            self.config = resolve_machine(settings.config)
        preload(self.config)
        self._began, self._limit = time.monotonic(), limit

    def fresh(self, at: Path | None) -> dict[str, Any]:
        """Run every stage in a new run directory; return its path."""
        from slime_cli.preflight import check_inputs, check_kept
        from slime_core.report import RunDir

        check_kept(at)
        check_inputs(self.settings, self.config)
        with RunDir.create(self.config.name, at=at) as run_dir:
            return self.train(run_dir, None)

    def again(self, path: Path, forced: tuple[str, ...]) -> dict[str, Any]:
        """Go on with the run in ``path``.

        Raises:
            ConfigError: CFG04 the step to verify is done, CFG13, CFG14 and CFG16 as `resume.reopen`.
        """
        from slime_cli.resume import already_finished, reopen
        from slime_core.errors import Preempted

        if (answer := already_finished(path, self.settings)) is not None:
            return answer
        try:
            resumed = reopen(path, self.settings, self.config, forced)
        except Terminated:
            message = "interrupted before resuming (SIGTERM)"
            raise Preempted(message, why="nothing is lost", fix=f"slime run --resume {path}") from None
        with resumed.run_dir:
            check_step(self.settings, self.verify_step, done=resumed.version)
            return self.train(resumed.run_dir, resumed)

    def train(self, run_dir: RunDir, resumed: ResumedRun | None) -> dict[str, Any]:
        """The loop, between the first and the last line of talk."""
        from slime_cli.preflight import check_machine
        from slime_core import loop
        from slime_core.errors import Preempted
        from slime_core.preemption import StopSignal

        quiet_libraries()
        self.session.run_dir = run_dir
        say(f"run {run_dir.path}")
        stop = StopSignal()
        clock = StopAfter(self._limit, stop, began=self._began) if self._limit is not None else None
        with (
            self.signals.requesting(stop, lambda status: end(run_dir, status, {})),
            watched(run_dir.path, self.config.cluster.hang_timeout),
            reporting(self.settings, run_dir, self.config, self.session, resumed, clock) as (report, first_rewards),
        ):
            for text in self._notices:
                report.note(text)
            check_machine(self.config, report.note)
            keep_plan(self.config, self.settings.plugins, run_dir.path)
            started = time.monotonic()
            work = loop.run(
                self.config,
                self.settings.plugins,
                report,
                verify_step=self.verify_step,
                checkpoint=resumed.checkpoint if resumed else None,
                stop=stop,
                exact=resumed.exact if resumed else True,
            )
            try:
                with exit_refused(), loop_kept(self.settings.plugins):
                    version = asyncio.run(self.signals.drive(_timed(work, clock)))
            except Preempted as error:
                self.session.interrupted = stop.reason == "SIGINT"
                raise _with_resume_command(error, stop, run_dir) from None
            except SystemExit as error:
                raise ended_by_code(error) from error
            seconds = time.monotonic() - started
        end(run_dir, "finished", {"version": version, "seconds": round(seconds, 3)})
        final = run_dir.final if run_dir.final.exists() else None
        say_end(run_dir, version, seconds, first_rewards, final)
        return {
            "run_dir": str(run_dir.path),
            "version": version,
            "final": str(final) if final else None,
            "metrics": first_rewards.last.metrics if first_rewards.last else {},
            "seconds": round(seconds, 3),
        }


def keep_plan(config: Config, plugins: Plugins, path: Path) -> None:
    """Write the run's plan into its directory, beside what starts meanwhile; a resumed run has one."""
    import threading

    from slime_cli.plan import PLAN, write_plan

    if not (path / PLAN).exists():
        threading.Thread(target=write_plan, args=(config, plugins, path / PLAN), name="slime-plan").start()


async def _timed(work: Any, clock: StopAfter | None) -> int:
    if clock is not None:
        clock.arm()
    version: int = await work
    return version


def _with_resume_command(error: Exception, stop: StopSignal, run_dir: RunDir) -> Exception:
    """The error with the command that resumes; the loop knows no command line."""
    from slime_core.checkpoint.manifest import names_in
    from slime_core.errors import Preempted

    message = getattr(error, "what", str(error))
    saved = next((version for version, _ in names_in(run_dir.checkpoints)), None)
    begin = f"a resume starts from checkpoint {saved}" if saved is not None else "a resume starts from the ledger"
    reason = f"{'the time is up; ' if stop.reason == REASON else ''}nothing is lost, {begin}"
    return Preempted(message, where=str(run_dir.path), why=reason, fix=f"slime run --resume {run_dir.path}")


@contextmanager
def reporting(
    settings: Settings,
    run_dir: RunDir,
    config: Any,
    session: CliSession,
    resumed: ResumedRun | None = None,
    clock: StopAfter | None = None,
) -> Iterator[tuple[Report, StepRange]]:
    """A started report, which is finished however the block ends; ``run.json`` says how it ended."""
    from slime_cli.live import make_live
    from slime_cli.resume import kind_of
    from slime_core.context import Context
    from slime_core.report import Report

    summary = StepRange()
    sinks: list[Any] = [summary, *([clock] if clock else [])]
    sinks += settings.plugins.sinks(Context(config=config, run_dir=run_dir.path))
    report = Report(run_dir, config, sinks, make_live(sys.stderr), secrets=settings.loaded.secrets)
    version, kind = resumed.version if resumed else 0, kind_of(config, settings.plugins)
    begin(run_dir, version, about(settings, config, session), kind=kind)
    try:
        report.start()
        report.on_hang = session.on_hang
        if session.past is not None:
            session.past.tell(report, resumed.version if resumed else 0)
        with warnings_noted(report):
            yield report, summary
    except BaseException as error:
        reached = summary.last.version if summary.last else resumed.version if resumed else 0
        code = getattr(error, "exit_code", 1)
        facts = {"error": getattr(error, "code", type(error).__name__), "exit_code": code, "version": reached}
        with contextlib.suppress(OSError):  # a full disk: the error itself says so
            end(run_dir, ended(error), facts)
        raise
    finally:
        report.finish()


def ended(error: BaseException) -> str:
    """What ``run.json`` says of a run that this stopped."""
    from slime_core.errors import Preempted

    if isinstance(error, Preempted):
        return "stopped"
    if isinstance(error, Terminated):
        return "terminated"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"


def about(settings: Settings, config: Any, session: CliSession) -> dict[str, Any]:
    """What ``run.json`` says at the start."""
    import os
    import platform
    import socket

    from slime_cli.resume import plugin_versions, references
    from slime_core import __version__
    from slime_core.clusters.detached import DETACHED
    from slime_core.clusters.machine import machine_facts
    from slime_core.config.dump import fingerprint, redact, redacted

    recipe, plugins, secrets = settings.loaded.recipe, settings.plugins, settings.loaded.secrets
    config_references = references(recipe, redacted(config, secrets).model_dump(mode="json"))
    return {
        "error": None,
        "exit_code": None,
        "detached": DETACHED in os.environ,
        "deaths": redact([asdict(death) for death in session.past.deaths] if session.past else [], secrets),
        "command": redact(["slime", *session.argv], secrets),
        "cwd": str(Path.cwd()),
        "recipe": str(recipe) if recipe else None,
        "config_fingerprint": fingerprint(settings.config),
        "plugins": plugin_versions(plugins),
        "plugins_fingerprint": plugins.fingerprint(),
        "sources": plugins.sources(),
        "routing": plugins.routing(),
        "machine": machine_facts(config),
        **({"references": config_references} if config_references else {}),
        "slime": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
