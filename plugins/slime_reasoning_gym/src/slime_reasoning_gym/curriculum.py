"""Levels that follow the measured success, as a function of what was trained.

A row keeps the level at which it was first drawn: a level holds from an index of the task's rows on. So a resumed run,
which draws the open rows again, draws the same ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_reasoning_gym.options import Options


@dataclass(slots=True)
class Levels:
    """The levels of one task in one stage.

    Example:
        levels = Levels(starts=[(0, 2)], top=5)
        levels.at(17)                                 # 2
        levels.rewards += [1.0] * 32
        levels.move(options)                          # 1.0, and rows from 18 on have level 3
    """

    starts: list[tuple[int, int]]  # (first row, level), in order
    top: int  # highest level
    next_row: int = 0  # rows below it have their level
    rewards: list[float] = field(default_factory=list)  # mean of each group of the current level

    @property
    def current(self) -> int:
        """The level of rows to come."""
        return self.starts[-1][1]

    def at(self, index: int) -> int:
        """The level of a row."""
        self.next_row = max(self.next_row, index + 1)
        return self.starts[bisect_right(self.starts, index, key=lambda start: start[0]) - 1][1]

    def move(self, options: Options) -> float | None:
        """Change the level where the last groups call for it; the success that it was changed for, else None."""
        self.rewards = self.rewards[-options.level_groups :]
        if len(self.rewards) < options.level_groups:
            return None
        success = sum(self.rewards) / len(self.rewards)
        step = (success >= options.level_up) - (success <= options.level_down)
        if step == 0 or not 0 <= self.current + step <= self.top:
            return None
        self.starts.append((self.next_row, self.current + step))
        self.rewards = []
        return success


class Curriculum:
    """The levels of all tasks: what the plugin keeps in a checkpoint."""

    def __init__(self) -> None:
        self.levels: dict[tuple[str, str], Levels] = {}  # by stage and task

    def open(self, stage: str, task: str, start: int, top: int) -> Levels:
        """The levels of a task in a stage: those of the checkpoint, or new ones from ``start`` on."""
        return self.levels.setdefault((stage, task), Levels(starts=[(0, min(start, top))], top=top))

    def state(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"levels": [[*place, asdict(levels)] for place, levels in self.levels.items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.levels = {
            (stage, task): Levels(**{**saved, "starts": [tuple(start) for start in saved["starts"]]})
            for stage, task, saved in state["levels"]
        }

    def clear(self) -> None:
        """Forget a run that is over."""
        self.levels.clear()
