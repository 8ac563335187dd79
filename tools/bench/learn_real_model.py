"""Train examples/real_model over several seeds on one GPU; a table of held-out accuracy by step.

    python tools/bench/smollm2.py FOLDER
    python tools/bench/learn_real_model.py FOLDER --seeds 3 [--keep RUNS] [OVERRIDES of the recipe...]
    python tools/bench/learn_real_model.py --runs RUN...     # the table of runs that are there

Exit code 1 where a seed does not double the accuracy of both held-out sets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from recipe_seeds import Recipe, Run, main

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "real_model" / "recipe.toml"
SETS = ("chain_sum_heldout", "gsm_symbolic_heldout")
COLUMNS = ("seed", *(f"{name}, each 20 steps" for name in SETS), "seconds")


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one seed reached: a set's accuracy by step."""

    seed: int
    curves: tuple[dict[int, float], ...]  # in the order of SETS
    seconds: float

    @property
    def good(self) -> bool:
        """Whether both sets doubled, from the first evaluation to the last."""
        return all(curve[max(curve)] >= 2 * curve[min(curve)] > 0 for curve in self.curves)

    @property
    def row(self) -> str:
        """A line of the table."""
        cells = (" ".join(f"{curve[step]:.3f}" for step in sorted(curve)) for curve in self.curves)
        verdict = "ok" if self.good else "missed"
        return f"| {self.seed} | {' | '.join(cells)} | {self.seconds:.0f} | {verdict} |"


def read(run: Run) -> Outcome:
    """The outcome from a run's metrics."""
    rows = [row for row in run.rows if row["kind"] == "eval"]
    curves = ({row["version"]: row["metrics"]["reward/mean"] for row in rows if row["name"] == name} for name in SETS)
    return Outcome(run.seed, tuple(curves), run.seconds)


def show(runs: list[Path]) -> int:
    """Print the table of run directories, in their order; the answer is the exit code."""
    print(f"| {' | '.join(COLUMNS)} |  |\n|{' --- |' * (len(COLUMNS) + 1)}")
    outcomes = []
    for number, folder in enumerate(runs):
        run = Run(number, folder, 0.0)
        steps = sum(sum(row["seconds"].values()) for row in run.rows if row["kind"] == "step")
        outcomes.append(read(replace(run, seconds=steps)))
        print(outcomes[-1].row)
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--runs"]:
        sys.exit(show([Path(word) for word in sys.argv[2:]]))
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2").resolve() / "model"
    if not model.is_dir():
        sys.exit(f"no model: {model}; python tools/bench/smollm2.py FOLDER")
    words = (str(RECIPE), "--hf-checkpoint", str(model))
    sys.exit(main(__doc__, Recipe(words=words, columns=COLUMNS, read=read, seeds=3), words=sys.argv[2:]))
