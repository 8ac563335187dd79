"""Every algorithm learns two-digit addition on the CPU, over several seeds; the bands of where they end are stored.

    python tools/bench/make_bands.py --jobs 2                     # all of it, about 15 minutes; writes the bands
    python tools/bench/make_bands.py --only grpo,rloo --keep DIR  # some of it; models and runs stay in DIR
    python tools/bench/make_bands.py --check                      # compares with the stored bands and writes nothing

A supervised warm-up a seed imitates a pupil who loses carries. Each algorithm then goes on from that model, with
rewards alone (distillation: with a teacher that was trained longer, on right answers). Two optimizer steps follow
each rollout, so that ratios and clips take part. Prints a Markdown table. Exit code 1 where a run failed, did not
learn, or, with --check, left its band. `tests/e2e/test_learning_curves.py` runs the same, a seed and algorithm a test.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BANDS = ROOT / "tests" / "e2e" / "learning_bands.json"
MODEL = ROOT / "plugins" / "slime_rm_math" / "src" / "slime_rm_math" / "model"
HELDOUT = "arithmetic_heldout"
SEEDS = 5
K, FLOOR = 4.0, 0.02  # a run may end k sigma away, and sigma counts as this at least
LEARNT = 0.1  # held-out accuracy that every seed must gain
BINS = 6  # parts of the reward curve that are compared
TIMEOUT = 600.0

COMMON = f"""
plugins = ["rm_math"]
[cluster]
cpu_threads = 1
device = "cpu"
[data]
rollout_shuffle = true
[rollout]
rollout_max_response_len = 4
rollout_slots = 256
[train]
dtype = "float32"
[eval]
eval_tasks = [{{ name = "{HELDOUT}" }}]
skip_eval_before_train = true
[report]
save_interval = 0
save_samples = 0
[plugin.rm_math]
digits = 2
operations = ["+"]
padded = true
ones_first = true
carry_lost = 0.65
heldout = 0.1
heldout_rows = 500
"""

SUPERVISED = [
    *('data.tasks=[{name = "arithmetic_pupil"}]', "--loss-type", "sft_loss", "--n-samples-per-prompt", "1"),
    *("--rollout-batch-size", "128", "--lr-decay-style", "linear", "--lr", "4e-3", "--min-lr", "2e-4"),
    *("--lr-warmup-iters", "20"),
]
WARMUP = [*SUPERVISED, "--hf-checkpoint", str(MODEL), "--init-weights", "random", "--num-rollout", "400"]
TEACHER = [*SUPERVISED, "--num-rollout", "200", "plugin.rm_math.carry_lost=0.0"]
LEARN = [
    *('data.tasks=[{name = "arithmetic"}]', "--num-rollout", "30", "--rollout-batch-size", "32"),
    *("--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2", "--lr", "6e-4", "--lr-warmup-iters", "6"),
]

ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["--eps-clip-high", "0.28"],
    "dr_grpo": [],
    "gspo": [],
    "cispo": [],
    "rloo": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "ppo": ["--critic-lr", "1e-3", "--num-critic-only-steps", "3", "--gae-lambda", "0.95"],
    "pass_at_k": ["--pass-k", "4"],
    "on_policy_distillation": ["--teacher-load", "{teacher}"],
}
"""Each algorithm's own flags; the others are `LEARN`."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one run reached."""

    algorithm: str
    seed: int
    warmup: float  # held-out accuracy before
    accuracy: float  # held-out accuracy at the end, greedy
    curve: tuple[float, ...]  # mean training reward of each sixth of the steps
    seconds: float


class Failed(RuntimeError):
    """A run that did not end well; the message has its last words."""


def slime(folder: Path, name: str, seed: int, flags: Sequence[str]) -> Path:
    """`slime run` in a process of its own; the run directory ``folder/name``, reused where it is complete.

    Raises:
        Failed: it ended with another exit code than 0.
    """
    run_dir = folder / name
    recipe = folder / "recipe.toml"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (run_dir / "done").is_file():
            return run_dir
        shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was cut off
        if not recipe.exists():
            recipe.write_text(COMMON)
        command = [sys.executable, "-m", "slime_cli.main", "run", str(recipe), "--run-dir", str(run_dir)]
        command += ["--seed", str(seed), *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise Failed(f"{name} ended with exit code {done.returncode}\n{done.stderr[-2000:]}")
        (run_dir / "done").touch()
    return run_dir


def warm(folder: Path, seed: int) -> Path:
    """The warm-up of a seed; its ``final/`` is where every algorithm starts."""
    return slime(folder, f"warmup-{seed}", seed, WARMUP)


def teach(folder: Path) -> Path:
    """The teacher: the warm-up of seed 0, trained on right answers after that."""
    return slime(folder, "teacher", 0, [*TEACHER, "--hf-checkpoint", str(warm(folder, 0) / "final")])


def learn(folder: Path, algorithm: str, seed: int) -> Outcome:
    """One algorithm from the warm-up of one seed."""
    start = warm(folder, seed)
    flags = ALGORITHMS[algorithm]
    if any("{teacher}" in flag for flag in flags):
        flags = [flag.format(teacher=teach(folder) / "final") for flag in flags]
    words = ["--hf-checkpoint", str(start / "final"), "--advantage-estimator", algorithm, *LEARN, *flags]
    began = time.monotonic()
    run_dir = slime(folder, f"{algorithm}-{seed}", seed, words)
    seconds = time.monotonic() - began
    rewards = [row["metrics"]["reward/mean"] for row in rows(run_dir) if row["kind"] == "step"]
    return Outcome(algorithm, seed, accuracy(start), accuracy(run_dir), parts(rewards), seconds)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def accuracy(run_dir: Path) -> float:
    """The last held-out accuracy of a run."""
    found = [row["metrics"]["reward/mean"] for row in rows(run_dir) if row.get("name") == HELDOUT]
    return float(found[-1])


def parts(curve: Sequence[float]) -> tuple[float, ...]:
    """The mean of each of `BINS` parts of a curve, as equal as they can be."""
    edges = [round(len(curve) * i / BINS) for i in range(BINS + 1)]
    return tuple(statistics.fmean(curve[a:b]) for a, b in pairwise(edges))


def band(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds, and what each seed reached."""

    def spread(values: Sequence[float]) -> dict[str, float]:
        sigma = statistics.stdev(values) if len(values) > 1 else 0.0
        return {"mean": round(statistics.fmean(values), 4), "sigma": round(sigma, 4)}

    return {
        "accuracy": spread([one.accuracy for one in outcomes]),
        "curve": [spread([one.curve[i] for one in outcomes]) for i in range(BINS)],
        "seeds": {str(one.seed): {"warmup": one.warmup, "accuracy": one.accuracy} for one in outcomes},
    }


def outside(one: Outcome, stored: dict[str, Any], k: float = K, floor: float = FLOOR) -> list[str]:
    """What of a run lies further than k sigma from the mean of its band, in words."""
    measured = [("held-out accuracy", one.accuracy, stored["accuracy"])]
    measured += [
        (f"mean reward in part {i + 1} of {BINS}", value, stored["curve"][i]) for i, value in enumerate(one.curve)
    ]
    return [
        f"{what} is {value:.3f}, the band is {of['mean']:.3f} +- {k:g} * {max(of['sigma'], floor):.3f}"
        for what, value, of in measured
        if not abs(value - of["mean"]) <= k * max(of["sigma"], floor)
    ]


def learnt(one: Outcome) -> bool:
    """Whether the run is clearly better than its warm-up."""
    return one.accuracy >= one.warmup + LEARNT


def table(found: dict[str, list[Outcome]]) -> str:
    """A Markdown table, one row an algorithm."""
    lines = [
        "| algorithm | after the warm-up | at the end | sigma | worst seed gained | reward, first to last sixth |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcomes in found.items():
        made = band(outcomes)
        warmup = statistics.fmean(one.warmup for one in outcomes)
        gain = min(one.accuracy - one.warmup for one in outcomes)
        curve = f"{made['curve'][0]['mean']:.3f} to {made['curve'][-1]['mean']:.3f}"
        end, sigma = made["accuracy"]["mean"], made["accuracy"]["sigma"]
        lines.append(f"| `{name}` | {warmup:.3f} | {end:.3f} | {sigma:.3f} | {gain:+.3f} | {curve} |")
    return "\n".join(lines)


def stored_bands() -> dict[str, Any]:
    """The file of bands; empty where there is none."""
    found: dict[str, Any] = json.loads(BANDS.read_text()) if BANDS.is_file() else {}
    return found


def store(found: dict[str, list[Outcome]]) -> None:
    """Replace the bands of these algorithms."""
    algorithms = stored_bands().get("algorithms", {}) | {name: band(outcomes) for name, outcomes in found.items()}
    kept = {name: algorithms[name] for name in ALGORITHMS if name in algorithms}
    BANDS.write_text(json.dumps({"k": K, "floor": FLOOR, "algorithms": kept}, indent=1) + "\n")


def run_all(
    folder: Path,
    names: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
    *,
    warm: Callable[[Path, int], Path] = warm,
    learn: Callable[[Path, str, int], Outcome] = learn,
) -> tuple[dict[str, list[Outcome]], list[str]]:
    """Every run, ``jobs`` at a time; outcomes of the algorithms whose seeds all ended well, and what went wrong."""
    wrong: list[str] = []
    found: dict[str, list[Outcome]] = {name: [] for name in names}

    def attempt(name: str, seed: int) -> Outcome | None:
        try:
            one = learn(folder, name, seed)
        except (Failed, subprocess.TimeoutExpired, OSError, LookupError, ValueError) as error:
            wrong.append(f"{name}, seed {seed}: {error}")
            return None
        print(f"{name} {seed}: {one.warmup:.3f} -> {one.accuracy:.3f} in {one.seconds:.0f} s", file=sys.stderr)
        return one

    with ThreadPoolExecutor(jobs) as pool:
        for seed, made in [(seed, pool.submit(warm, folder, seed)) for seed in seeds]:
            if made.exception() is not None:
                wrong.append(f"warm-up, seed {seed}: {made.exception()}")
        done = list(pool.map(lambda job: attempt(*job), [(name, seed) for name in names for seed in seeds]))
    for one in done:
        if one is not None:
            found[one.algorithm].append(one)
            if not learnt(one):
                gain = one.accuracy - one.warmup
                wrong.append(f"{one.algorithm}, seed {one.seed} gained {gain:+.3f}, less than {LEARNT}")
    return {name: outcomes for name, outcomes in found.items() if len(outcomes) == len(seeds)}, wrong


def main() -> int:
    """Run, print, store; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--only", default="", help="algorithms, with commas between them")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds, from 0")
    parser.add_argument("--check", action="store_true", help="compare with the stored bands, write nothing")
    parser.add_argument("--keep", type=Path, help="keep models and runs in this folder, and reuse what is there")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or list(ALGORITHMS)
    if unknown := [name for name in names if name not in ALGORITHMS]:
        parser.error(f"no such algorithm: {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slime-bands-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found, wrong = run_all(folder, names, range(args.seeds), args.jobs)
    print(table(found))
    print(f"\n{args.seeds} seeds, {args.jobs} at a time, {math.ceil((time.monotonic() - began) / 60)} minutes")
    if args.check:
        bands = stored_bands().get("algorithms", {})
        for one in (one for outcomes in found.values() for one in outcomes):
            missing = [] if one.algorithm in bands else ["there is no band"]
            said = missing or outside(one, bands[one.algorithm])
            wrong += [f"{one.algorithm}, seed {one.seed}: {text}" for text in said]
    elif args.seeds == SEEDS:
        store(found)
    for text in wrong:
        print(f"WRONG {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
