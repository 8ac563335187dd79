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

    Example: remove(Path("/tmp/slime-sglang-1x2y"))
    """
    if not folder.exists():
        return  # the launcher has done it
    with suppress(OSError):
        wanted = {line for line in (folder / LIST).read_text().splitlines() if os.path.dirname(line) == "/dev/shm"}
        for path in wanted - (_used() if wanted else set()):
            with suppress(OSError):
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _used() -> set[str]:
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= {line[line.index("/dev/shm/") :] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found
