"""Channels to ranks and engines that begin where their imports have ended: forked, not started, as `zygote.py` does it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from slime_core.clusters.channel import Child, ProcessChannel

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["slime_core.trainers.fsdp", "slime_core.engines.local", "slime_core.plugins"])


class Forked:
    """A process of multiprocessing, as a channel waits for one of subprocess."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


async def start_forked(_: int, child: Child, kind: type[ProcessChannel] = ProcessChannel) -> ProcessChannel:
    """In place of `start_here`; ``kind`` is the channel's class."""
    child.log.parent.mkdir(parents=True, exist_ok=True)
    parent_end, child_end = socket.socketpair()
    with child_end:
        env = {**os.environ, **child.env}  # of now: the server has that of its own start
        words = child.module, child_end, child.log, env, child.folder or Path.cwd()
        process = FORKS.Process(target=become, args=words, daemon=True)
        process.start()
    channel = kind(Forked(process), child.log)  # type: ignore[arg-type]
    channel._reader, channel._writer = await asyncio.open_unix_connection(sock=parent_end)
    return channel


def become(module: str, calls: socket.socket, log: Path, env: Mapping[str, str], folder: Path | str) -> None:
    """In the fork: the program that a channel would start."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.argv = [module, str(calls.detach()), str(os.getppid())]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
