"""The most memory that a process had in each phase of a run: RUN/memory/NAME.json, beside which `slime plan` looks.

On a GPU it is what torch's allocator had at most, on a processor the process's resident memory. A file is written
again where a phase has needed more than before, which ends after a few steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from slime_core.durable import replace_file

Result = TypeVar("Result")
GROWTH = 1.005  # times the peak before, from which a file is written


class PhasePeaks:
    """Peaks of one process.

    Example:
        peaks = PhasePeaks(run_dir / "memory" / "rank-0.json", "cuda")
        metrics = peaks.during("train", worker.step, batch)
    """

    def __init__(self, file: Path | None, device: str) -> None:
        self._file, self._cuda = file, device.startswith("cuda")
        self._peaks: dict[str, int] = {}
        self._start = _resident("VmRSS") if file is not None and not self._cuda else 0

    def during(self, phase: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function, and note the most memory that there was meanwhile."""
        if self._file is None:
            return function(*args)
        self._reset()
        try:
            return function(*args)
        finally:
            self._note(phase, self._peak())

    def _reset(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError):  # a system without it: the peak is that of the process
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        if not self._cuda:
            return _resident("VmHWM")
        import torch

        return int(torch.cuda.max_memory_allocated())

    def _note(self, phase: str, peak: int) -> None:
        assert self._file is not None
        if peak <= GROWTH * self._peaks.get(phase, 0) or sys.is_finalizing():
            return
        self._peaks[phase] = peak
        facts = {"device": self._device(), "start": self._start, "peaks": self._peaks}
        with suppress(OSError):  # figures, without which the run goes on
            self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, json.dumps(facts).encode())

    def _device(self) -> str:
        if not self._cuda:
            return "cpu"
        import torch

        return torch.cuda.get_device_name()


def _resident(name: str) -> int:
    """Bytes of a line of /proc/self/status; 0 where the system has none."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10
    return 0
