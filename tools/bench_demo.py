"""Run the demo's recipe over several seeds, one after another, and print a Markdown table of what each reached.

    python tools/bench_demo.py --seeds 5

Exit code 1 where a seed misses a target: at most 0.5 after the warm-up, at least 0.9 at the end, within 180 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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


def run_seed(seed: int, folder: Path, extra: list[str]) -> Outcome:
    """Train with one seed in a process of its own and read its metrics."""
    run_dir = folder / f"seed-{seed}"
    slime = Path(sys.executable).with_name("slime")
    command = [str(slime), "run", "--plugin", "rm_math", "--seed", str(seed), "--run-dir", str(run_dir), *extra]
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - start
    (folder / f"seed-{seed}.log").write_text(done.stderr + done.stdout)
    if done.returncode:
        raise SystemExit(f"seed {seed} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return read(seed, run_dir, seconds)


def read(seed: int, run_dir: Path, seconds: float) -> Outcome:
    """The outcome from a run directory's metrics."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    warmup_end = max(row["version"] for row in steps if row["stage"] == steps[0]["stage"])
    accuracy = {row["version"]: row["metrics"]["reward/mean"] for row in rows if row.get("name") == HELDOUT}
    return Outcome(seed, accuracy[warmup_end], accuracy[max(accuracy)], len(steps), seconds)


def main() -> int:
    """Print the table; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--keep", type=Path, help="keep the run directories and logs in this folder")
    parser.add_argument("extra", nargs="*", help="further overrides, such as train.dtype=float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-demo-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{os.cpu_count()} cores; slime run --plugin rm_math --seed SEED {' '.join(args.extra)}\n")
        print("| seed | held-out after warm-up | held-out at the end | steps | seconds |  |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        outcomes = []
        for seed in range(args.first, args.first + args.seeds):
            one = run_seed(seed, folder, args.extra)
            outcomes.append(one)
            verdict = "ok" if one.good else "missed"
            print(
                f"| {seed} | {one.warmup:.3f} | {one.final:.3f} | {one.steps} | {one.seconds:.0f} | {verdict} |",
                flush=True,
            )
    return 0 if all(one.good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
