"""Run kernelbench's default recipe over several seeds, one after another, and print what each reached.

    python tools/bench/bench_kernel_demo.py --seeds 3

Correct is the share of dialogues about held-out operators and shapes that end with a kernel which the judge accepts,
sampled at temperature 1. Exit code 1 where a seed misses a target: at most 0.3 after the warm-up, at least 0.6 at the
end, within 600 seconds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from recipe_seeds import Recipe, Run, main

BEFORE, AFTER, SECONDS = 0.3, 0.6, 600.0
HELDOUT = "kernelbench_family_heldout"
TURN, DIALOGUE = "reward/turn1_correct/mean", "reward/solved/mean"


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one seed reached; pairs are (after the warm-up, at the end)."""

    seed: int
    solved: tuple[float, float]  # dialogues with a right kernel
    first: tuple[float, float]  # right kernels at the first turn
    judged: int  # answers with code, in training and evaluations
    seconds: float  # wall time of the process, start-up included

    @property
    def good(self) -> bool:
        """Whether every target was met."""
        before, after = self.solved
        return before <= BEFORE and after >= AFTER and self.seconds <= SECONDS

    @property
    def row(self) -> str:
        """A line of the table."""
        figures = " | ".join(f"{before:.3f} | {after:.3f}" for before, after in (self.solved, self.first))
        verdict = "ok" if self.good else "missed"
        return f"| {self.seed} | {figures} | {self.judged} | {self.seconds / 60:.1f} | {verdict} |"


def read(run: Run) -> Outcome:
    """The outcome from a run's metrics and turns."""
    before, after = run.evaluated(HELDOUT)
    with (run.folder / "kernelbench" / "turns.jsonl").open() as turns:
        judged = sum(json.loads(line)["source"] is not None for line in turns)
    solved, first = ((before[name], after[name]) for name in (DIALOGUE, TURN))
    return Outcome(run.seed, solved, first, judged, run.seconds)


KERNELS = Recipe(
    words=("--plugin", "kernelbench"),
    seeds=3,
    columns=(
        "seed",
        "correct after warm-up",
        "correct at the end",
        "first turn, before",
        "after",
        "judged",
        "minutes",
    ),
    read=read,
)

if __name__ == "__main__":
    sys.exit(main(__doc__, KERNELS))
