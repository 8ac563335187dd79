"""Wall seconds of a step, by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StepClock:
    """Measure the parts of one step.

    Example:
        with clock.part("train"):                    # adds to clock.seconds["train"]
            ...
    """

    seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], None] = lambda name: None  # called with the part that begins, and with "" at its end
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # around each part

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to ``name``."""
        start = time.monotonic()
        self.phase(name)
        try:
            with self.span(name):
                yield
        finally:
            self.phase("")
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
