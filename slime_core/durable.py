"""The few functions that touch durable state: write a file, make it durable, publish by one rename.

Everything that must survive a crash goes through `disk`, so that a test can record the calls and replay every prefix
of them with any write that was not synced lost or torn.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import StorageError


@dataclass(slots=True, frozen=True, kw_only=True)
class FileMark:
    """What a file must hold: its size in bytes and the sha256 of its content, in hex."""

    size: int
    sha256: str


class Disk:
    """The system calls, one method each. Every method raises OSError."""

    def create(self, path: Path) -> int:
        """A new file, open for writing; the answer is its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """All of ``data`` at ``offset``."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count

    def sync(self, fd: int) -> None:
        """Make the writes through ``fd`` durable. After an error the file's content is unknown."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, replacing a file of that name."""
        os.rename(old, new)

    def make_folder(self, path: Path) -> None:
        """A new folder."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all that is in it."""
        shutil.rmtree(path)


disk = Disk()
"""What every room uses; a test replaces its methods' target by assigning ``durable.disk``."""


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileMark:
    """A new durable file; the mark is of the intended bytes. The folder is not synced.

    Raises:
        OSError: it exists, the disk is full, or the device failed; its content is then unknown.
    """
    digest, size = hashlib.sha256(), 0
    fd = disk.create(path)
    try:
        for part in parts:
            digest.update(part)
            disk.write(fd, part, size)
            size += memoryview(part).nbytes
        disk.sync(fd)
    finally:
        disk.close(fd)
    return FileMark(size=size, sha256=digest.hexdigest())


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in another's place: whole and durable, or the old one stays.

    Raises:
        OSError: as :func:`write_file`.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.unlink(missing_ok=True)
    try:
        write_file(aside, [data])
        disk.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)


def sha256_of(path: Path) -> FileMark:
    """The mark of a file, read from disk.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileMark(size=file.tell(), sha256=digest.hexdigest())


def storage_error(error: OSError, where: Path | str, what: str) -> StorageError:
    """What the system said, with the code and the fix that a user can look up: STO109, 110, 111, 120, 121 or STO00."""
    code, reason, fix = {
        errno.ENOSPC: ("STO109", "the disk is full", "free space, then slime run --resume RUN_DIR"),
        errno.EDQUOT: ("STO109", "the quota is used up", "free space, then slime run --resume RUN_DIR"),
        errno.EROFS: ("STO110", "the file system is read-only", "choose another folder with --run-dir"),
        errno.EACCES: ("STO110", "permission was denied", "make the folder writable, or choose another: --run-dir"),
        errno.EPERM: ("STO110", "permission was denied", "make the folder writable, or choose another: --run-dir"),
        errno.ENOENT: ("STO111", "it is not there", ""),
        errno.EMFILE: ("STO120", "this process has too many files open", "raise the limit: ulimit -n 4096"),
        errno.ENFILE: ("STO120", "the machine has too many files open", "close other programs"),
        errno.EIO: ("STO121", "the device failed", "look at the disk (dmesg), then slime run --resume RUN_DIR"),
    }.get(error.errno or 0, ("STO00", error.strerror or str(error), ""))
    return StorageError(what, code=code, where=str(error.filename or where), why=reason, fix=fix)
