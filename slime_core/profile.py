"""torch's profiler over one step of a run (`report.profile`): RUN/profile/step-N-NAME.json, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_core.notices import notice

ENGINE_SECONDS = 1.0
"""What is recorded of an engine's generation; a whole step of it would be a file of gigabytes."""


class StepProfile:
    """The profile of step ``step``, counted from 1, in one process; 0 is none. An engine may be ``ahead`` some steps.

    Example:
        profile = StepProfile(run_dir / "profile", step=3)
        with profile.record(3, "train-rank0"):
            ...
    """

    def __init__(self, folder: Path, step: int, ahead: int = 0) -> None:
        self._folder, self._step, self._first = folder, step, max(1, step - ahead)
        self._names: set[str] = set()  # what was recorded

    def due(self, step: int, name: str) -> bool:
        """Whether :meth:`record` would record."""
        return self._first <= step <= self._step and name not in self._names

    @contextmanager
    def record(self, step: int, name: str) -> Iterator[None]:
        """Record what this thread computes inside the block, the first time that it is of the step."""
        if not self.due(step, name):
            yield
            return
        self._names.add(name)
        import torch
        from torch.profiler import ProfilerActivity, profile

        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True) as recorder:
            yield
        path = self._folder / f"step-{self._step}-{name}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            notice(("profile", name), f"the profile {path} cannot be written: {error}")
