"""Kill runs at random moments, resume them, and count what was lost, doubled or changed: nothing, or exit 1.

    python tools/durability/kills.py --kills 10000 --seed 0 --workers 2 --out chaos.json  # goes on from chaos.json
    python tools/durability/kills.py --seconds 45 --seed 0                                # a slice
    python tools/durability/kills.py --seed 0 --world 17  # one run again, its folder kept

A run is a *world*: one of the scenarios of `world.py` (no torch; the trainer's step and the engine's tokens
are hashes of everything that they are given), killed some 5 to 15 times, and compared with the same run left alone.
What is done is a function of the seed and the world's number; the moments, of the machine too. Runs lie in /dev/shm: a
kill loses nothing that was written; what a power cut does is asked by tests/unit/checkpoint and tests/unit/ledger.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_SEEDS = 4
"""Different runs a scenario."""


@dataclass(slots=True)
class Figures:
    """What is known so far; the file of ``--out``."""

    seed: int = 0
    worlds: int = 0  # numbers below it are done
    kills: int = 0
    starts: int = 0
    samples: int = 0
    seconds: float = 0.0
    scenarios: dict[str, int] = field(default_factory=dict)  # kills by scenario
    boundaries: dict[str, int] = field(default_factory=dict)  # of them near a boundary
    wrong: list[str] = field(default_factory=list)

    def add(self, done: dict[str, Any]) -> None:
        """Count a world."""
        self.worlds += 1
        self.kills += done["kills"]
        self.starts += done["starts"]
        self.samples += done["samples"]
        self.scenarios[done["scenario"]] = self.scenarios.get(done["scenario"], 0) + done["kills"]
        for name, count in done["boundaries"].items():
            self.boundaries[name] = self.boundaries.get(name, 0) + count
        self.wrong += [f"world {done['world']} ({done['scenario']}): {text}" for text in done["wrong"]]


def main() -> int:
    """Parse, run, print the figures; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="stop after so many; 0: no limit")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long; 0: no limit")
    parser.add_argument("--worlds", type=int, default=0, help="with --seconds: no fewer runs than these")
    parser.add_argument("--each", type=int, default=15, help="kills of a run at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scenario", action="append", default=[], help="only these")
    parser.add_argument("--out", type=Path, help="figures as JSON, written after each world and gone on from")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--world", type=int, help="this one alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.seed, args.scenario, args.each)
    if args.world is not None:
        return again(args.seed, args.world, args.scenario, args.each)
    if not (args.kills or args.seconds):
        parser.error("say --kills N or --seconds S")
    figures = Figures(seed=args.seed)
    if args.out and args.out.exists():
        figures = Figures(**json.loads(args.out.read_text()))
        if figures.seed != args.seed:
            parser.error(f"{args.out} is of --seed {figures.seed}")
    drive(figures, args)
    print(json.dumps(asdict(figures), indent=1) if args.json else summary(figures))
    return 1 if figures.wrong else 0


def drive(figures: Figures, args: argparse.Namespace) -> None:
    """Hand world after world to the workers until there are enough kills, or time is up."""
    begun, before = time.monotonic(), figures.seconds
    command = [sys.executable, __file__, "--worker", "--seed", str(args.seed), "--each", str(args.each)]
    command += [word for name in args.scenario for word in ("--scenario", name)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for _ in range(args.workers)
    ]
    following = figures.worlds

    def give(worker: subprocess.Popen[str]) -> None:
        nonlocal following
        assert worker.stdin is not None
        worker.stdin.write(f"{following}\n")
        following += 1

    try:
        for worker in workers:
            give(worker)
        busy = {worker.stdout: worker for worker in workers}
        while busy:
            for pipe in select.select(list(busy), [], [])[0]:
                worker, line = busy.pop(pipe), pipe.readline()
                if not line:
                    figures.wrong.append(f"a worker ended with {worker.wait()}")
                    continue
                figures.add(json.loads(line))
                figures.seconds = before + time.monotonic() - begun
                if args.out:
                    _write(args.out, figures)
                enough = args.kills and figures.kills >= args.kills
                late = args.seconds and time.monotonic() - begun >= args.seconds and figures.worlds >= args.worlds
                if not (enough or late or figures.wrong):
                    busy[pipe] = worker
                    give(worker)
    finally:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait()


def work(seed: int, names: list[str], most: int) -> int:
    """A worker: numbers of worlds in, one JSON line each out. One thread, no event loop, no database."""
    world = _world()
    scenarios = [world.SCENARIOS[name] for name in names] or list(world.SCENARIOS.values())
    with tempfile.TemporaryDirectory(prefix="slime-chaos-", dir=memory()) as folder:
        place = Path(folder)
        world.install(place / "site")
        world.warm(place / "warm")
        known: dict[Any, Any] = {}
        for line in sys.stdin:
            number = int(line)
            done = one(world, scenarios, place, seed, number, known, most)
            if done["wrong"]:
                kept = Path(tempfile.mkdtemp(prefix="slime-chaos-wrong-"))
                shutil.copytree(place / f"world-{number}", kept / "world")
                done["wrong"].append(f"what is left of it: {kept}/world")
            shutil.rmtree(place / f"world-{number}")
            print(json.dumps(done), flush=True)
    return 0


def memory() -> str | None:
    """A folder in memory, where there is one: a kill never loses what was written, synced or not."""
    place = Path("/dev/shm")
    free = shutil.disk_usage(place).free if place.is_dir() and os.access(place, os.W_OK) else 0
    return str(place) if free > 64 << 20 else None


def again(seed: int, number: int, names: list[str], most: int) -> int:
    """One world, in a folder that stays."""
    world = _world()
    scenarios = [world.SCENARIOS[name] for name in names] or list(world.SCENARIOS.values())
    place = Path(tempfile.mkdtemp(prefix="slime-chaos-"))
    world.install(place / "site")
    done = one(world, scenarios, place, seed, number, {}, most)
    print(json.dumps({**done, "folder": str(place)}, indent=1))
    return 1 if done["wrong"] else 0


def one(
    world: Any, scenarios: list[Any], place: Path, seed: int, number: int, known: dict[Any, Any], most: int
) -> dict[str, Any]:
    """Run, kill and judge one world; ``known`` keeps the runs that were left alone."""
    scenario, run_seed = scenarios[number % len(scenarios)], (number // len(scenarios)) % RUN_SEEDS
    key = (scenario.name, run_seed)
    if key not in known:
        known[key] = world.left_alone(scenario, place / f"alone-{scenario.name}-{run_seed}", run_seed)
    rng = random.Random(f"{seed}/{number}")
    kills = min(rng.randint(5, 15), most)
    return {
        "world": number,
        "scenario": scenario.name,
        **world.killed(scenario, place / f"world-{number}", run_seed, known[key], rng=rng, kills=kills),
    }


def summary(figures: Figures) -> str:
    """For people."""
    bound = 1 - math.exp(math.log(0.05) / figures.kills) if figures.kills else 1.0
    lines = [
        f"{figures.kills} kills of {figures.worlds} runs in {figures.seconds:.0f} s "
        f"({figures.starts} starts, {figures.samples} samples), seed {figures.seed}",
        "by scenario: " + ", ".join(f"{name} {count}" for name, count in sorted(figures.scenarios.items())),
        f"near a durable boundary: {sum(figures.boundaries.values())}, at {len(figures.boundaries)} boundaries",
    ]
    if figures.wrong:
        return "\n".join([*lines, f"WRONG: {len(figures.wrong)}", *figures.wrong])
    return "\n".join([*lines, f"0 lost, 0 doubled, final/ identical; 95% bound of a failure a kill: {bound:.2e}"])


def _world() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "tools"))
    from durability import world

    return world


def _write(path: Path, figures: Figures) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
