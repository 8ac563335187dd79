"""A long run gives back what it takes: memory, files, threads, processes, temporary files stay where they were."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from durability.world import SCENARIOS, World, install
from slime_core.ledger import schema

TOOLS = Path(__file__).parents[2] / "tools"
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


def long_run(steps: int) -> list[dict[str, int]]:
    """A row for every fifth step of a run that goes ahead of training, drops groups, makes checkpoints and prunes."""
    schema.CACHE_KIB = 128  # full after a hundred steps: what still grows then is no cache
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


def soak(steps, timeout):
    """The rows of a long run in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TOOLS}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(rows, limit):
    """After the first third nothing grows (what is open for a moment is no growth); memory by less than ``limit`` bytes
    a step."""
    third = len(rows) // 3
    early, late = rows[third : 2 * third], rows[2 * third :]
    for name in ("files", "threads", "children", "shared", "temporary"):
        assert min(row[name] for row in late) <= max(row[name] for row in early), name
    assert max(row["children"] for row in rows) == 0
    assert rows[-1]["temporary"] == 0
    means = [sum(row["rss"] for row in part) / len(part) for part in (early, late)]
    slope = (means[1] - means[0]) / third / 5  # a row for every fifth step
    print(f"{5 * len(rows)} steps: {slope:.0f} bytes a step, {late[-1]}")
    assert slope < limit


@pytest.mark.nightly
@pytest.mark.integration
def test_three_hundred_steps_leave_nothing_behind():
    check(soak(300, 250), limit=8192)  # the allocator's own steps are most of it here; nightly is strict


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_steps_leave_nothing_behind():
    check(soak(1000, 1700), limit=1024)


if __name__ == "__main__":
    print(json.dumps(long_run(int(sys.argv[1]))))
