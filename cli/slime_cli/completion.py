"""`slime completion SHELL`: the script that makes a shell complete commands, keys, plugins and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

EPILOG = """\b
Example: slime completion bash > ~/.slime-completion && echo '. ~/.slime-completion' >> ~/.bashrc
  zsh    slime completion zsh > ~/.slime-completion && echo '. ~/.slime-completion' >> ~/.zshrc
  fish   slime completion fish > ~/.config/fish/completions/slime.fish"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell: commands, flags, keys of the config, plugins and files."""
    from slime_cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "slime", "_SLIME_COMPLETE").source())
