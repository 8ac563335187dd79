"""What the benchmarks of recipes share: train one with several seeds, one after another; a row of a table for each.

A benchmark says which words follow `slime run`, what the columns are, and how an outcome is read from a run:

    sys.exit(main(__doc__, Recipe(words=("--plugin", "rm_math"), seeds=5, columns=("seed", "accuracy"), read=read)))
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Figures = dict[str, float]
"""Metrics of an evaluation, such as ``reward/mean``."""


@dataclass(slots=True, frozen=True)
class Run:
    """A run that ended well."""

    seed: int
    folder: Path  # its run directory
    seconds: float  # wall time of the process, start-up included
    processor: float = 0.0  # seconds of processors, of its children too; other load does not change it

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of its metrics, in order."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> int:
        """Training steps, of every stage."""
        return sum(row["kind"] == "step" for row in self.rows)

    def evaluated(self, name: str) -> tuple[Figures, Figures]:
        """An evaluation set's metrics after the first stage (a warm-up, where there are two) and at the end."""
        steps = [row for row in self.rows if row["kind"] == "step"]
        first_ends = max(row["version"] for row in steps if row["stage"] == steps[0]["stage"])
        figures = {row["version"]: row["metrics"] for row in self.rows if row.get("name") == name}
        return figures[first_ends], figures[max(figures)]


class Outcome(Protocol):
    """What a seed reached."""

    @property
    def good(self) -> bool:
        """Whether every target was met."""
        ...

    @property
    def row(self) -> str:
        """A line of the table."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Recipe:
    """A recipe that is trained, and its table."""

    words: tuple[str, ...]  # that follow `slime run`; a recipe's path is absolute
    columns: tuple[str, ...]
    read: Callable[[Run], Outcome]
    seeds: int  # how many, unless --seeds says otherwise
    name: str = ""  # folder of its runs and logs, where there are several recipes


def train(seed: int, words: tuple[str, ...], folder: Path) -> Run:
    """Train with one seed in a process of its own; its log is ``folder/seed-N.log``. SystemExit where it fails."""
    run_dir = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "slime_cli.main", "run", *words, "--seed", str(seed), "--run-dir", str(run_dir)]
    return Run(seed, run_dir, *timed(command, folder, folder / f"seed-{seed}.log"))


def timed(command: Sequence[str], folder: Path, log: Path, **env: str) -> tuple[float, float]:
    """A process in ``folder``, to its end: seconds of the wall, and of processors, of its children too.

    Raises:
        SystemExit: it failed.
    """
    start, used = time.monotonic(), _children()
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    seconds, processor = time.monotonic() - start, _children() - used
    log.write_text(done.stderr + done.stdout)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds, processor


def _children() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(recipe: Recipe, args: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Train with every seed and print the table, a row as soon as it is known."""
    words, place = (*recipe.words, *args.extra), folder / recipe.name
    place.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} cores; slime run {' '.join(words)} --seed SEED\n")
    print(f"| {' | '.join(recipe.columns)} |  |")
    print(f"|{' --- |' * (len(recipe.columns) + 1)}", flush=True)
    outcomes = []
    count = recipe.seeds if args.seeds is None else args.seeds
    for seed in range(args.first, args.first + count):
        outcomes.append(recipe.read(train(seed, words, place)))
        print(outcomes[-1].row, flush=True)
    return outcomes


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments of every such benchmark."""
    found = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    found.add_argument("--seeds", type=int, help="how many seeds to run")
    found.add_argument("--first", type=int, default=0, help="the first of them")
    found.add_argument("--keep", type=Path, help="keep the run directories and logs in this folder")
    found.add_argument("extra", nargs="*", help="further overrides, such as train.dtype=float32")
    return found


def main(doc: str | None, *recipes: Recipe, words: list[str] | None = None) -> int:
    """Print the tables; the answer is the exit code, 1 where a seed missed a target."""
    args = parser(doc).parse_args(words)
    with tempfile.TemporaryDirectory(prefix="slime-seeds-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        outcomes = [one for recipe in recipes for one in table(recipe, args, folder)]
    return 0 if all(one.good for one in outcomes) else 1
