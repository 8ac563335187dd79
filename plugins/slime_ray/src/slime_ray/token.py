"""Ray's token: whether the head at an address admits this process, checked before Ray retries for half a minute."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

ASK = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first request of every client of a head; an empty message is valid."""
PATIENCE = 5.0  # seconds
MODE = "RAY_AUTH_MODE"


def let_in(address: str) -> bool:
    """False if the head rejects this process's token or its absence; True if unknown.

    Raises:
        Exception: Ray's own, where this process is to have a token and has none.
    """
    try:
        import grpc
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    except ImportError:  # of Ray's extras, and of its inner life
        return True
    headers = get_auth_headers_if_auth_enabled({})
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(ASK)
        try:
            call(b"", timeout=PATIENCE, metadata=[(name.lower(), value) for name, value in headers.items()])
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.UNAUTHENTICATED)
    return True


def address_of_auto() -> str:
    """HOST:PORT of the cluster that ``auto`` means; "auto" where Ray does not say."""
    try:
        from ray._private.services import canonicalize_bootstrap_address

        return canonicalize_bootstrap_address("auto") or "auto"
    except Exception:  # Ray's internals may differ, or no head is there, which `ray.init` reports
        return "auto"


def take_up() -> bool:
    """Send the token of this machine's user from now on, where ``RAY_AUTH_MODE`` says nothing; whether there is one.

    `ray start --head` asks for that token by itself where there is one; who joins has to know.
    """
    if MODE in os.environ:
        return False
    try:
        inner: Any = import_module("ray._raylet")
        if not inner.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            return False
        os.environ[MODE] = "token"
        inner.Config.initialize("")
    except (ImportError, AttributeError, TypeError):  # another version's inner life
        return False
    return True
