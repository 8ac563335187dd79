"""`slime.utils.http_utils`."""

from __future__ import annotations

import socket
from typing import Any

from slime_compat.http import get, post


def is_port_available(port: int) -> bool:
    """Whether the loopback port can be bound."""
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def find_available_port(base_port: int) -> int:
    """The first port from ``base_port`` on that can be bound.

    Raises:
        OSError: none is left.
    """
    for port in range(base_port, 65536):
        if is_port_available(port):
            return port
    raise OSError(f"no free port from {base_port} on")


def init_http_client(args: Any) -> None:
    """Nothing to prepare: every request opens its own connection."""


__all__ = ["find_available_port", "get", "init_http_client", "is_port_available", "post"]
