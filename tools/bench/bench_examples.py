"""Run the examples that learn over several seeds, and write what each learnt into docs/examples.md.

    python tools/bench/bench_examples.py                            # all, seeds 0 to 4; prints a row a run
    python tools/bench/bench_examples.py search tool_use --seeds 2  # some of them
    python tools/bench/bench_examples.py --write                    # the table of docs/examples.md, too
    python tools/bench/bench_examples.py dr_grpo -- train.lr=2e-3   # with flags

An example learns if its recipe has two stages and an evaluation: what is told are its first evaluation set's mean
rewards after the first stage and at the end, and the processor time of the whole run. Exit code 1 where a run failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe_seeds import Run, timed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "examples.md"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one run of an example reached."""

    before: float  # held-out reward after the first stage
    after: float  # held-out reward at the end
    seconds: float  # of processors, start-up included


def learning() -> list[str]:
    """Names of the examples that learn."""
    found = []
    for recipe in sorted(ROOT.glob("examples/*/recipe.toml")):
        table = tomllib.loads(recipe.read_text())
        if len(table.get("stage", ())) > 1 and "eval" in table:
            found.append(recipe.parent.name)
    return found


def run(name: str, seed: int, folder: Path, extra: Sequence[str]) -> Outcome:
    """Train with one seed in a process of its own, and read its metrics."""
    run_dir, place = folder / f"{name}-{seed}", ROOT / "examples" / name
    command = [str(Path(sys.executable).with_name("slime")), "run", str(place / "recipe.toml")]
    if (place / "run_all.py").exists():  # the run needs other processes
        command = [sys.executable, str(place / "run_all.py")]
    if (place / "teacher.toml").exists():
        extra = ["--teacher-load", str(teacher(place, folder) / "final"), *extra]
    command += ["--seed", str(seed), "--run-dir", str(run_dir), *extra]
    return read(Run(seed, run_dir, *timed(command, folder, folder / f"{run_dir.name}.log", **ONE_THREAD)))


def teacher(place: Path, folder: Path) -> Path:
    """The run of the example's teacher, made once; its seconds count for no seed."""
    run_dir = folder / f"{place.name}-teacher"
    if not run_dir.exists():
        slime = str(Path(sys.executable).with_name("slime"))
        command = [slime, "run", str(place / "teacher.toml"), "--run-dir", str(run_dir)]
        timed(command, folder, folder / f"{run_dir.name}.log", **ONE_THREAD)
    return run_dir


def read(done: Run) -> Outcome:
    """The outcome from a run's metrics, by the evaluation set that comes first."""
    name = next(row["name"] for row in done.rows if row["kind"] == "eval")
    before, after = (figures["reward/mean"] for figures in done.evaluated(name))
    return Outcome(before, after, done.processor)


def span(values: Sequence[float], digits: int) -> str:
    """Least and greatest, `0.41 to 0.47`."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write(name: str, cells: Sequence[str]) -> None:
    """The last three cells of the example's row of the page.

    Raises:
        SystemExit: the page has no such row.
    """
    row = re.compile(rf"^(\| \[{name}\]\([^|]*\|[^|]*\|[^|]*\|).*$", flags=re.M)
    text, count = row.subn(lambda found: f"{found[1]} {' | '.join(cells)} |", PAGE.read_text())
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} rows of {name}")
    PAGE.write_text(text)


def main() -> int:
    """Print a table; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of examples/; without one, all that learn")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--keep", type=Path, help="keep the run directories in this folder")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/examples.md")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, extra = parser.parse_args(given[:cut]), given[cut + 1 :]
    print("| example | seed | after the warm-up | at the end | processor seconds |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="slime-examples-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.names or learning():
            found = []
            for seed in range(args.first, args.first + args.seeds):
                one = run(name, seed, folder, extra)
                found.append(one)
                print(f"| {name} | {seed} | {one.before:.3f} | {one.after:.3f} | {one.seconds:.0f} |", flush=True)
            spans = [
                span([one.before for one in found], 2),
                span([one.after for one in found], 2),
                span([one.seconds for one in found], 0),
            ]
            print(f"| {name} | all | {' | '.join(spans)} |", flush=True)
            if args.write:
                write(name, spans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
