"""Channels to ranks and engines that begin where their imports have ended: forked, not started, by `zygote.py`."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from forked import connect

from slime_core.clusters.channel import Child, ProcessChannel


class Forked:
    """A process of the zygote, as a channel waits for one of subprocess."""

    def __init__(self, child: Child, fds: list[int]) -> None:
        request = {
            "module": child.module, "log": str(child.log.absolute()), "folder": str(child.folder or Path.cwd()),
            "env": {**os.environ, **child.env}, "path": sys.path,
        }  # fmt: skip
        self._connection = connect()
        self._lines = self._connection.makefile("rb", buffering=0)
        self._lock, self._code = threading.Lock(), None
        assert json.loads(self._lines.readline()) == {"threads": 1}
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], fds)
        self.pid = json.loads(self._lines.readline())["pid"]

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._code is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
                self._code = json.loads(self._lines.readline())["code"]
                self._lines.close()
                self._connection.close()
            return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


async def fork(kind: type[ProcessChannel], child: Child, *fds: int) -> ProcessChannel:
    """As `ProcessChannel.start`; ``kind`` is the channel's class."""
    child.log.parent.mkdir(parents=True, exist_ok=True)
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = Forked(child, [child_end.fileno(), *fds])
    channel = kind(process, child.log)  # type: ignore[arg-type]
    channel._reader, channel._writer = await asyncio.open_unix_connection(sock=parent_end)
    return channel


async def start_forked(_: int, child: Child, kind: type[ProcessChannel] = ProcessChannel) -> ProcessChannel:
    """In place of `start_here`."""
    return await fork(kind, child)


def fork_channels() -> None:
    """Fork whatever this process starts by a channel from now on."""
    ProcessChannel.start = classmethod(fork)  # type: ignore[assignment]
