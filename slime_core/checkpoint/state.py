"""State that goes into a checkpoint: whether it is JSON; and whether a checkpoint's dtype is that of the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from slime_core.checkpoint.manifest import Found
from slime_core.errors import PluginError, TrainerError


def check_state(state: Mapping[str, Any], holder: str = "slime_state") -> None:
    """Refuse plugin state that cannot be stored and come back equal; ``state`` of ``holder`` is by plugin name.

    Called before the first step, so that it does not fail at the first checkpoint.

    Raises:
        PluginError: PLG64 with the plugin and the key.
    """
    for plugin, value in state.items():
        if trouble := _trouble(value, ""):
            key, why = trouble
            raise PluginError(
                f"the state of plugin '{plugin}' cannot be saved",
                code="PLG64",
                where=f"{holder} of {plugin}" + (f", key {key}" if key else ""),
                why=why,
                fix="return JSON: dicts with str keys, lists, str, int, finite float, bool, None",
            )


def _trouble(value: Any, key: str) -> tuple[str, str] | None:
    """Where and why a value is not JSON that comes back equal; None where it is."""
    if value is None or type(value) in (bool, int):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else (key, f"it is {value}, which JSON does not have")
    if type(value) is str:
        return None if _encodes(value) else (key, "it is text that is not valid Unicode")
    if type(value) is list:
        found = (_trouble(item, f"{key}[{index}]") for index, item in enumerate(value))
        return next((one for one in found if one), None)
    if type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                return key, f"its key {name!r} is a {type(name).__name__}, not a str"
            if found_in := _trouble(item, f"{key}.{name}" if key else name):
                return found_in
        return None
    return key, f"it is a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_dtype(found: Found, dtype: str, forced: Collection[str] = ()) -> None:
    """Refuse to go on in another dtype than the run computed in: ``train.dtype = auto`` follows the machine.

    Parameters and moments are float32 in every checkpoint; steps would round otherwise than those before them.

    Raises:
        TrainerError: TRN108, unless ``train.dtype`` is forced.
    """
    saved = found.machine.get("dtype", dtype)
    if saved != dtype and not {"train.dtype", "dtype"} & set(forced):
        raise TrainerError(
            f"the run computed in {saved} and would go on in {dtype}",
            code="TRN108",
            where=str(found.path),
            why=f"train.dtype = auto is {dtype} on this machine; the checkpoint was written on {found.machine}",
            fix=f"--dtype {saved}   or   --force-key train.dtype",
        )
