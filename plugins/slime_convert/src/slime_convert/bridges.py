"""The bridge of a model family, from the plugins in turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime_core.errors import ConfigError, nearest
from slime_core.plugins.boundary import call_now, wrong
from slime_core.plugins.load import LoadedPlugin

HOOK = "slime_model_bridge"
PARTS = ("entries", "megatron", "sizes")
REFUSED = {
    "qwen3_vl_moe": "its folders hold all experts of a layer in one tensor, each matrix transposed, so an expert's "
    "rows are columns of the file, and a table of rows reads and writes rows",
}
"""Families that have no bridge although their layers would, and why."""


def find_bridge(loaded: Iterable[LoadedPlugin], hf_config: Any) -> Any:
    """The `slime_convert.bridge.Bridge` of a config, from the plugins in turn.

    Example:
        find_bridge([load_plugin("models")], AutoConfig.from_pretrained(folder))

    Raises:
        ConfigError: CFG200 none of the plugins has one.
        PluginError: PLG56 a hook raised, PLG57 its result is no bridge.
    """
    plugins = [plugin for plugin in loaded if HOOK in plugin.hooks]
    family = str(getattr(hf_config, "model_type", ""))
    for plugin in plugins:
        answer, about = plugin.hooks[HOOK], f"model_type '{family}'"
        bridge = call_now(answer, {"hf_config": hf_config}, about=about)
        if bridge is None:
            continue
        if not all(callable(getattr(bridge, name, None)) for name in PARTS):
            fix = "return a slime_convert.bridge.Bridge, or None to decline"
            raise wrong(answer, f"returned a {type(bridge).__name__}", about, code="PLG57", fix=fix)
        return bridge
    raise _none(plugins, hf_config, family)


def _none(plugins: list[LoadedPlugin], hf_config: Any, family: str) -> ConfigError:
    named = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    families = {str(name) for plugin in plugins for name in getattr(plugin.target, "slime_families", ())}
    names = f"; families: {', '.join(sorted(families))}" if families else ""
    near = nearest(family, families)
    load = "" if families else "--plugin models   (from a clone of slime: pip install -e plugins/slime_models)"
    train = 'train it with train_backend = "fsdp", or write a plugin with slime_model_bridge'
    return ConfigError(
        f"no plugin has a bridge for {named} (model_type '{family}')",
        code="CFG200",
        where="config.json: model_type",
        why=REFUSED.get(family)
        or f"asked: {', '.join(str(plugin.provider) for plugin in plugins) or 'none, for none is loaded'}{names}",
        fix="\n".join(filter(None, [near, load, train])),
    )
