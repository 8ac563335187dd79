"""What handlers of the loopback server take and give."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LOOPBACK = "127.0.0.1"


class HttpError(Exception):
    """A request that cannot be served, with its HTTP status; ``fields`` are added to the response's ``error``."""

    def __init__(self, status: int, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.status, self.fields = status, fields

    def body(self) -> dict[str, Any]:
        """The response, as OpenAI's and Anthropic's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": None, **self.fields}
        return {"type": "error", "error": error}


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """An authorized request to the loopback."""

    token: str  # its bearer token, or x-api-key; empty where it has none
    payload: dict[str, Any]  # the body's JSON object; empty for GET
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case


class Events(list[Any]):
    """A response sent as server-sent events, one JSON value each, and an end mark."""


class NamedEvents(Events):
    """Events whose names are the values' ``type``, without an end mark."""


Handler = Callable[[Request], Awaitable[Any]]
Authorize = Callable[[str], None]
"""Called with a request's bearer token before its body is read, on the server's thread; raises :class:`HttpError`."""
