"""`slime run`: a recipe and flags in; a trained model in a run directory out."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slime_cli.failure import Session, Terminated, say
from slime_cli.words import PASSING

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.report import Report, RunDir
    from slime_core.types import StepReport

T = TypeVar("T")

EPILOG = """\b
Every key of the config is a flag, and section.key=VALUE works too:
  slime run --plugin rm_math --num-rollout 20 --seed 7
  slime run recipe.toml train.lr=1e-6 --no-colocate plugin.rm_math.digits=3
  slime run --hf-checkpoint ./model --prompt-data my.jsonl --custom-rm-path my_reward.py:reward
All keys: slime config keys.   --num-rollout counts in the last stage."""


@click.command("run", context_settings=PASSING, epilog=EPILOG, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [--KEY VALUE]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run lies; default runs/NAME-N.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
@click.option("--verify-step", type=click.IntRange(min=1), metavar="N", help="Recompute step N slowly; compare.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.pass_obj
def command(
    session: Session,
    words: tuple[str, ...],
    run_dir: Path | None,
    dry_run: bool,
    verify_step: int | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Train. RECIPE is a TOML file, or PLUGIN/NAME; without one, the default recipe of the named plugin."""
    from slime_cli.settings import load_settings

    session.verbose = session.verbose or verbose
    with terminable():
        settings = load_settings(words, session)
        try:
            check_step(settings, verify_step or 0)
            if dry_run:
                from slime_cli.plan import make_plan, print_plan

                plan = asyncio.run(make_plan(settings, run_dir))
                click.echo(json.dumps(plan, indent=1, sort_keys=True, default=str)) if as_json else print_plan(plan)
            else:
                answer = train(settings, session, run_dir, verify_step or 0)
                click.echo(json.dumps(answer, indent=1, sort_keys=True) if as_json else answer["run_dir"])
        finally:
            settings.plugins.close()


def check_step(settings: Settings, number: int) -> None:
    """Refuse to verify a step that the run does not have.

    Raises:
        ConfigError: CFG04.
    """
    from slime_core.config.load import stages
    from slime_core.errors import ConfigError

    steps = sum(stage.rollout.num_rollout for stage in stages(settings.config))
    if number > steps:
        raise ConfigError(
            f"--verify-step {number} is after the last of the run's {steps} steps",
            code="CFG04",
            where="--verify-step",
            fix=f"name a step from 1 to {steps}",
        )


def train(settings: Settings, session: Session, at: Path | None, verify_step: int = 0) -> dict[str, Any]:
    """Run every stage in a run directory of its own; the answer names it."""
    from slime_core import loop
    from slime_core.clusters.machine import resolve_machine
    from slime_core.report import RunDir

    quiet_libraries()
    config = resolve_machine(settings.config)
    with RunDir.create(config.name, at=at) as run_dir:
        session.run_dir = run_dir
        say(f"run {run_dir.path}")
        with reporting(settings, run_dir, config, session) as (report, seen):
            started = time.monotonic()
            version = asyncio.run(drive(loop.run(config, settings.plugins, report, verify_step=verify_step)))
            seconds = time.monotonic() - started
        run_dir.write_info({"status": "finished", "version": version, "seconds": round(seconds, 3)})
        final = run_dir.final if run_dir.final.exists() else None
        _say_end(run_dir, version, seconds, seen, final)
    return {
        "run_dir": str(run_dir.path),
        "version": version,
        "final": str(final) if final else None,
        "metrics": seen.last.metrics if seen.last else {},
        "seconds": round(seconds, 3),
    }


def quiet_libraries() -> None:
    """Our line is the only one that moves: no progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()


class Seen:
    """Remembers the first and the last step, for the summary."""

    def __init__(self) -> None:
        self.first: StepReport | None = None
        self.last: StepReport | None = None

    def start(self, run_dir: Path, config: Any) -> None:
        """Nothing to open."""

    def write(self, report: StepReport) -> None:
        """Keep it, unless it is an evaluation's."""
        if any(key.startswith("eval/") for key in report.metrics):
            return
        if self.first is None or self.first.stage != report.stage:
            self.first = report
        self.last = report

    def close(self) -> None:
        """Nothing to close."""


@contextmanager
def reporting(settings: Settings, run_dir: RunDir, config: Any, session: Session) -> Iterator[tuple[Report, Seen]]:
    """A started report, which is finished however the block ends; ``run.json`` says how it ended."""
    from slime_core.context import Context
    from slime_core.report import Report
    from slime_core.report.live import make_live
    from slime_core.report.sinks import WandbSink

    seen = Seen()
    sinks: list[Any] = [seen]
    if config.report.use_wandb:
        sinks.append(WandbSink(config.report.wandb_project, config.report.wandb_group))
    sinks += settings.plugins.sinks(Context(config=config, run_dir=run_dir.path))
    report = Report(run_dir, config, sinks, make_live(sys.stderr), secrets=settings.loaded.secrets)
    run_dir.write_info(about(settings, session))
    try:
        report.start()
        yield report, seen
    except BaseException as error:
        run_dir.write_info({"status": ended(error), "error": getattr(error, "code", type(error).__name__)})
        raise
    finally:
        report.finish()


def ended(error: BaseException) -> str:
    """What ``run.json`` says of a run that this stopped."""
    if isinstance(error, Terminated):
        return "terminated"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"


def about(settings: Settings, session: Session) -> dict[str, Any]:
    """What ``run.json`` says at the start."""
    import os
    import platform
    import socket

    from slime_core import __version__
    from slime_core.config.dump import fingerprint
    from slime_core.config.redact import redact
    from slime_core.plugins import find

    recipe = settings.loaded.recipe
    return {
        "status": "running",
        "command": redact(["slime", *session.argv], settings.loaded.secrets),
        "cwd": str(Path.cwd()),
        "recipe": str(recipe) if recipe else None,
        "config_fingerprint": fingerprint(settings.config),
        "plugins": {name: find(name).requirement for name in settings.plugins.names},
        "plugins_fingerprint": settings.plugins.fingerprint(),
        "routing": settings.plugins.routing(),
        "slime": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


async def drive(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; SIGTERM cancels it, so that every block of it is left in order.

    Raises:
        Terminated: after SIGTERM.
    """
    task = asyncio.ensure_future(work)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(signal.SIGTERM)
        task.cancel()

    loop = asyncio.get_running_loop()
    handles = _can_handle(lambda: loop.add_signal_handler(signal.SIGTERM, stop))
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise Terminated from None
        raise
    finally:
        if handles:
            loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside this block (in the main thread)."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    handles = _can_handle(lambda: signal.signal(signal.SIGTERM, stop))
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)


def _can_handle(install: Callable[[], Any]) -> bool:
    try:
        install()
    except (ValueError, RuntimeError):  # not the main thread
        return False
    return True


def _say_end(run_dir: RunDir, version: int, seconds: float, seen: Seen, final: Path | None) -> None:
    from slime_core.report.live import duration

    line = f"done: {version} steps in {duration(seconds)}"
    if seen.first is not None and seen.last is not None and "reward/mean" in seen.last.metrics:
        first = seen.first.metrics.get("reward/mean")
        if first is not None and seen.last.step > 0:
            line += f", {seen.last.stage} reward {first:.3f} -> {seen.last.metrics['reward/mean']:.3f}"
    say(line)
    if final is not None:
        say(f"model {final}")
    say(f"look  slime show {run_dir.path}")
