"""One candidate's jail, from outside: makes it, has the fork server put the candidate in, ends all that is left in it.

    driver --request--> keeper -fork-> warden --request--> zygote -fork-> candidate
       ^                                  |  ^---------- "jailed", listener ---'
       '--- "ended", what was denied -----'

A small process of trusted code, the first of the jail's PID namespace where there is one: when it ends, the kernel
ends the jail. It lives as long as the driver listens to it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from typing import Any

from slime_sandbox import kernel, levels, tree
from slime_sandbox.counting import Counting
from slime_sandbox.wire import collect, packet_pair, post

HOST = "sandbox"
SOON = 2.0
"""Seconds to wait for killed processes to be gone."""
LOOK_MILLISECONDS = 50
"""How often the memory of a jail's processes is added up: what limits each does not limit how many they are."""
MEMORY = "/dev/shm"
"""Where a jail without a tmpfs of its own has its folder, if it can."""


class Warden:
    """See the module. ``report`` is the packet socket to the driver."""

    def __init__(
        self, setup: dict[str, Any], request: dict[str, Any], report: socket.socket, zygote: socket.socket
    ) -> None:
        self.setup, self.request, self.report, self.zygote = setup, request, report, zygote
        self.spaces = "pid namespace" in setup["layers"]
        self.group = 0  # the candidate's process group, once it has one
        self.inherited = 0
        self.next_look = 0.0
        self.counting: Counting | None = None

    def main(self, descriptors: list[int]) -> None:
        """The whole life of a jail; ``descriptors`` are the candidate's: data, output, and perhaps its cgroup's."""
        pidfd = os.pidfd_open(os.getpid())
        post(self.report, {"jail": True}, [pidfd])
        folder = ""
        try:
            folder = self._make()
            self._run(folder, descriptors, pidfd)
        except OSError as error:
            with suppress(OSError):
                post(self.report, {"infra": f"no jail to be had: {error}"})
                self.report.recv(1)
        finally:
            if not self.spaces:
                self._end_group()
                shutil.rmtree(folder, ignore_errors=True)
        denied = dict(self.counting.violations) if self.counting else {}
        with suppress(OSError):
            post(self.report, {"ended": True, "violations": denied})

    def _make(self) -> str:
        """The candidate's folder."""
        if self.spaces:
            kernel.unshare(levels.OF_A_JAIL)
            socket.sethostname(HOST)
            if self.setup["proc"]:
                tree.mount_proc()
            tree.mount_folder(self.request["limits"]["disk_bytes"], self.request["limits"]["files"])
            return tree.FOLDER
        place = MEMORY if os.access(MEMORY, os.W_OK) else None
        folder = tempfile.mkdtemp(prefix=f"slime-sandbox-{self.setup['driver']}-", dir=place)
        for name in tree.SUBFOLDERS:
            os.mkdir(os.path.join(folder, name))
        return folder

    def _run(self, folder: str, descriptors: list[int], pidfd: int) -> None:
        places = {
            "HOME": folder,
            "TMPDIR": f"{folder}/tmp",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
            "XDG_CACHE_HOME": f"{folder}/cache",
            "CUDA_CACHE_PATH": f"{folder}/cache",
        }
        environment = dict(os.environ) | places | self.request["environment"]
        self.request |= {"folder": folder, "environment": environment}
        reader, telling = packet_pair()
        with reader:
            with telling:
                data, output, *cgroup = descriptors
                descriptors_sent = [data, output, telling.fileno(), self.report.fileno(), pidfd, *cgroup]
                post(self.zygote, self.request, descriptors_sent)
            for number in descriptors:
                os.close(number)
            if "seccomp" in self.setup["layers"]:
                looks, gpu = self.setup["proc"], self.request["gpu"]
                self.counting = Counting(folder, self.setup["readable"], looks=looks, gpu=gpu)
            self._watch(reader)

    def _watch(self, reader: socket.socket) -> None:
        poller, listener, received = select.poll(), -1, False
        poller.register(self.report, select.POLLIN)
        poller.register(reader, select.POLLIN)
        poller.register(self.zygote, 0)  # it hangs up when the fork server dies
        while True:
            ready = poller.poll(LOOK_MILLISECONDS if self.group else None)
            if self.group and (over := self._over()):
                post(self.report, {"over": over})
                return
            for number, event in ready:
                if number == listener:
                    if event & select.POLLIN and self.counting:
                        self.counting.answer(listener)
                    else:
                        poller.unregister(listener)
                elif number == reader.fileno():
                    poller.unregister(reader)
                    listener, received = self._hear(reader), True
                    if listener >= 0:
                        poller.register(listener, select.POLLIN)
                else:  # the driver wants nothing any more, or it or the fork server is gone
                    if not received:
                        self._last_words(reader)
                    return

    def _over(self) -> str:
        """Which limit all of the jail's processes together are over, looked at every so often; empty for none."""
        if (now := time.monotonic()) < self.next_look:
            return ""
        self.next_look = now + LOOK_MILLISECONDS / 1000
        limits = self.request["limits"]
        if sum(max(0, resident(pid) - self.inherited) for pid in self._processes()) > limits["memory_bytes"]:
            return "memory"
        if not self.spaces:  # no tmpfs that would end by itself
            files, size = folder_usage(self.request["folder"])
            return "disk" if files > limits["files"] or size > limits["disk_bytes"] else ""
        return ""

    def _processes(self) -> list[int]:
        if not self.setup["proc"]:  # it has other numbers for them
            return []
        processes = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(ProcessLookupError):
                if int(name) > 1 if self.spaces else os.getpgid(int(name)) == self.group:
                    processes.append(int(name))
        return processes

    def _hear(self, reader: socket.socket) -> int:
        """What the candidate says before it is one: that it is jailed, or why not. The listener's descriptor."""
        message, descriptors = collect(reader)
        if message and "jailed" in message:
            self.group, self.inherited = message["jailed"], resident(message["jailed"])
            post(self.report, {"jailed": True})
            if descriptors and self.counting:
                self.counting.prepare(descriptors[0])
                return descriptors[0]
        elif message:
            post(self.report, {"infra": message["failed"]})
        return -1

    def _last_words(self, reader: socket.socket) -> None:
        """What the candidate may have said meanwhile; if it has not, it cannot any more, and so never runs."""
        reader.shutdown(socket.SHUT_RD)
        self._hear(reader)

    def _end_group(self) -> None:
        if not self.group:
            return
        until = time.monotonic() + SOON
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                os.killpg(self.group, signal.SIGKILL)
                select.select([], [], [], 0.002)


def resident(pid: int) -> int:
    """Bytes of memory that a process has filled, files that it maps left out; 0 for one that is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            words = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
    except OSError:
        return 0
    return sum(int(word[1]) << 10 for word in words)


def folder_usage(folder: str) -> tuple[int, int]:
    """Files and bytes in a folder."""
    files = size = 0
    for place, folders, names in os.walk(folder):
        files += len(folders) + len(names)
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return files, size
