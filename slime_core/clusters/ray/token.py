"""Ray's token: whether the head at an address lets this process in, asked before Ray asks it for half a minute."""

from __future__ import annotations

ASK = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every client of a head asks it first; an empty message is a whole one."""
PATIENCE = 5.0  # seconds


def let_in(address: str) -> bool:
    """False where the head says that this process's token, or that it has none, is wrong; True where nobody can tell.

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
