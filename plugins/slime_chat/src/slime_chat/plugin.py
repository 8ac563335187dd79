"""The plugin `chat`: its row of `slime doctor`. Agents need no hook of it; their functions import `slime_chat`."""

from __future__ import annotations

import socket

from slime_compat.handlers import LOOPBACK
from slime_core import Check, CheckResult, hookimpl

slime_api = 1


@hookimpl
def slime_checks() -> list[Check]:
    """`chat: loopback`."""
    return [Check(name="loopback", run=check_loopback)]


def check_loopback() -> CheckResult:
    """Whether a process of this machine can connect to another one."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            return CheckResult(status="ok", found=f"agents can connect to {LOOPBACK}")
    except OSError as error:
        return CheckResult(
            status="fail", found=f"no connection to {LOOPBACK}: {error.strerror or error}", fix="ip link set lo up"
        )
