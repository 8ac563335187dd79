"""The plugin system: plugins by name, as typed methods.

    discover (metadata) -> load (import, check) -> router (which serves what) -> facade (call, await, check)
                                                                                  `- boundary: PluginError with where

Listing what is installed imports neither numpy nor any plugin; the other names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slime_core.plugins.discover import PluginInfo as PluginInfo, available as available, find as find

if TYPE_CHECKING:
    from slime_core.plugins.assemble import (
        connect as connect,
        load_plugins as load_plugins,
        option_models as option_models,
        recipe_path as recipe_path,
    )
    from slime_core.plugins.facade import Plugins as Plugins
    from slime_core.plugins.load import LoadedPlugin as LoadedPlugin, load_plugin as load_plugin

_HOME_OF = {
    "connect": "assemble",
    "load_plugins": "assemble",
    "option_models": "assemble",
    "recipe_path": "assemble",
    "Plugins": "facade",
    "LoadedPlugin": "load",
    "load_plugin": "load",
}

__all__ = ["PluginInfo", "available", "find", *_HOME_OF]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slime_core.plugins' has no attribute '{name}'")
    return getattr(import_module(f"slime_core.plugins.{_HOME_OF[name]}"), name)
