"""One process owns a ledger's database: a locked file beside it names the owner, and how much the database held.

The kernel releases the lock when the process ends, so a file that is left behind blocks nobody, whoever has its pid
now. The marks are written after each commit, without waiting for the disk: they never say more than was durable, and
a database that knows less has lost its write-ahead log, or was put back from an older copy.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_core.durable import storage_error
from slime_core.errors import StorageError

NAME = "ledger.lock"
ROOM = 512  # bytes of the file


class Owner:
    """The lock of ``path``'s folder, held until :meth:`release`; ``marks`` is what the last owner noted.

    Example:
        owner = Owner(run_dir / "ledger.sqlite")
        owner.note(serial=80, step=5)

    Raises:
        StorageError: STO116 another process holds it, with its pid; STO110, STO120 the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(NAME)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, self.path, "the ledger cannot be locked") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._read()
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise _held(path, holder) from None
            raise storage_error(error, self.path, "the ledger cannot be locked") from error
        found = self._read()
        self.marks = (_whole(found.get("serial")), _whole(found.get("step")))
        self._who = {"pid": os.getpid(), "started": start_of(os.getpid()), "host": socket.gethostname()}
        self.note(*self.marks)

    def note(self, serial: int, step: int) -> None:
        """The last row and the last step that were committed."""
        self.marks = (serial, step)
        data = json.dumps({**self._who, "serial": serial, "step": step}).encode().ljust(ROOM)
        with suppress(OSError):  # a disk that is full here loses nothing
            os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        """Let the next owner in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._fd, ROOM, 0))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def locker(path: Path) -> int:
    """The pid of another process that has the database file, or its shared memory, locked; 0 where there is none."""
    wanted = set()
    for one in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            wanted.add(one.stat().st_ino)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.replace("-> ", "").split()
            if int(fields[5].rpartition(":")[2]) in wanted and int(fields[4]) not in (0, -1, os.getpid()):
                return int(fields[4])
    return 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _held(path: Path, holder: dict[str, Any]) -> StorageError:
    pid, here = holder.get("pid"), holder.get("host") in (None, socket.gethostname())
    alive = isinstance(pid, int) and start_of(pid) == holder.get("started") != 0
    if not isinstance(pid, int):
        who, fix = "a process that has just started", "one run directory has one run: stop the other"
    elif alive or not here:
        who, fix = f"process {pid} on {holder.get('host')}", f"one run directory has one run: stop process {pid}"
    else:  # its number may belong to somebody else by now: that one is not to be stopped
        who = f"a child of process {pid}, which has ended"
        fix = f"find the child with: fuser {path.with_name(NAME)}"
    return StorageError(
        f"another process holds the ledger: {who}", code="STO116", where=str(path), why="it is locked", fix=fix
    )
