"""The fork server: imports what candidates need, once, and forks one process a candidate. It never runs a candidate.

One thread, no secrets: it was started with an empty environment, and what a candidate is sent goes past it.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from slime_core.errors import SandboxError
from slime_sandbox import inside, kernel
from slime_sandbox.wire import collect, post

REPORT, WARDEN = 3, 4
"""Places in a request's descriptors."""


class Running(NamedTuple):
    """A candidate's process, who hears of its end, its warden's pidfd (-1 where the kernel ends both), its folder."""

    pid: int
    report: socket.socket
    warden: int
    folder: str


class Zygote:
    """See the module. ``requests`` come from the wardens."""

    def __init__(self, requests: socket.socket, spaces: bool) -> None:
        self._requests = requests
        self._namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if spaces else -1
        self._entries: dict[str, Callable[[inside.CandidateChannel], Any]] = {}
        self._running: dict[int, Running] = {}  # by the candidate's pidfd
        self._wardens: dict[int, int] = {}  # pidfd of a warden that has no namespace to end with it -> its candidate's
        self._poller = select.poll()

    def preload(self, modules: Sequence[str]) -> None:
        """Import them; raises `SandboxError` where one cannot be forked."""
        for name in modules:
            import_module(name)
        tempfile.tempdir = None  # a candidate has its own
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise SandboxError(
                f"the fork server has {threads} threads after its imports",
                code="SBX129",
                where=", ".join(modules),
                why="a process of several threads cannot be forked safely",
                fix="import what starts threads later, in the entry",
            )
        gc.collect()
        gc.disable()  # here nothing is made that needs collecting, and a collection would unshare pages
        gc.freeze()

    def serve(self) -> None:
        """Fork until the last warden's end is closed."""
        self._poller.register(self._requests, select.POLLIN)
        while True:
            for number, _ in self._poller.poll():
                if number in self._running:
                    self._reap(number)
                elif number in self._wardens:
                    self._orphaned(number)
                elif number == self._requests.fileno() and not self._serve_one():
                    return

    def _serve_one(self) -> bool:
        """One request; whether there was any."""
        request, descriptors = collect(self._requests)
        if request is None:
            return False
        try:
            self._fork(request, descriptors)
        except Exception as error:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptors[REPORT])) as report:
                post(report, {"infra": f"{type(error).__name__}: {error}"})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """One candidate."""
        entry = self._entry(request["entry"])
        listener = socket.socket(fileno=os.dup(descriptors[REPORT]))
        try:
            if self._namespace >= 0:
                kernel.setns(descriptors[WARDEN], kernel.CLONE_NEWPID)
            pid = os.fork()
            if not pid:
                inside.run(entry, request, descriptors)
        except OSError:
            listener.close()
            raise
        finally:
            if self._namespace >= 0:
                kernel.setns(self._namespace, kernel.CLONE_NEWPID)
        number, warden = os.pidfd_open(pid), -1
        if self._namespace < 0:
            warden = os.dup(descriptors[WARDEN])
            self._wardens[warden] = number
            self._poller.register(warden, select.POLLIN)
        self._running[number] = Running(pid, listener, warden, request["folder"])
        self._poller.register(number, select.POLLIN)

    def _entry(self, name: str) -> Callable[[inside.CandidateChannel], Any]:
        if name not in self._entries:
            module, _, function = name.partition(":")
            self._entries[name] = getattr(import_module(module), function)
        return self._entries[name]

    def _orphaned(self, warden: int) -> None:
        """Its warden was killed: nobody else would end the candidate, and who waits for it would wait for ever."""
        number = self._forget(warden)
        one = self._running[number]
        self._running[number] = one._replace(warden=-1)
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
            os.killpg(one.pid, signal.SIGKILL)

    def _forget(self, warden: int) -> int:
        self._poller.unregister(warden)
        os.close(warden)
        return self._wardens.pop(warden)

    def _reap(self, number: int) -> None:
        self._poller.unregister(number)
        os.close(number)
        one = self._running.pop(number)
        if one.warden >= 0:
            self._forget(one.warden)
        _, status, usage = os.wait4(one.pid, 0)
        if one.warden < 0 and self._namespace < 0:
            shutil.rmtree(one.folder, ignore_errors=True)
        report = {"exit": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime}
        with one.report, suppress(OSError):
            post(one.report, report)


def main(requests: socket.socket, ready: socket.socket, modules: Sequence[str], spaces: bool) -> None:
    """A fork server's life; ``ready`` hears that it is, or why not."""
    zygote = Zygote(requests, spaces)
    try:
        zygote.preload(modules)
    except SandboxError as error:
        post(ready, {"error": error.as_dict()})
        return
    except BaseException as error:
        message = f"the fork server cannot import the requested modules: {type(error).__name__}: {error}"
        post(ready, {"error": {"what": message, "code": "SBX00", "where": ", ".join(modules)}})
        return
    post(ready, {"ready": True})
    ready.close()
    sys.stdout.flush()
    zygote.serve()
