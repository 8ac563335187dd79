"""What functions by path ask of the plugin `compat`: slime's modules, and `/generate` before the run's engine.

It is looked up by name and never imported. Where it is not installed, the error says what installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import PluginError
from slime_core.plugins.backends import COMPAT, PACKAGES, install, is_installed
from slime_core.plugins.load import load_plugin

if TYPE_CHECKING:
    import asyncio

    from slime_core.context import Context


class GenerateEndpoint(Protocol):
    """`/generate` before the run's engine, on the loopback."""

    def port(self, ctx: Context | None, loop: asyncio.AbstractEventLoop | None = None) -> int | None:
        """Its port; it starts with the first call, unless there is no engine. ``loop`` is the engine's."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Modules(Protocol):
    """What functions get when they import `slime`."""

    def check(self, key: str, path: str) -> None:
        """Refuse the function that ``key`` names if it imported another slime: PluginError PLG50."""
        ...

    def remove(self) -> None:
        """Take it away."""
        ...


def server(key: str, calls: Mapping[int, Any], token: str = "") -> GenerateEndpoint:
    """A server for ``key`` that knows running calls by their seeds (`slime_core.compat.session.GenerationCall`).

    Raises:
        PluginError: PLG51 slime-compat is not installed; PLG50 to PLG55 it does not load.
    """
    if not is_installed(COMPAT):
        raise PluginError(
            f"{key} needs {PACKAGES[COMPAT]}, which is not installed here",
            code="PLG51",
            where=key,
            why=f"{PACKAGES[COMPAT]} serves HTTP before the run's engine",
            fix=install(COMPAT),
        )
    return load_plugin(COMPAT).target.server(calls, token)  # type: ignore[no-any-return]


def slime_modules(*, megatron: bool = False) -> Modules:
    """slime's modules for a run's functions, or what says that they are missing.

    Args:
        megatron: whether Megatron trains; where it does not, its ``mpu`` is served too, as that of one rank.

    Raises:
        PluginError: PLG50 to PLG55 the plugin does not load.
    """
    return load_plugin(COMPAT).target.modules(megatron=megatron) if is_installed(COMPAT) else Missing.install()


class Missing(MetaPathFinder):
    """Names the package that serves slime's modules to a function that imports one."""

    @classmethod
    def install(cls) -> Missing:
        """Put it first."""
        missing = cls()
        sys.meta_path.insert(0, missing)
        return missing

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Refuse slime and its modules; know nothing of others."""
        if fullname.partition(".")[0] == "slime":
            text = f"{PACKAGES[COMPAT]} serves {fullname}, and is not installed here: {install(COMPAT)}"
            raise ModuleNotFoundError(text, name=fullname)

    def check(self, key: str, path: str) -> None:
        """A function that imported slime was not loaded."""

    def remove(self) -> None:
        """Take it away."""
        sys.meta_path.remove(self)
