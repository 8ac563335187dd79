"""The plugin `compat` as others need it: slime's modules, `/generate`, and a server before the run's engine.

It is looked up by name and never imported. Where it is not installed, who needs it is told what installs it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import PluginError
from slime_core.plugins.backends import COMPAT, PACKAGES, install, is_installed
from slime_core.plugins.load import load_plugin

if TYPE_CHECKING:
    from slime_core.context import Context


LOOPBACK = "127.0.0.1"


class HttpError(Exception):
    """A request that cannot be served, with its HTTP status; ``fields`` are added to the response's ``error``."""

    def __init__(self, status: int, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.status, self.fields = status, fields

    def body(self) -> dict[str, Any]:
        """The response, as OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None, **self.fields}}


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """An authorized request to the loopback."""

    token: str  # its bearer token; empty where it has none
    payload: dict[str, Any]  # the body's JSON object; empty for GET


class Events(list[Any]):
    """A response sent as server-sent events, one JSON value each."""


Handler = Callable[[Request], Awaitable[Any]]
Authorize = Callable[[str], None]
"""Called with a request's bearer token before its body is read, on the server's thread; raises :class:`HttpError`."""


class Loopback(Protocol):
    """An HTTP server on a free port of the loopback."""

    port: int

    @property
    def orphaned(self) -> bool:
        """Whether the loop of its handlers has ended."""
        ...

    def close(self) -> None:
        """Stop serving and free the port."""
        ...


class Server(Protocol):
    """`/generate` before the run's engine, on the loopback."""

    def port(self, ctx: Context | None) -> int | None:
        """Its port; it starts with the first call, unless there is no engine."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Modules(Protocol):
    """What stands where functions import `slime`."""

    def check(self, key: str, path: str) -> None:
        """Refuse the function that ``key`` names if it imported another slime: PluginError PLG50."""
        ...

    def remove(self) -> None:
        """Take it away."""
        ...


class Compat(Protocol):
    """What the plugin's object has beside its hooks."""

    def modules(self) -> Modules:
        """Serve slime's modules until they are removed."""
        ...

    def server(self, calls: Mapping[int, Any], token: str = "") -> Server:
        """A server that knows running calls by their seeds (`slime_core.compat.session.Call`)."""
        ...

    def loopback(
        self, routes: Mapping[str, Handler], loop: asyncio.AbstractEventLoop, authorize: Authorize
    ) -> Loopback:
        """Serve ``routes``, ``"POST /path"`` to handlers that run on ``loop``."""
        ...


def compat(key: str) -> Compat:
    """The installed plugin `compat`, which ``key`` needs.

    Raises:
        PluginError: PLG51 it is not installed; PLG50 to PLG55 it does not load.
    """
    if not is_installed(COMPAT):
        raise PluginError(
            f"{key} needs {PACKAGES[COMPAT]}, which is not installed here",
            code="PLG51",
            where=key,
            why=f"{PACKAGES[COMPAT]} serves HTTP before the run's engine",
            fix=install(COMPAT),
        )
    plugin: Compat = load_plugin(COMPAT).target
    return plugin


def slime_modules(key: str) -> Modules:
    """slime's modules for a run's functions, the first of which ``key`` names; or what says that they are missing.

    Raises:
        PluginError: PLG50 to PLG55 the plugin does not load.
    """
    return compat(key).modules() if is_installed(COMPAT) else Missing.install()


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
