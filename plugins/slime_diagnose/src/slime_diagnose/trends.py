"""Whether a series of figures, one a step, rises or falls beyond its own noise. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

LONG = 15
"""Steps of a series that has a trend; below, its ends are too few steps to tell from noise."""
SURE = 4.0
"""Standard errors of a change that is taken for one: by chance, one series in 16,000 has it."""


@dataclass(slots=True, frozen=True)
class Course:
    """A series' first and last fifth, and the standard error of their difference.

    Example:
        course_of([0.1] * 10 + [0.9] * 10).up
    """

    early: float  # mean of the first fifth
    late: float  # mean of the last fifth
    error: float  # of late - early, where steps are independent
    steps: int

    @property
    def change(self) -> float:
        """From the first fifth to the last."""
        return self.late - self.early

    @property
    def up(self) -> bool:
        """Whether it rises by more than chance gives."""
        return self.change > SURE * self.error and self.change > 0

    @property
    def down(self) -> bool:
        """Whether it falls by more than chance gives."""
        return -self.change > SURE * self.error and self.change < 0

    def __str__(self) -> str:
        return f"{self.early:.4g} -> {self.late:.4g} over {self.steps} steps"


def course_of(values: Sequence[float]) -> Course | None:
    """The trend of at least `LONG` values; None for fewer.

    The noise of a step is estimated from differences of neighbours, so that a slope does not count as noise: its
    variance is half the mean squared difference (von Neumann et al. 1941, the mean square successive difference).
    """
    if len(values) < LONG:
        return None
    count = len(values) // 5
    squares = [(after - before) ** 2 for before, after in pairwise(values)]
    error = math.sqrt(fmean(squares) / count)  # sqrt(2 variance / count)
    return Course(fmean(values[:count]), fmean(values[-count:]), error, len(values))


def moving(values: Sequence[float], width: int = 5) -> list[float]:
    """Means of ``width`` neighbours; as many as there are windows, at least one for a series that is not empty."""
    windows = max(1, len(values) - width + 1)
    return [fmean(values[start : start + width]) for start in range(windows)] if values else []


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation; 0 where either side does not vary."""
    if len(pairs) < 2:
        return 0.0
    mean_x, mean_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    xx, yy = sum((x - mean_x) ** 2 for x, _ in pairs), sum((y - mean_y) ** 2 for _, y in pairs)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else 0.0


def middle(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0
