"""`slime convert hf-to-dist` and `dist-to-hf`: model folders to torch_dist checkpoints and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_core.errors import ConfigError, SlimeError
from slime_core.report.text import say
from slime_core.weights.folder import resolve

if TYPE_CHECKING:
    from slime_convert.bridge import Bridge
    from slime_convert.folder_writing import Done, How

FOLDER = click.Path(path_type=Path)
PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    help="Whose bridges are asked; default: every installed plugin that has some.",
)


@click.command("hf-to-dist", epilog="Example: slime convert hf-to-dist ./model ./model_dist --verify")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@click.option(
    "--make-vocab-size-divisible-by",
    "divisible_by",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Rows of the vocabulary are filled up with zeros to a multiple of it.",
)
@click.option(
    "--tensor-model-parallel-size",
    "tp",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Times the number before, as Megatron counts; any layout loads DST all the same.",
)
@PLUGINS
def hf_to_dist_command(
    source: Path, target: Path, divisible_by: int, tp: int, plugins: Sequence[str]
) -> Callable[[How], Done]:
    """A Hugging Face folder SRC to a Megatron checkpoint DST (torch_dist), for any layout."""
    from slime_megatron.convert.conversion import hf_to_dist

    find = finder(plugins)
    return lambda how: hf_to_dist(resolve(source, "SRC"), target, find, how, divisible_by=divisible_by * tp)


@click.command("dist-to-hf", epilog="Example: slime convert dist-to-hf ./model_dist ./model_hf --verify")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@click.option(
    "--origin-hf-dir",
    "origin",
    help="Folder that config and tokenizer come from; default: the run's rollout.hf_checkpoint.",
)
@click.option(
    "--trust-metadata", "trusted", is_flag=True, help="Read the metadata of a checkpoint that slime did not write."
)
@PLUGINS
def dist_to_hf_command(
    source: Path, target: Path, origin: str | None, trusted: bool, plugins: Sequence[str]
) -> Callable[[How], Done]:
    """A Megatron checkpoint SRC (torch_dist of any layout, or a run directory) to a Hugging Face folder DST."""
    from slime_convert.source import origin_of, step_of
    from slime_megatron.convert.conversion import dist_to_hf
    from slime_megatron.convert.dist import find as folder_with_tensors

    find = finder(plugins)

    def work(how: How) -> Done:
        model = resolve(origin, "--origin-hf-dir") if origin else origin_of(step_of(folder_with_tensors(source)))
        return dist_to_hf(source, target, model, find, how, trusted=trusted)

    return work


def finder(names: Sequence[str]) -> Callable[[Any], Bridge]:
    """Asks the named plugins, or else every installed one that loads, for the bridge of a config.

    Raises:
        PluginError: a named plugin does not load.
    """
    from slime_convert.bridges import find_bridge
    from slime_core.plugins.discover import available
    from slime_core.plugins.load import load_plugin

    loaded, broken = [], []
    for name in dict.fromkeys(names or (plugin.name for plugin in available())):
        try:
            loaded.append(load_plugin(name))
        except SlimeError as error:
            if names:
                raise
            broken.append(f"not asked: {error.what}")

    def find(config: Any) -> Bridge:
        try:
            bridge: Bridge = find_bridge(loaded, config)
        except ConfigError:
            for line in broken:
                say(line)
            raise
        return bridge

    return find


WORDS = {"hf-to-dist": hf_to_dist_command, "dist-to-hf": dist_to_hf_command}
