"""The `slime` command. Sub-commands are modules that are imported when they are called.

    0 ok   1 failed   2 config or usage   3 data   4 plugin   5 engine   6 trainer   7 storage   8 sandbox
    9 hung   75 stopped in order, can be resumed   130 interrupted   143 terminated

stdout is the answer, stderr the talk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from slime_cli.failure import CliSession, report_failure

COMMANDS = {
    "run": "train: a recipe file, or a plugin's default recipe",
    "plan": "say what a run takes of its GPUs, before or after it",
    "attach": "follow a run, detached or not; without a name, list those on the Ray cluster",
    "stop": "end a run, in order or at once",
    "eval": "evaluate a model folder or a run's final model",
    "compare": "compare two evaluations, question by question",
    "show": "explain a run directory",
    "diff": "compare two runs, step by step",
    "replay": "make a recorded step again and compare",
    "config": "show, list and check keys",
    "data": "check data sets",
    "plugins": "list, show, check and make plugins",
    "doctor": "check this machine and installation",
    "explain": "say what an error code means",
    "completion": "print the shell's completion script",
}
"""Sub-command -> its line in `slime --help`; the module has the same name."""

PLUGIN_COMMANDS = {
    "report": "make one HTML page of runs",
    "watch": "show a run while it trains, in a browser or this terminal",
    "diagnose": "say why a run does not learn, and what to change",
    "convert": "turn checkpoints and GGUF files into model or adapter folders",
    "compat": "check scripts and functions of THUDM/slime",
}
"""Commands of slime's own plugins -> their lines in `slime --help`, where they are installed."""


EPILOG = """\b
Start: slime doctor, then slime run --plugin NAME. Every command has --help.
Exit codes: 0 ok, 1 failed, 2 config or usage, 3 data, 4 plugin, 5 engine, 6 trainer, 7 storage,
8 sandbox, 9 hung, 75 stopped with a checkpoint (slime run --resume), 130 interrupted, 143 terminated."""


class LazyGroup(click.Group):
    """Commands of ours by name, then commands of plugins (`slime NAME ...`), each imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Ours; plugins have `slime plugins list`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the one that was named."""
        if name in COMMANDS:
            module = import_module(f"slime_cli.{name}")
            command: click.Command = getattr(module, "command", None) or getattr(module, name)
            return command
        from slime_cli.plugin_commands import plugin_command

        return plugin_command(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The tables above; no plugin is imported."""
        from slime_core.plugins import available

        names = {info.name for info in available()}
        rows = [(name, text) for name, text in PLUGIN_COMMANDS.items() if name in names]
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])
        with formatter.section("Commands of plugins"):
            formatter.write_dl([*rows, ("NAME", "any other plugin's (slime plugins list)")])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands of ours and of plugins; nothing is imported."""
        from slime_core.plugins import available

        items = [] if incomplete and not incomplete[0].isalnum() else [*COMMANDS.items()]
        items += [(info.name, f"commands of {info.requirement}") for info in available()] if items else []
        return [CompletionItem(name, help=text) for name, text in items if name.startswith(incomplete)] or (
            click.Command.shell_complete(self, ctx, incomplete)
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the nearest name."""
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None:
            from slime_cli.plugin_commands import no_command

            raise no_command(name, list(COMMANDS))
        return name, command, args[1:]


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=lambda *a: _version(*a))
@click.pass_obj
def cli(session: CliSession, verbose: bool) -> None:
    """Post-train language models with reinforcement learning."""
    session.verbose = verbose or session.verbose


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from slime_core import __version__

        click.echo(f"slime-rl {__version__}")
        ctx.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's large tensors on huge pages: it asks before its first
    session = CliSession(argv=words, as_json="--json" in words)
    try:
        result: Any = cli.main(args=words, prog_name="slime", standalone_mode=False, obj=session)
    except BaseException as error:
        return report_failure(error, session)
    finally:
        let_go_of_streams()
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def let_go_of_streams() -> None:
    """Flush both: a closed one would make Python exit with its own code when it tries again."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
