"""What a candidate tried and was denied, as the kernel told: system calls by name, files by the place they lie in.

Only counted, never decided: the kernel has the last word on every file. A candidate cannot reach this process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from slime_sandbox import kernel
from slime_sandbox.syscalls import OPENS, names

NOTIFICATION, ANSWER = struct.Struct("<QIIiIQ6Q"), struct.Struct("<QqiI")
RECEIVE, SEND, SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
CONTINUE, SYNC_WAKE_UP = 1, 1
AT_FDCWD = -100 & 0xFFFFFFFF
LONGEST, PAGE = 4096, 4096
DRIVERS = {
    "bind": (b"\0cuda-uvmfd-", (0, CONTINUE)),  # where it passes on descriptors among processes
    "connect": (b"/tmp/nvidia-mps/control", (-errno.ENOENT, 0)),  # no service that shares GPUs is to be had here
}
"""How the addresses of local sockets begin that CUDA's driver tries, and the answer."""
MAKING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
GUARDED = (
    *("/root", "/home", "/var", "/run", "/boot", "/mnt", "/media", "/srv", "/proc/1", "/proc/kcore", "/dev/mem"),
    *("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/ssl/private", "/sys/fs", "/sys/kernel"),
)
"""Where a machine keeps what is none of a candidate's business; reads elsewhere may be a library's innocent look."""
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev", "/proc/self", "/proc/thread-self")
"""Writing there is harmless, impossible, or a library's habit."""


class Counting:
    """The listening end of one candidate's filter.

    ``violations`` counts denied calls by name, ``read:/root`` and the like, and ``write`` for files elsewhere.
    """

    def __init__(self, folder: str, readable: Sequence[str], looks: bool = True, gpu: bool = False) -> None:
        self._looks = looks  # whether /proc is that of the candidate's namespace
        self._gpu = gpu
        self.violations: Counter[str] = Counter()
        self._names = names(kernel.architecture())
        self._allowed = (folder, *readable)
        self._writable = (folder, *OPEN_TO_ALL)

    def prepare(self, listener: int) -> None:
        """Wake the other side at once after each answer, where the kernel can (Linux 6.6)."""
        with suppress(OSError):
            fcntl.ioctl(listener, SET_FLAGS, SYNC_WAKE_UP)

    def answer(self, listener: int) -> None:
        """Take one notification and answer it."""
        buffer = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, RECEIVE, buffer)
        except OSError:  # who asked is dead
            return
        number, pid, _, call, _, _, *arguments = NOTIFICATION.unpack(buffer)
        name = self._names.get(call, f"call {call}")
        if name in OPENS:
            tried = self._look(name, pid, arguments) if self._looks else ""
            reply = ANSWER.pack(number, 0, 0, CONTINUE)
        elif self._gpu and name in DRIVERS and self._of_driver(name, pid, arguments):
            tried, reply = "", ANSWER.pack(number, 0, *DRIVERS[name][1])
        else:
            tried, reply = name, ANSWER.pack(number, 0, -errno.EPERM, 0)
        if tried:
            self.violations[tried] += 1
        try:
            fcntl.ioctl(listener, SEND, reply)
        except OSError:
            return

    def _look(self, name: str, pid: int, arguments: Sequence[int]) -> str:
        if name in ("open", "creat"):
            folder, path, flags = AT_FDCWD, arguments[0], arguments[1] if name == "open" else MAKING
        else:
            folder, path, flags = arguments[0] & 0xFFFFFFFF, arguments[1], arguments[2]
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                text = _text(memory.fileno(), path)
                if name == "openat2":
                    flags = struct.unpack("<Q", os.pread(memory.fileno(), 8, flags))[0]
            if not text.startswith("/"):
                text = os.path.join(os.readlink(f"/proc/{pid}/cwd"), text) if folder == AT_FDCWD else ""
        except (OSError, struct.error):
            return ""
        return self.of(os.path.normpath(text), flags) if text else ""

    def _of_driver(self, name: str, pid: int, arguments: Sequence[int]) -> bool:
        """Whether a socket's address is one that CUDA's driver tries when it starts.

        It may change once it was looked at: what else can be bound lies in the candidate's own folder or network.
        """
        if not self._looks:
            return True
        with suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            begins = struct.pack("<H", socket.AF_UNIX) + DRIVERS[name][0]
            return os.pread(memory.fileno(), min(arguments[2], len(begins)), arguments[1]) == begins
        return False

    def of(self, path: str, flags: int) -> str:
        """What opening an absolute path with these flags counts as; empty for nothing."""
        if flags & MAKING and not _within(path, self._writable):
            return "write"
        if _within(path, self._allowed):
            return ""
        return next((f"read:{place}" for place in GUARDED if _within(path, (place,))), "")


def _within(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def _text(memory: int, address: int) -> str:
    """The C string at an address of another process."""
    text = b""
    while b"\0" not in text and len(text) < LONGEST:
        part = os.pread(memory, PAGE - address % PAGE, address)
        if not part:
            break
        text, address = text + part, address + len(part)
    return text.partition(b"\0")[0].decode(errors="replace")
