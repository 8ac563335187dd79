"""The sandbox's first process: starts with an empty environment, starts the fork server, and a warden for each jail.

    driver -exec-> keeper -fork-> zygote (imports, forks candidates)
                     '----fork-> warden (one a candidate)

It stays small, so that its forks are cheap; it ends with the driver, and everything else ends with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from slime_core.errors import SandboxError
from slime_sandbox import kernel, levels, zygote
from slime_sandbox.warden import Warden
from slime_sandbox.wire import collect, packet_pair, post

BURYING_MILLISECONDS = 20


class Keeper:
    """See the module. ``control`` is the packet socket to the driver."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self.control, self.setup = control, setup
        self.spaces = "pid namespace" in setup["layers"]
        self.requests, child_end = packet_pair()
        self.zygote = self._fork_zygote(child_end)
        self.alive = os.pidfd_open(self.zygote)
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self.spaces else -1

    def _fork_zygote(self, requests: socket.socket) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                kernel.end_with(keeper)
                self.requests.close()
                zygote.main(requests, self.control, self.setup["preload"], self.spaces)
            finally:
                os._exit(0)
        requests.close()
        return pid

    def serve(self) -> None:
        """Until the driver, or the fork server, is gone."""
        gc.disable()  # a collection in a warden would unshare pages
        gc.freeze()
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.alive, select.POLLIN)
        wardens: dict[int, int] = {}  # pidfd -> process
        while True:
            adopting = wardens and not self.spaces  # nobody tells when what a candidate left behind has ended
            for number, _ in poller.poll(BURYING_MILLISECONDS if adopting else None):
                if number in wardens:
                    poller.unregister(number)
                    del wardens[number]
                    os.close(number)
                    continue
                request, descriptors = (None, []) if number == self.alive else collect(self.control)
                if request is None:
                    return
                if pid := self._start(request, descriptors):
                    wardens[alive := os.pidfd_open(pid)] = pid
                    poller.register(alive, select.POLLIN)
            with suppress(ChildProcessError):  # wardens, and what their candidates left
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """A warden; its process, or 0 where there was none to be had."""
        report, *child_ends = descriptors
        shared = ("layers", "readable", "gpu", "proc")
        with socket.socket(fileno=report) as report_socket:
            try:
                if self.namespace >= 0:
                    kernel.unshare(kernel.CLONE_NEWPID)
                pid = os.fork()
            except OSError as error:
                pid = 0
                with suppress(OSError):
                    post(report_socket, {"infra": f"no process for a jail: {error}"})
            else:
                if not pid:
                    self._be_warden({name: self.setup[name] for name in shared} | request, report_socket, child_ends)
            if self.namespace >= 0:
                kernel.setns(self.namespace, kernel.CLONE_NEWPID)
        for number in child_ends:
            os.close(number)
        return pid

    def _be_warden(self, request: dict[str, Any], report_socket: socket.socket, descriptors: list[int]) -> NoReturn:
        try:
            self.control.close()
            Warden(self.setup, request, report_socket, self.requests).main(descriptors)
        finally:
            os._exit(0)


def main() -> None:
    """``argv``: the socket's number and the driver's process."""
    control, driver = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    kernel.end_with(driver)
    setup, _ = collect(control)
    assert setup is not None
    sys.argv[1:] = []
    sys.dont_write_bytecode = True
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        setup["driver"] = driver
        setup["proc"] = levels.reach(setup)
    except SandboxError as error:
        post(control, {"error": error.as_dict()})
        return
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Keeper(control, setup).serve()


BOOT = "import sys,json;sys.path[:]=json.loads(sys.argv.pop());from slime_sandbox.keeper import main;main()"
"""What the interpreter is started with, before the socket, the driver's process and ``sys.path`` as JSON."""
