"""Where figures go: a JSON line each, and steps in the shape that trackers behind the Sink protocol take.

A line of ``metrics.jsonl`` is one of

    {"kind": "step", "version": 1, "stage": "main", "step": 0, "of": 40, "metrics": {...}, "seconds": {...}}
    {"kind": "eval", "version": 0, "name": "heldout", "metrics": {...}, "seconds": {...}}
    {"kind": "restart", "version": 3, "number": 1, "of": 3, "cause": "TRN105 trainer rank 1, ..."}

with its metrics sorted by name. All wall times are under ``seconds``, or end in ``_seconds``, memory of a
device that changed hands in ``_bytes``; the rest is a function of the seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_core.types import StepReport


class JsonlSink:
    """Appends to ``metrics.jsonl``, line by line; what cannot be written stays here and is tried again."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._unwritten: list[bytes] = []

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Open the file."""
        self._path = run_dir / "metrics.jsonl"
        self.flush()

    def write(self, report: StepReport) -> None:
        """One step."""
        self._line(
            {
                "kind": "step",
                "version": report.version,
                "stage": report.stage,
                "step": report.step,
                "of": report.of,
                "metrics": _numbers(report.metrics),
                "seconds": _numbers(report.seconds),
            }
        )

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """One evaluation set."""
        rest = {key: value for key, value in metrics.items() if key != "seconds"}
        seconds = {"eval": metrics["seconds"]} if "seconds" in metrics else {}
        self._line(
            {
                "kind": "eval",
                "version": version,
                "name": name,
                "metrics": _numbers(rest),
                "seconds": _numbers(seconds),
            }
        )

    def restart(self, version: int, number: int, of: int, cause: str) -> None:
        """The run restarted from ``version``."""
        self._line({"kind": "restart", "version": version, "number": number, "of": of, "cause": cause})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def flush(self) -> None:
        """Write all lines that are not in the file yet.

        Raises:
            OSError: none of them is then.
        """
        if self._path is None:
            raise RuntimeError("metrics.jsonl is not open")
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size, rest = os.fstat(self._file).st_size, b"".join(self._unwritten)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            self.close()  # the next try opens it anew
            raise
        self._unwritten.clear()

    def _line(self, row: dict[str, Any]) -> None:
        self._unwritten.append(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode())
        self.flush()


def evaluation_report(
    name: str, version: int, metrics: Mapping[str, float], last: StepReport | None = None
) -> StepReport:
    """An evaluation in the shape that trackers take: metrics ``eval/NAME/...`` at the place of the last step.

    Trackers only accept rising steps: an evaluation that ends late is logged at the last step, with its ``version``.
    """
    at = max(version, last.version) if last else version
    late = {f"eval/{name}/version": float(version)} if at > version else {}
    return StepReport(
        version=at,
        stage=last.stage if last else "eval",
        step=last.step if last else 0,
        of=last.of if last else 0,
        metrics={f"eval/{name}/{key}": value for key, value in metrics.items() if key != "seconds"} | late,
        seconds={f"eval/{name}": metrics["seconds"]} if "seconds" in metrics else {},
    )


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """Sorted by name; a value that is not finite becomes null, which JSON has."""
    return {key: (float(values[key]) if math.isfinite(values[key]) else None) for key in sorted(values)}
