"""State that goes into a checkpoint: whether it is JSON, and whether a checkpoint fits the run that reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.checkpoint.manifest import About, Found
from slime_core.errors import PluginError, TrainerError


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse plugin state that cannot be stored and come back equal; ``state`` is by plugin name.

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
                where=f"slime_state of {plugin}" + (f", key {key}" if key else ""),
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


@dataclass(slots=True, frozen=True, kw_only=True)
class Difference:
    """One thing that is not as it was when the checkpoint was written."""

    key: str  # such as machine.world
    saved: Any
    now: Any
    safe: bool  # resuming is exact, or as exact as it can be, all the same

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.saved)} -> {json.dumps(self.now)}"


SAFE = frozenset({"machine.world", "machine.cpu_threads"})
"""Parameters and moments come back exactly; sums over tokens are then made in another order."""


def differences(found: Found, about: About) -> list[Difference]:
    """What of the machine and the plugins is not as the checkpoint has it. The config has a diff of its own."""
    pairs: list[tuple[str, Any, Any]] = [("plugins", found.plugins, about.plugins)]
    for name in sorted({*found.machine, *about.machine}):
        pairs.append((f"machine.{name}", found.machine.get(name), about.machine.get(name)))
    return [Difference(key=k, saved=old, now=new, safe=k in SAFE) for k, old, new in pairs if old != new]


def check_compatible(found: Found, about: About, forced: Collection[str] = ()) -> list[Difference]:
    """The differences, after those that change what training computes were refused; ``forced`` names allowed ones.

    Raises:
        TrainerError: TRN108 with every difference: another dtype.
        PluginError: PLG00 other plugins than the run had.
    """
    known = differences(found, about)
    wrong = [one for one in known if not one.safe and one.key not in forced]
    lines = "\n".join(str(one) for one in known)
    if any(one.key == "machine.dtype" for one in wrong):
        raise TrainerError(
            f"the checkpoint of version {found.version} was trained in another dtype",
            code="TRN108",
            where=str(found.path),
            why=lines,
            fix="set train.dtype to what the run had, or --force-key train.dtype",
        )
    if any(one.key == "plugins" for one in wrong):
        raise PluginError(
            f"the checkpoint of version {found.version} was made with other plugins",
            where=str(found.path),
            why=lines,
            fix="install the versions that the run had, or --force-key plugins",
        )
    return known
