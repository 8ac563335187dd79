"""A file as it was when it was opened: its first bytes, their hash, and an error when they are no longer there.

The file is looked at (one `stat`) whenever a row is read. Where it is gone, shorter, or another one with other bytes,
the run ends with DAT37; its ledger holds what was made, and `slime run --resume` goes on when the file is back. Bytes
that someone appends are not read in this run, nor in one that resumes it.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from slime_core.errors import DataError
from slime_core.notices import NOTICES

BLOCK = 4 << 20
BACK = "put the file back as it was, then: slime run --resume RUN_DIR"


class Pin:
    """The first ``size`` bytes of a file.

    Example:
        pin = Pin(path, os.fstat(fd), size=1200, digest="9f86...")
        pin.check()
    """

    def __init__(self, path: Path, seen: os.stat_result, *, size: int, digest: str) -> None:
        self.path, self.size, self.digest = path, size, digest
        self._seen = _key(seen)

    def check(self) -> None:
        """Look at the file.

        Raises:
            DataError: DAT37 with the path, what was expected and what was found.
        """
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise self.lost("is gone", f"found nothing: {error.strerror}") from error
        if _key(found) == self._seen:
            return
        if found.st_size < self.size:
            raise self.lost("was cut short", f"found {found.st_size} bytes")
        same_file = self._seen[:2] == _key(found)[:2]
        if not same_file or found.st_size == self.size:
            self._compare("was changed" if same_file else "was replaced", found.st_size)
        if found.st_size > self.size:
            NOTICES.say(
                ("appended", str(self.path)),
                f"{self.path}: {found.st_size - self.size} bytes were appended since it was opened; "
                f"this run reads the first {self.size} bytes only",
            )
        self._seen = _key(found)

    def lost(self, what: str, found: str) -> DataError:
        """The error of a file that is no longer what it was."""
        return DataError(
            f"{self.path.name} {what} during the run",
            code="DAT37",
            where=str(self.path),
            why=f"expected {self.size} bytes, sha256 {self.digest}; {found}",
            fix=BACK,
        )

    def _compare(self, what: str, size: int) -> None:
        try:
            digest = digest_of(self.path, self.size)
        except OSError as error:
            raise self.lost(what, f"it cannot be read: {error.strerror}") from error
        if digest != self.digest:
            raise self.lost(what, f"found {size} bytes, sha256 of the first {self.size}: {digest}")


def digest_of(path: Path, size: int) -> str:
    """sha256 of a file's first ``size`` bytes, in hex."""
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        while size > 0 and (block := file.read(min(BLOCK, size))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _key(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
