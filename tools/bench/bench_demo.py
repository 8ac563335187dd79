"""Run the demo's recipe over several seeds, one after another, and print a Markdown table of what each reached.

    python tools/bench/bench_demo.py --seeds 5

Exit code 1 where a seed misses a target: at most 0.5 after the warm-up, at least 0.9 at the end, within 180 seconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from recipe_seeds import Recipe, Run, main

AFTER_WARMUP, AT_THE_END, SECONDS = 0.5, 0.9, 180.0
HELDOUT = "arithmetic_heldout"


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one seed reached."""

    seed: int
    warmup: float  # held-out accuracy after the first stage
    final: float  # held-out accuracy at the end
    steps: int
    seconds: float  # wall time of the process, start-up included

    @property
    def good(self) -> bool:
        """Whether every target was met."""
        return self.warmup <= AFTER_WARMUP and self.final >= AT_THE_END and self.seconds <= SECONDS

    @property
    def row(self) -> str:
        """A line of the table."""
        verdict = "ok" if self.good else "missed"
        return (
            f"| {self.seed} | {self.warmup:.3f} | {self.final:.3f} | {self.steps} | {self.seconds:.0f} | {verdict} |"
        )


def read(run: Run) -> Outcome:
    """The outcome from a run's metrics."""
    before, after = (figures["reward/mean"] for figures in run.evaluated(HELDOUT))
    return Outcome(run.seed, before, after, run.steps, run.seconds)


DEMO = Recipe(
    words=("--plugin", "rm_math"),
    seeds=5,
    columns=("seed", "held-out after warm-up", "held-out at the end", "steps", "seconds"),
    read=read,
)

if __name__ == "__main__":
    sys.exit(main(__doc__, DEMO))
