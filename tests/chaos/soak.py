"""A long run in this process, looked at as it goes; prints a JSON list with a row for every fifth step.

python tests/chaos/soak.py 300
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "tools"))

from world import SCENARIOS, World, install

from slime_core.ledger import schema

schema.CACHE_KIB = 128  # full after a hundred steps: what still grows then is no cache

THREADS = 4
PAGE = os.sysconf("SC_PAGE_SIZE")


class Gauge:
    """A sink that looks at its own process."""

    def __init__(self, temporary: Path) -> None:
        self.temporary, self.rows = temporary, list[dict[str, int]]()

    def start(self, run_dir: Path, config: Any) -> None:
        """Have all threads of asyncio's pool, which begins one whenever none is idle: how late depends on the machine."""
        pool = ThreadPoolExecutor(THREADS)
        asyncio.get_running_loop().set_default_executor(pool)
        together = threading.Barrier(THREADS)
        list(pool.map(lambda _: together.wait(), range(THREADS)))

    def write(self, report: Any) -> None:
        if report.version % 5:
            return
        gc.collect()
        children = [task.read_text().split() for task in Path("/proc/self/task").glob("*/children")]
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
        self.rows.append(
            {
                "rss": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "children": sum(map(len, children)),
                "shared": sum("ledger.sqlite" not in line for line in maps),
                "temporary": len(os.listdir(self.temporary)),
            }
        )

    def close(self) -> None:
        """Nothing is open."""


def soak(steps: int) -> list[dict[str, int]]:
    """A run that goes ahead of training, drops groups, makes a checkpoint every second step, and prunes."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="slime-soak-", dir=shared if shared.is_dir() else None))
    try:
        tempfile.tempdir = str(folder / "tmp")
        Path(tempfile.tempdir).mkdir()
        install(folder / "site")
        gauge = Gauge(folder / "tmp")
        with contextlib.redirect_stdout(sys.stderr):
            World(SCENARIOS["lockstep"], folder / "world", steps=steps, sinks=[gauge]).start(False)
        return gauge.rows
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]))))
