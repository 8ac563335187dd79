"""Ports for servers: held from the moment they are chosen, and a look at who listens on one.

A free port that is only looked up may be another's a moment later. Here a socket stays bound to it, without listening:
Linux lets the server bind the same address beside it (every listener sets SO_REUSEADDR, as we did after our own
exclusive bind), while whoever asks for any free port, by bind(0) or by connecting, never gets it. A process that asks
for this very number can still take it; `listener` tells who did, so that no token is sent to a stranger.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

TRIES = 64
"""Random starts for a row of ports that are all free."""

LISTENING = "0A"  # the kernel's state of a listening socket


class Hold:
    """Ports ``port``, ``port + 1``, ... that no other process of this machine is given until ``close``.

    Example:
        with hold() as held:
            start(port=held.port)
    """

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self.port: int = sockets[0].getsockname()[1]
        self.count = len(sockets)

    def close(self) -> None:
        """Let them go; a server that listens there is not touched."""
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold(host: str = "127.0.0.1", count: int = 1, highest: int = 65_535) -> Hold:
    """Hold ``count`` ports in a row, the first at most ``highest``, chosen by the kernel.

    Raises:
        OSError: the host is not of this machine, or no such row is free.
    """
    with ExitStack() as passed:  # held until the end, so that the kernel names others
        return _hold(host, count, highest, passed)


def _hold(host: str, count: int, highest: int, passed: ExitStack) -> Hold:
    for _ in range(TRIES):
        sockets = [_bound(host, 0)]
        first = sockets[0].getsockname()[1]
        if first > highest:
            passed.enter_context(sockets[0])
            continue
        try:
            for offset in range(1, count):
                sockets.append(_bound(host, first + offset))
        except (OSError, OverflowError):
            for sock in sockets:
                sock.close()
            continue
        return Hold(sockets)
    raise OSError(f"no {count} ports in a row are free on {host}")


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((host, port))  # exclusive: fails where anybody else has it bound
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from here on the server may join us
    except BaseException:
        sock.close()
        raise
    return sock


def listeners(port: int) -> frozenset[str]:
    """The kernel's numbers of the sockets that listen on ``port``, at any address of this machine."""
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    owners.add(fields[9])
    return frozenset(owners)


def holds(pids: Iterable[int], sockets: frozenset[str]) -> bool:
    """Whether any of these processes has one of the sockets open."""
    names = {f"socket:[{number}]" for number in sockets}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}") in names:
                        return True
    return False


def members(session: int) -> list[int]:
    """Processes of a session that are alive (zombies are not), by their ids."""
    processes: list[int] = []
    if session <= 0:  # the kernel's own threads are in session 0
        return processes
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, _, of = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    processes.append(int(entry.name))
    return processes
