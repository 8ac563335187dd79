"""A candidate's process, from its fork to its end: close what it must not have, put on every layer, run the entry.

    fork -> own session, descriptors 0 to 3 alone -> files of the caller -> layers -> entry(channel) -> exit

``entry`` is code of ours that was imported before the fork; what it then runs may be anybody's, so nothing that this
process says is believed.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from slime_sandbox import kernel, landlock, levels, seccomp
from slime_sandbox.limits import lower_limits, tasks_of
from slime_sandbox.wire import FRAME, post

FAILED, OUT_OF_MEMORY, UNJAILED = 1, 77, 78
"""Exit codes: the entry raised; it raised a `MemoryError`; a layer did not go on, and no candidate has run."""
CHANNEL, TELLING = 3, 4
PROC = (
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems", "/proc/version", "/proc/devices"),
    *("/proc/modules", "/proc/sys/vm", "/proc/sys/kernel", "/proc/driver/nvidia"),
)
"""What of a /proc that others share is shown, beside the candidate's own."""
THREADS = "/proc/self/task"
"""CUDA's driver gives its threads names by writing to files there, and starts nowhere without it."""
SHOWN = 500


class Closed(EOFError):
    """The other side has said all that it had to say."""


class CandidateChannel:
    """The candidate's end: whole messages of raw bytes, both ways. Blocks.

    Example:
        def main(channel: Channel) -> None:
            channel.send(channel.receive().upper())
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """One message."""
        view = memoryview(data).cast("B")
        self._sock.sendall(FRAME.pack(len(view)))
        self._sock.sendall(view)

    def receive(self) -> bytes:
        """The next message; `Closed` where no other follows."""
        (length,) = FRAME.unpack(self._read(FRAME.size))
        return bytes(self._read(length))

    def _read(self, length: int) -> bytearray:
        data, filled = bytearray(length), 0
        view = memoryview(data)
        while filled < length:
            count = self._sock.recv_into(view[filled:])
            if not count:
                raise Closed
            filled += count
        return data


def run(entry: Callable[[CandidateChannel], Any], request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """All of a candidate's life; does not return.

    ``descriptors``: data, output, who is told ``jailed`` when every layer is on (or why not), the driver's report, the
    warden's pidfd, and perhaps the cgroup's list of processes.
    """
    code = UNJAILED
    try:
        channel, extra = _settle(descriptors)
        telling = socket.socket(fileno=TELLING)
        try:
            _put_on(request, channel, telling, extra)
        except BaseException as error:
            post(telling, {"failed": f"{type(error).__name__}: {error}"[:SHOWN]})
            raise
        telling.close()
        code = _result_of(entry, channel)
    finally:
        os._exit(code)


def _settle(descriptors: list[int]) -> tuple[CandidateChannel, list[int]]:
    """Leave everything of the fork server's behind but memory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    data, output, report, _, *extra = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    descriptors_kept = (null, output, output, data, report, *extra)
    for target, source in enumerate([fcntl.fcntl(number, fcntl.F_DUPFD, 64) for number in descriptors_kept]):
        os.dup2(source, target, inheritable=target < CHANNEL)
    os.closerange(len(descriptors_kept), 1 << 20)
    return CandidateChannel(socket.socket(fileno=CHANNEL)), list(range(TELLING + 1, len(descriptors_kept)))


def _put_on(request: dict[str, Any], channel: CandidateChannel, telling: socket.socket, extra: list[int]) -> None:
    """Every layer that the level has, the last of them last."""
    layers, folder, limits = request["layers"], request["folder"], request["limits"]
    spaces = "pid namespace" in layers
    warden, *cgroup = extra
    if spaces:
        kernel.setns(warden, levels.OF_A_JAIL)
    for number in cgroup:
        os.write(number, b"0")
    os.closerange(TELLING + 1, TELLING + 1 + len(extra))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name in request["files"]:
        Path(folder, name).write_bytes(channel.receive())
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where the machine runs out, this goes before the run
    user, group = os.getuid(), os.getgid()
    if spaces:
        kernel.unshare(kernel.CLONE_NEWUSER)
        kernel.map_self(user, group)
    counted = bool(cgroup) or request["gpu"]
    lower_limits(limits, memory=not counted, others=0 if spaces else tasks_of(user))
    listener = []
    if "seccomp" in layers:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        kernel.end_with(0)
        if "landlock" in layers:
            named = [THREADS] if request["gpu"] else []
            landlock.restrict(_readable(request, spaces), [folder], [*request["devices"], *named])
        alone = spaces or ("landlock" in layers and landlock.abi() >= landlock.KEEPS_SIGNALS)
        rules = seccomp.Rules(
            memory_files=counted,
            own_groups=spaces,
            signals_within=0 if alone else os.getpid(),
            gpu=request["gpu"],
        )
        listener = [seccomp.install(seccomp.program(kernel.architecture(), rules))]
    post(telling, {"jailed": os.getpid()}, listener)
    for number in listener:
        os.close(number)


def _readable(request: dict[str, Any], spaces: bool) -> list[str]:
    """What Landlock lets it read: all that the mount namespace shows, without the /proc of others."""
    if spaces and request["proc"]:
        return ["/"]
    shown = [f"/{name}" for name in os.listdir("/") if name != "proc"] if spaces else request["readable"]
    return [*shown, "/proc/self", *PROC]


def _result_of(entry: Callable[[CandidateChannel], Any], channel: CandidateChannel) -> int:
    """Run the entry; its exit code."""
    code = FAILED
    gc.enable()
    try:
        entry(channel)
        code = 0
    except Closed:
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
        traceback.print_exc()
    except SystemExit as stop:
        code = stop.code & 0xFF if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    return code
