"""What is left of a server whose launcher was killed too: its temporary folder, and what it had in shared memory."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

LIST = "shared-memory"
"""File in a server's temporary folder; the launcher writes there what the server has in /dev/shm, a path a line."""


def remove(folder: Path) -> None:
    """Remove a dead server's temporary folder and its files in shared memory that no living process uses.

    Example: remove(Path("/tmp/slime-server-1x2y"))
    """
    if not folder.exists():
        return  # the launcher has done it
    with suppress(OSError):
        wanted = {line for line in (folder / LIST).read_text().splitlines() if os.path.dirname(line) == "/dev/shm"}
        used = _used() if wanted else set()
        for path in wanted:
            with suppress(OSError):
                if str(os.stat(path).st_ino) not in used:
                    os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _used() -> set[str]:
    """Inodes of what processes have mapped of it: a semaphore's file has another name by then."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= {line.split(maxsplit=5)[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found
