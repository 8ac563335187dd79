"""Memory bounded by the kernel's control groups, where this process may make some: version 1, version 2, or none.

A group a candidate at a time, used again by the next, below this process's own group or beside it. The candidate
enters its group by itself, through a file that was opened here, before anything of it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "slime-sandbox-"


class ControlGroup:
    """One control group. ``procs`` is the descriptor by which a process enters it."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self._version = folder, version
        self._limit = 0
        folder.mkdir()
        try:
            self.procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            folder.rmdir()
            raise
        self._killed = 0

    def begin(self, limit: int) -> None:
        """Bound what enters next to ``limit`` bytes, swap included. Raises `OSError`."""
        if limit != self._limit:
            if self._version == 1:
                for name, value in (("memory.memsw", -1), ("memory", limit), ("memory.memsw", limit)):
                    with suppress(FileNotFoundError):  # a kernel that does not count swap
                        self._write(f"{name}.limit_in_bytes", value)
            else:
                self._write("memory.max", limit)
                with suppress(FileNotFoundError):
                    self._write("memory.swap.max", 0)
            self._limit = limit
        self._killed = self._kills()

    def ran_out(self) -> bool:
        """Whether the kernel killed for memory since :meth:`begin`."""
        return self._kills() > self._killed

    def close(self) -> None:
        """Remove it; a group that still has processes stays."""
        os.close(self.procs)
        with suppress(OSError):
            self.folder.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))

    def _kills(self) -> int:
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        words = (self.folder / name).read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


class Groups:
    """Where groups can be made, and those that nobody uses now."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self._version = folder, version
        self._free: list[ControlGroup] = []
        self._count = 0
        for stale in folder.glob(f"{PREFIX}*"):  # of a process that was killed
            if not Path("/proc", stale.name.split("-")[2]).exists():
                with suppress(OSError):
                    stale.rmdir()

    @classmethod
    def find(cls) -> Groups | None:
        """Where this machine lets this process make groups that bound memory; None where it does not."""
        for folder, version in _places():
            with suppress(OSError, ValueError):
                groups = cls(folder, version)
                first = groups.take(1 << 30)
                groups.give(first)
                return groups
        return None

    def take(self, limit: int) -> ControlGroup:
        """A group of ``limit`` bytes. Raises `OSError`."""
        while self._free:
            group = self._free.pop()
            try:
                group.begin(limit)
            except OSError:  # what the one before left there does not fit into less
                group.close()
                continue
            return group
        self._count += 1
        group = ControlGroup(self.folder / f"{PREFIX}{os.getpid()}-{id(self):x}-{self._count}", self._version)
        try:
            group.begin(limit)
        except OSError:
            group.close()
            raise
        return group

    def give(self, group: ControlGroup) -> None:
        """Back, when nothing is left in it."""
        self._free.append(group)

    def close(self) -> None:
        """Remove all groups that are not in use."""
        while self._free:
            self._free.pop().close()


def _places() -> Iterator[tuple[Path, int]]:
    """Folders that may take a group of ours: with version 2 a group with processes cannot, its parent may."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory" + path), 1
    for _, controllers, path in lines:
        if not controllers:
            group = Path("/sys/fs/cgroup" + path)
            for folder in (group, group.parent):
                with suppress(OSError):
                    if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                        yield folder, 2
