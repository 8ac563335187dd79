"""`slime.utils.http_utils`."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from slime_compat.http import get, post

_http_client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
"""For event loops of any kind: a connection is a request's."""


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


def get_rollout_num_engines(args: Any) -> int:
    """Engines behind the address: ``args.rollout_num_engines``, else by GPUs; 1 without GPUs, and never less."""
    count = getattr(args, "rollout_num_engines", None)
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    gpus_per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    return int(count) if count else max(gpus // gpus_per_engine, 1)


def init_http_client(args: Any) -> None:
    """Nothing to prepare: every request opens its own connection."""


__all__ = [
    "_http_client",
    "find_available_port",
    "get",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
]
