"""Plugins of a config: what it names is loaded, core and functions by path are added, all is routed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.stages import stages
from slime_core.errors import ConfigError, PluginError, nearest
from slime_core.plugins.backends import BUFFER, PACKAGES, check_names, implied, install
from slime_core.plugins.facade import Plugins
from slime_core.plugins.load import LoadedPlugin, core_plugin, load_options, load_plugin, options_model, recipe_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.schema import Config

CORE = "slime_core.builtin"  # layers above this one, loaded by name like every plugin
FUNCTIONS = "slime_core.compat.functions"


def load_plugins(config: Config) -> Plugins:
    """Load what ``config.plugins`` names and its keys need, core's own plugin and functions by path; route all hooks.

    Raises:
        PluginError: PLG50-55, PLG66 a plugin or function that cannot be loaded; PLG52 two hooks of equal rank.
        ConfigError: CFG01, CFG02 a [plugin.NAME] table; CFG04 an unknown reward type, estimator or loss, or a plugin
            that a key needs and that is not installed.
    """
    loaded: dict[str, LoadedPlugin] = {}
    parts = stages(config)
    for entry in dict.fromkeys([*(name for part in parts for name in implied(part)), *config.plugins]):
        plugin = load_plugin(entry)
        if (other := loaded.setdefault(plugin.provider.name, plugin)) is not plugin:
            raise PluginError(
                f"two plugins are called '{plugin.provider.name}': {other.provider.origin}, {plugin.provider.origin}",
                code="PLG52",
                where="plugins",
                fix="rename the file, or load one of the two",
            )
    check_names(loaded.values())
    if (buffer := loaded.get(BUFFER)) and any(map(implied, parts)) and "slime_generate" not in buffer.hooks:
        raise PluginError(
            f"rollout_buffer_url: the plugin '{BUFFER}' is {buffer.provider.origin}, not {PACKAGES[BUFFER]}",
            code="PLG52",
            where="rollout.rollout_buffer_url",
            why="it has no slime_generate, so no rollout would come from the buffer",
            fix=f"uninstall or rename it, then: {install(BUFFER)}",
        )
    strangers = [name for name in config.plugin if name not in loaded]
    if strangers:
        raise ConfigError(
            f"[plugin.{strangers[0]}] is for a plugin that this run does not load",
            code="CFG01",
            where=f"plugin.{strangers[0]}",
            why=f"loaded: {', '.join(loaded) or 'none'}",
            fix=nearest(strangers[0], tuple(loaded)) or f"--plugin {strangers[0]}",
        )
    for name, plugin in loaded.items():
        plugin.options = load_options(plugin, config.plugin.get(name, {}))
    return connect(loaded, parts)


def connect(loaded: dict[str, LoadedPlugin], configs: Sequence[Config]) -> Plugins:
    """Plugins from what is already loaded, with core and functions by path, resolved for every config."""
    functions = import_module(FUNCTIONS).FunctionsByPath()
    core: Any = import_module(CORE).Core()
    plugins = Plugins(loaded, core_plugin(core), functions)
    core.reward_by_type = plugins.reward_by_type
    functions.attach(plugins)
    try:
        for config in configs:
            plugins.resolve(config)
    except BaseException:
        plugins.close()
        raise
    return plugins


def recipe_path(plugin_name: str, recipe: str = "default") -> Path:
    """The file of an installed plugin's recipe, with no run around it (`slime run --plugin NAME`).

    Raises:
        PluginError: PLG50-55 as :func:`load_plugins`.
        ConfigError: CFG05 no such recipe, or its file is missing.
    """
    return recipe_of(load_plugin(plugin_name), recipe)


def option_models(names: Sequence[str]) -> Mapping[str, type[BaseModel] | None]:
    """The options model of each plugin by its name; None where it has no options.

    Raises:
        PluginError: PLG50-55 as :func:`load_plugins`.
    """
    return {plugin.provider.name: options_model(plugin) for plugin in map(load_plugin, names)}
