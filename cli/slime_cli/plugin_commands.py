"""`slime NAME ...`: the click group of that plugin; no other plugin is imported."""

from __future__ import annotations

import click

from slime_core.errors import ConfigError, PluginError, SlimeError, nearest

MEANT = {
    "resume": "slime run --resume RUN_DIR",
    "train": "slime run RECIPE",
    "merge": "slime convert adapter-to-hf ADAPTER DST",
    "export": "slime convert --help",
}
"""Words of other programs -> the command here."""


def plugin_command(name: str) -> click.Command | None:
    """The command of an installed plugin, or None where no plugin has that name.

    Raises:
        PluginError: the plugin does not load, or has no command.
    """
    from slime_core.plugins import available, load_plugin

    if name not in {info.name for info in available()}:
        return None
    from slime_core.plugins.boundary import call_now

    loaded = load_plugin(name)
    declared = loaded.hooks.get("slime_command")
    command = call_now(declared, {}, about="its command") if declared is not None else None
    if command is None:
        raise PluginError(
            f"plugin '{name}' has no commands of its own",
            code="PLG53",
            where=str(loaded.provider),
            why="it does not implement slime_command",
            fix=f"slime run --plugin {name}   or   slime plugins show {name}",
        )
    if not isinstance(command, click.Command):
        raise PluginError(
            f"{name}.slime_command returned {command!r}, not a click command",
            code="PLG57",
            where=str(loaded.provider),
            fix="return a click.Group",
        )
    return command


def no_command(name: str, commands: list[str]) -> SlimeError:
    """The error for a word that is neither a command nor a plugin."""
    from slime_core.plugins import available
    from slime_core.plugins.backends import PACKAGES, install

    if package := PACKAGES.get(name):
        return ConfigError(
            f"slime {name}: {package} is not installed here",
            code="CFG01",
            where=f"command line: {name}",
            why=f"{package} provides it",
            fix=install(name),
        )
    plugins = [info.name for info in available()]
    near = nearest(name, [*commands, *plugins])
    guess = f"   slime {near.split(chr(39))[1]}" if near else ""
    return ConfigError(
        f"slime has no command '{name}'",
        code="CFG01",
        where=f"command line: {name}",
        why=f"commands: {', '.join(commands)}" + (f"; plugins: {', '.join(sorted(set(plugins)))}" if plugins else ""),
        fix="\n".join(filter(None, [MEANT.get(name) or near + guess, "all commands: slime --help"])),
    )
