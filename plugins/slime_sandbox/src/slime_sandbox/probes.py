"""The self-test's inside: for each layer one thing that must work and one that must not, tried where candidates run.

It is an entry like any other and goes the whole way of one. Nothing of it knows whether the layer is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from slime_sandbox import kernel
from slime_sandbox.inside import CandidateChannel

Tried = tuple[str, bool]
"""What was tried and how it went, in words; and whether it worked."""
MANY = 4096


def main(channel: CandidateChannel) -> None:
    """Take ``{"layers": [...], "marker": path, "namespaces": {...}}``, answer ``{layer: [control, probe]}``."""
    request = json.loads(channel.receive())
    channel.send(json.dumps({name: PROBES[name](request) for name in request["layers"]}).encode())


def attempt(operation: str, action: Callable[[], Any]) -> Tried:
    """Try it; an `OSError` is a no."""
    try:
        action()
    except OSError as error:
        return f"{operation}: {os.strerror(error.errno) if error.errno else error}", False
    return f"{operation}: works", True


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def _write(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"x")


def namespace(kind: str) -> Callable[[dict[str, Any]], list[Tried]]:
    """Whether it is one of its own: control, it can be asked for; probe, it is the driver's."""

    def probe(request: dict[str, Any]) -> list[Tried]:
        space = os.readlink(f"/proc/self/ns/{kind}")
        shared = space == request["namespaces"][kind]
        return [
            (f"{kind} namespace {space}", True),
            ("shares it with the driver" if shared else "the driver's: not shared", shared),
        ]

    return probe


def user(request: dict[str, Any]) -> list[Tried]:
    """Becoming root, and giving a file to root."""
    _write("owned")
    return [
        attempt("chmod of an own file", lambda: os.chmod("owned", 0o600)),
        attempt("chown to root", lambda: os.chown("owned", 0, 0)),
    ]


def mounts(request: dict[str, Any]) -> list[Tried]:
    """Files of Python are there, a file of the driver's is not."""
    return [
        attempt("reading Python's own files", lambda: _read(os.__file__)),
        attempt("reading the driver's file", lambda: _read(request["marker"])),
    ]


def processes(request: dict[str, Any]) -> list[Tried]:
    """Processes of its own, and that of the driver."""
    try:
        visible = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:  # a /proc that is not its own is hidden
        visible = set()
    signalled = attempt("a signal to itself", lambda: os.kill(os.getpid(), 0))
    return [signalled, (f"sees processes {sorted(visible)}", not visible <= {1, os.getpid()})]


def identity(request: dict[str, Any]) -> list[Tried]:
    """It is somebody, not root, and cannot become root."""
    uid = os.getuid()
    return [(f"is user {uid}", uid != 0), attempt("setuid to root", lambda: os.setuid(0))]


def limits(request: dict[str, Any]) -> list[Tried]:
    """One file more, and thousands."""

    def open_many(count: int) -> None:
        with ExitStack() as stack:
            for _ in range(count):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))

    core = resource.getrlimit(resource.RLIMIT_CORE)
    many = attempt(f"{MANY} open files", lambda: open_many(MANY))
    return [attempt("an open file", lambda: open_many(1)), many if core == (0, 0) else ("core files", True)]


def landlock(request: dict[str, Any]) -> list[Tried]:
    """A file in its folder, and one that only Landlock keeps it from: file modes and mounts allow it."""
    return [
        attempt("writing in its folder", lambda: _write("file")),
        attempt("writing /proc/self/comm", lambda: _write("/proc/self/comm")),
    ]


def filtered(request: dict[str, Any]) -> list[Tried]:
    """A process of its own; a network socket and a new namespace."""

    def fork() -> None:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)

    calls = [
        attempt("a network socket", lambda: socket.socket(socket.AF_INET).close()),
        attempt("a new user namespace", lambda: kernel.unshare(kernel.CLONE_NEWUSER)),
    ]
    tracer = ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0
    names = ", ".join(text for text, _ in calls)
    return [attempt("a child process", fork), (names, tracer or any(worked for _, worked in calls))]


PROBES: dict[str, Callable[[dict[str, Any]], list[Tried]]] = {
    "user namespace": user,
    "mount namespace": mounts,
    "pid namespace": processes,
    "net namespace": namespace("net"),
    "ipc namespace": namespace("ipc"),
    "uts namespace": namespace("uts"),
    "uid": identity,
    "rlimits": limits,
    "landlock": landlock,
    "seccomp": filtered,
}
EXPECTED = {"socket": 1, "unshare": 1, "ptrace": 1}
"""What the filter must have counted when all of them were tried."""


def sleep(channel: CandidateChannel) -> None:
    """Never end."""
    while True:
        signal.pause()


def echo(channel: CandidateChannel) -> None:
    """Answer the one message with itself."""
    channel.send(channel.receive())


def compute(channel: CandidateChannel) -> None:
    """Compute on the device whose name comes, with torch, and answer with nothing; raises what torch does."""
    import torch

    device = channel.receive().decode()
    total = (torch.arange(8.0, device=device) * 2).sum().item()
    if total != 56.0:
        raise RuntimeError(f"the sum of 0, 2, ..., 14 is {total} there")
    channel.send(b"")
