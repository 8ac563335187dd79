"""Every process that ran in a run directory, from ``run.json``, and the traceback that one left."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_core.errors import StorageError
from slime_core.report.rundir import RunDir, now

STARTS = 200
"""Newest starts kept in ``run.json``."""


def begin(run_dir: RunDir, version: int, facts: Mapping[str, Any], *, kind: str = "") -> None:
    """Note in ``run.json`` that a process starts from ``version``; ``facts`` are merged into the entry.

    Two starts of one ``kind`` give the same bits.
    """
    start = {
        "epoch": run_dir.epoch,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": now(),
        "from_version": version,
        "kind": kind,
        "status": "running",
    }
    run_dir.write_info({**facts, "status": "running", "starts": [*starts_of(run_dir), start][-STARTS:]})


def end(run_dir: RunDir, status: str, facts: Mapping[str, Any]) -> None:
    """Note how the process ends: finished, stopped, interrupted, terminated or failed."""
    starts = starts_of(run_dir)
    if starts and starts[-1].get("epoch") == run_dir.epoch:
        starts[-1] |= {"status": status, "ended": now(), **facts}
    run_dir.write_info({**facts, "status": status, "starts": starts})


def starts_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """Every process that ran here, the oldest first; one that was killed is still "running"."""
    starts = run_dir.read_info().get("starts")
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def save_error(run_dir: RunDir, name: str, text: str) -> Path:
    """Keep a traceback as ``errors/NAME.txt`` (or NAME-1, ...); the answer is its path."""
    for number in range(10_000):
        path = run_dir.errors / (f"{name}.txt" if number == 0 else f"{name}-{number}.txt")
        with suppress(FileExistsError), path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
            return path
    raise StorageError(f"too many files in {run_dir.errors}", code="STO120")
