"""How a command fails: a message on stderr and an exit code. No bare traceback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_cli.starts import save_error
from slime_core.errors import END_NOW, ConfigError, PluginError, Preempted, SlimeError, remade, shortened, text_of
from slime_core.report.text import safe_text, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slime_core.plugins import Plugins
    from slime_core.report.rundir import RunDir

INTERRUPTED, TERMINATED = 130, 143
TRACE = 200_000  # characters of a traceback
HELP_ASKED: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""A group of commands without one of them; click before 8.2 prints the help by itself."""


class Terminated(BaseException):
    """SIGTERM before there is anything to keep: leave every block in order, then exit with 143."""


@dataclass(slots=True)
class CliSession:
    """What one call of `slime` knows about itself."""

    argv: list[str] = field(default_factory=list)
    verbose: bool = False
    as_json: bool = False
    interrupted: bool = False  # Ctrl-C requested the stop
    run_dir: RunDir | None = None  # once a run has one, tracebacks go there
    secrets: frozenset[str] = frozenset()
    past: Any = None  # `restarts.Past`, in a `slime run`
    on_hang: Callable[[SlimeError], None] | None = None  # called when a part hangs, before the run ends


def report_failure(error: BaseException, session: CliSession) -> int:
    """Say what happened and choose the exit code."""
    if isinstance(error, (click.exceptions.Exit, SystemExit)):
        code = error.exit_code if isinstance(error, click.exceptions.Exit) else error.code
        return code if isinstance(code, int) else int(code is not None)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        say(f"interrupted{_saved_notice(session)}")
        return INTERRUPTED
    if isinstance(error, Terminated):
        say(f"terminated{_saved_notice(session)}")
        return TERMINATED
    if isinstance(error, HELP_ASKED):
        say(error.format_message())
        return error.exit_code
    if isinstance(error, click.ClickException):
        return _report(_usage(error), error, session)
    if isinstance(error, Preempted):
        return _stopped(error, session)
    if isinstance(error, SlimeError):
        return _report(placed(error, session.run_dir), error, session)
    return _report(_as_slime_error(error), error, session, always_saved=True)


def ended_by_code(error: SystemExit) -> SlimeError:
    """PLG62 for code that ends the process outside of a hook's call: a run that is not done may not exit with 0."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return PluginError(
        f"code that is not the run's own tried to end the process: SystemExit: {error}",
        code="PLG62",
        where=f"{frame.filename}:{frame.lineno} in {frame.name}",
        why="the run was not done",
        fix="correct the code there, then slime run --resume RUN_DIR",
    )


@contextlib.contextmanager
def exit_refused() -> Iterator[None]:
    """`os._exit` raises SystemExit inside the block: a run that is not done may not end as if it were.

    Children that are forked have the system's own.
    """

    def refuse(status: int) -> None:
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        _allow_exit()


def _allow_exit() -> None:
    os._exit = END_NOW


os.register_at_fork(after_in_child=_allow_exit)


@contextlib.contextmanager
def loop_kept(plugins: Plugins | None = None) -> Iterator[None]:
    """The block is the run's event loop, and ``plugins`` know which hook was called last.

    Raises:
        PluginError: PLG62 code of a plugin or a user stopped it, or cancelled the run's own task.
    """
    try:
        yield
    except (asyncio.CancelledError, RuntimeError) as error:
        stopped = str(error) == "Event loop stopped before Future completed."
        if not (stopped or isinstance(error, asyncio.CancelledError)):
            raise
        raise PluginError(
            f"code that is not the run's own {'stopped its event loop' if stopped else 'cancelled its tasks'}",
            code="PLG62",
            where=f"the last hook that began is {plugins.last_call}" if plugins and plugins.last_call else "",
            why="the run was not done",
            fix="correct the code there: return, or cancel the tasks that it started; then slime run --resume RUN_DIR",
        ) from error


def placed(error: SlimeError, run_dir: RunDir | None) -> SlimeError:
    """Put the run directory in place of RUN_DIR, so that the fix can be typed as printed."""
    if run_dir is None or "RUN_DIR" not in error.fix:
        return error
    path = shlex.quote(str(run_dir.path))
    return remade(type(error).__name__, {**error.as_dict(), "fix": error.fix.replace("RUN_DIR", path)}, type(error))


def coloured() -> bool:
    """Whether stderr may be painted: a terminal, and NO_COLOR is not set."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _report(shown: SlimeError, error: BaseException, session: CliSession, *, always_saved: bool = False) -> int:
    from slime_core.config.dump import scrub

    trace = scrub(shortened("".join(traceback.format_exception(error)), TRACE), session.secrets)
    text = safe_text(scrub(shown.render(), session.secrets))
    if coloured():
        text = text.replace("error", click.style("error", fg="red", bold=True), 1)
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=True)
    if session.verbose:
        say(trace)
    elif always_saved or session.run_dir is not None:
        path = _save(trace, session)
        say(f"  full traceback: {path}" if path else trace)
    if session.run_dir is not None:
        say(f"run {session.run_dir.path}")
    if session.as_json:
        body = {**{k: scrub(v, session.secrets) for k, v in shown.as_dict().items()}, "exit_code": shown.exit_code}
        with contextlib.suppress(OSError, ValueError):
            click.echo(json.dumps({"error": body}, indent=1, sort_keys=True))
    return shown.exit_code


def _stopped(error: Preempted, session: CliSession) -> int:
    """Not a failure: the step that was reached, and how to resume."""
    code = INTERRUPTED if session.interrupted else error.exit_code
    say(f"{error.what}; {error.why}" if error.why else error.what)
    for line in error.fix.splitlines():
        say(f"resume  {line}")
    if session.as_json:
        with contextlib.suppress(OSError, ValueError):
            click.echo(json.dumps({"error": {**error.as_dict(), "exit_code": code}}, indent=1, sort_keys=True))
    return code


def _usage(error: click.ClickException) -> SlimeError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "slime"
    return ConfigError(error.format_message(), code="CFG00", where=f"command line: {path}", fix=f"{path} --help")


def _as_slime_error(error: BaseException) -> SlimeError:
    from slime_core.memory import is_out_of_memory, shortage

    if is_out_of_memory(error):
        return shortage(error)
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{frame[0].filename}:{frame[0].lineno}" if frame else ""
    return SlimeError(
        f"slime failed in a way it should not: {text_of(error)}",
        where=where,
        fix="run again with -v, and send the traceback with a report",
    )


def _save(trace: str, session: CliSession) -> Path | None:
    try:
        if session.run_dir is not None:
            return save_error(session.run_dir, "traceback", trace)
        handle, name = tempfile.mkstemp(prefix="slime-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(trace)
        return Path(name)
    except OSError:
        return None


def _saved_notice(session: CliSession) -> str:
    return f"; what was done is in {session.run_dir.path}" if session.run_dir is not None else ""
