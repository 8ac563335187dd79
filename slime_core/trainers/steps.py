"""What became of each optimizer step: made, or skipped and why; and the figures of a whole step.

A step is skipped where every token is masked, where no term has a gradient (all rewards of a group equal, and no KL or
entropy term acts), and, up to ``train.max_nonfinite_steps`` in a row, where a loss or gradient is not finite. Nothing
changes then: no weight, no moment of AdamW, no place in the schedule.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime_core.trainers.checks import ids_of, not_finite

if TYPE_CHECKING:
    from slime_core.trainers.portion import Portion

log = logging.getLogger(__name__)

Fate = Literal["made", "masked", "no_gradient", "nonfinite", "critic_only"]
SKIPS: tuple[Fate, ...] = ("masked", "no_gradient", "nonfinite")
FILE = "nonfinite.jsonl"


@dataclass(slots=True)
class Outcome:
    """One optimizer step. ``metrics`` are empty where there was nothing to measure."""

    fate: Fate
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Guard:
    """Counts steps in a row whose loss or gradient is not finite, and stops the run after ``most`` of them.

    Sample ids are appended to ``errors / "nonfinite.jsonl"``, one JSON object a skipped step.
    """

    most: int = 0  # train.max_nonfinite_steps
    errors: Path | None = None  # the run's folder, where this rank writes
    in_a_row: int = 0

    def skip(self, portion: Portion, bad: list[int], loss: float, norm: float) -> Outcome:
        """A step that is not finite.

        Args:
            bad: samples whose loss is not finite, places in ``portion.ids``; empty where only the gradient is not

        Raises:
            TrainerError: TRN95, one more than ``most`` in a row.
        """
        ids, version = portion.ids, portion.batch.version
        self.in_a_row += 1
        if self.in_a_row > self.most:
            raise not_finite(version, ids, bad, loss, norm)
        named = ids_of(ids, bad) if bad else "all of the step"
        log.warning(
            "step %d: the loss is %s, the gradient norm %s; skipped, %d in a row of at most %d; samples: %s",
            version, loss, norm, self.in_a_row, self.most, named,
        )  # fmt: skip
        if self.errors is not None:
            row = {
                "step": version,
                "samples": [ids[i] for i in bad] or ids,
                "loss": str(loss),
                "grad_norm": str(norm),
                "in_a_row": self.in_a_row,
            }
            self.errors.mkdir(parents=True, exist_ok=True)
            with (self.errors / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return Outcome("nonfinite")

    def passed(self) -> None:
        """A step was finite."""
        self.in_a_row = 0


def summary(outcomes: Sequence[Outcome], trained: float) -> dict[str, float]:
    """Means over the optimizer steps that have a figure, and counts of what became of them.

    ``optimizer_steps`` counts those that changed the policy, ``skipped_steps`` those that changed nothing, and
    ``skipped_steps/REASON`` says why, where any was. ``trained`` are the batch's trainable tokens.
    """
    fates = [outcome.fate for outcome in outcomes]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
    figures: dict[str, float] = {"loss": 0.0}
    for name in names:
        values = [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]
        figures[name] = values[-1] if name.endswith("lr") else sum(values) / len(values)
    counts = {f"skipped_steps/{why}": float(fates.count(why)) for why in SKIPS if why in fates}
    if "critic_only" in fates:
        counts["critic_only_steps"] = float(fates.count("critic_only"))
    return {
        "lr": 0.0,
        **figures,
        "train_tokens": trained,
        "optimizer_steps": float(fates.count("made")),
        "skipped_steps": float(sum(why in SKIPS for why in fates)),
        **counts,
    }
