"""`slime convert hf-to-dist`, `dist-to-hf` and `dist-to-adapter`: model folders to torch_dist checkpoints and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_convert.command import adapter_name, base_weights
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


def checkpoint_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """SRC, DST, and what a Megatron checkpoint may not say."""
    origin = (
        "Folder that config, tokenizer and the base of adapters come from; default: the run's rollout.hf_checkpoint."
    )
    trusted = "Read the metadata of a checkpoint that slime did not write."
    function = PLUGINS(function)
    function = click.option("--trust-metadata", "trusted", is_flag=True, help=trusted)(function)
    function = adapter_name(function)
    function = click.option("--origin-hf-dir", "origin", help=origin)(function)
    function = click.argument("target", metavar="DST", type=FOLDER)(function)
    return click.argument("source", metavar="SRC", type=FOLDER)(function)


@click.command("dist-to-hf", epilog="Example: slime convert dist-to-hf ./model_dist ./model_hf --verify")
@checkpoint_arguments
@base_weights
def dist_to_hf_command(
    source: Path,
    target: Path,
    origin: str | None,
    adapter: str,
    form: str | None,
    trusted: bool,
    plugins: Sequence[str],
) -> Callable[[How], Done]:
    """A Megatron checkpoint SRC (torch_dist of any layout, or a run directory) to a Hugging Face folder DST.

    Of adapters: their base with one of them merged.
    """
    from slime_megatron.convert.conversion import dist_to_hf

    find = finder(plugins)
    return lambda how: dist_to_hf(
        source, target, _origin(source, origin), find, how, trusted=trusted, adapter=adapter, form=form or ""
    )


@click.command("dist-to-adapter", epilog="Example: slime convert dist-to-adapter runs/demo-0 ./adapter")
@checkpoint_arguments
def dist_to_adapter_command(
    source: Path, target: Path, origin: str | None, adapter: str, trusted: bool, plugins: Sequence[str]
) -> Callable[[How], Done]:
    """One adapter of a run's Megatron checkpoint SRC (of any layout) to an adapter folder DST in peft's format."""
    from slime_megatron.convert.adapters import dist_to_adapter

    find = finder(plugins)
    return lambda how: dist_to_adapter(source, target, _origin(source, origin), find, how, adapter, trusted=trusted)


def _origin(source: Path, named: str | None) -> Path:
    """The model folder that a checkpoint started from."""
    from slime_convert.source import origin_of, step_of
    from slime_megatron.convert.dist import find

    return resolve(named, "--origin-hf-dir") if named else origin_of(step_of(find(source)))


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


WORDS = {
    "hf-to-dist": hf_to_dist_command,
    "dist-to-hf": dist_to_hf_command,
    "dist-to-adapter": dist_to_adapter_command,
}
