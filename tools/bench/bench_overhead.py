"""What a step costs beside generation, training and weight transfer: a run whose engine and trainer take no time.

    python tools/bench/bench_overhead.py                  # 128 and 512 samples a step, durable ledger and none
    python tools/bench/bench_overhead.py --samples 512 --ledger durable
    python tools/bench/bench_overhead.py --ranks 2        # scores and steps go to two processes that answer at once
    python tools/bench/bench_overhead.py --ranks 2 --ray  # which a Ray cluster, started for it, carries frames to

The loop, collector, checks, reward hook, ledger, advantage, batch, sync, report and metrics file are the product's
own. The engine answers each request after one pass of the event loop with tokens that were made before, 32 to 512 of
them by the request's seed; the trainer answers scores and metrics of the right shape. Figures are milliseconds a step,
the median after --skip steps, of the whole process's CPU time, which other work on the machine lengthens little, and
of the wall. "rollout" is what the collector does to get a step's samples; in a real run most of it goes on while the
engine generates. "after" is all other parts: what a step waits for besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_collector import NoLedger

sys.path.append(str(Path(__file__).parents[1]))

from durability.fake_trainer import FakeTrainer
from slime_core import loop
from slime_core.clusters.channel import Channel, Child, Start, start_here
from slime_core.clusters.colocation import TimeSharing
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import Role, RunComponents
from slime_core.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Batch, Columns, Completion, GenerateRequest, StepReport

VOCAB, SHORTEST, LONGEST, A_PROMPT = 1000, 32, 512, 8
TARGET = 30.0  # milliseconds
DRAWN = [17 + n % 900 for n in range(LONGEST)]
PARTS = ("rollout", "score", "train", "sync", "other")


class QuickEngine(FakeEngine):
    """Answers each request with tokens that were made before, after one pass of the event loop."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        await asyncio.sleep(0)
        count = SHORTEST + request.seed % (LONGEST - SHORTEST + 1)
        return Completion(
            id=request.id,
            tokens=DRAWN[:count],
            log_probs=[-1.0] * count,
            plain_log_probs=[-1.0] * count,
            finish="stop",
            versions=[self.version] * count,
            epoch=self.epoch,
        )


class QuickTrainer(FakeTrainer):
    """A step that computes nothing."""

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "optimizer_steps": 1.0}


class Dealt(QuickTrainer):
    """Scores and steps are dealt to processes, as to ranks that compute."""

    def __init__(self, ranks: RankTrainer) -> None:
        super().__init__()
        self._ranks = ranks

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        await self._ranks.begin(stage)

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`."""
        return await self._ranks.score(batch, roles | {"policy"})

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        return await self._ranks.step(batch)


def idle(start: Start) -> Start:
    """Starts `idle_rank` in place of a rank."""

    async def started(number: int, child: Child) -> Channel:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        return await start(number, replace(child, module="idle_rank", env={**child.env, "PYTHONPATH": path}))

    return started


@asynccontextmanager
async def places(config: Config, ray: bool) -> AsyncIterator[Start]:
    """Where ranks are started: here, or in the hosts of a Ray cluster."""
    if not ray:
        yield start_here
        return
    from slime_ray.joining import hosts, joined
    from slime_ray.placement import plan

    placed = plan(config)
    with joined(config, placed):
        async with hosts(config, placed) as found:
            yield lambda number, child: found.start(placed.ranks[number], child)


class Uncounted(NoLedger):
    """A ledger that keeps nothing and counts nothing."""

    async def counts(self) -> Counter[str]:
        """See `protocols.Ledger`."""
        return Counter(issued=0)


class Enough(Exception):
    """All steps are measured: no checkpoint at the end."""


class Silent:
    """A live display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@dataclass(slots=True)
class Times:
    """CPU and wall seconds of each step, and its CPU seconds by part; told by `Report.phase`."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    now: dict[str, float] = field(default_factory=dict)
    part: str = ""
    since: float = 0.0

    def phase(self, name: str) -> None:
        """Another part begins; an empty name is what lies between them."""
        now = time.process_time()
        self.now[self.part] = self.now.get(self.part, 0.0) + now - self.since
        self.part, self.since = name, now

    def step(self) -> None:
        """A step ends."""
        self.phase(self.part)
        self.cpu.append(time.process_time())
        self.wall.append(time.monotonic())
        self.parts.append(self.now)
        self.now = {}


def run(samples: int, ledger: str, steps: int, folder: Path, ranks: int = 0, ray: bool = False) -> Times:
    """A run of ``steps`` steps in ``folder / "run"``, with ``ranks`` processes for the trainer."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"{n}+2=", "a": str(n + 2)}) + "\n" for n in range(1000)))
    flags = [
        *("--hf-checkpoint", ".", "--plugin", "rm_math", "--num-rollout", str(steps + 1)),
        *("--prompt-data", str(rows), "--input-key", "q", "--label-key", "a"),
        *("--rollout-batch-size", str(samples // A_PROMPT), "--n-samples-per-prompt", str(A_PROMPT)),
        *("--device", "cpu", "--cpu-threads", "1", "--actor-num-gpus-per-node", str(max(ranks, 1))),
        *(("--cluster", "ray") if ray else ()),
        *("--rollout-max-response-len", str(LONGEST), "--skip-eval-before-train", "--save-interval", "0"),
    ]
    config = load_config(None, flags)
    plugins = load_plugins(config)
    times = Times()
    silent: Any = Silent()

    @asynccontextmanager
    async def fakes(*_: Any) -> AsyncIterator[RunComponents]:
        engine, trainer = QuickEngine(vocab_size=VOCAB), QuickTrainer()
        kept: Any = SqliteLedger(folder / "run") if ledger == "durable" else Uncounted()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(kept.close)
            if ranks:
                given: dict[str, Any] = {"world": ranks, "run_dir": folder / "run"}
                start = idle(await stack.enter_async_context(places(config, ray)))
                trainer = Dealt(await stack.enter_async_context(RankTrainer(config, plugins, start=start, **given)))
            yield RunComponents(
                engines=engine,
                tokenizer=CharTokenizer(),
                vocab_size=VOCAB,
                trainer=trainer,
                ledger=kept,
                devices=TimeSharing(engine),
            )

    try:
        with RunDir.create("overhead", at=folder / "run") as run_dir:
            report = Report(run_dir, config, live=silent)
            told: Any = report.step

            def step(report: StepReport) -> None:
                told(report)
                times.step()
                if len(times.cpu) == steps:
                    raise Enough

            report.phase, report.step = times.phase, step  # type: ignore[method-assign]
            report.start()
            with suppress(Enough):
                asyncio.run(loop.run(config, plugins, report, cluster=fakes))
            report.finish()
    finally:
        plugins.close()
    return times


def row(samples: int, ledger: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step: CPU time by part, of all that is not rollout, of all; and the wall's."""
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        times = run(samples, ledger, args.steps + args.skip + 1, Path(folder), args.ranks, args.ray)
    parts = [{"other": one[""], **one} for one in times.parts[args.skip + 1 :]]
    found = {name: statistics.median(1000 * one.get(name, 0.0) for one in parts) for name in PARTS}
    cpu, wall = (float(np.median(1000 * np.diff(one)[args.skip :])) for one in (times.cpu, times.wall))
    after = statistics.median(1000 * (sum(one.values()) - one[""] - one["rollout"]) for one in parts)
    return found | {"after": after, "cpu": cpu, "wall": wall}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--ledger", choices=("none", "durable"), nargs="+", default=["none", "durable"])
    parser.add_argument("--ranks", type=int, default=0, help="trainer processes; 0: the trainer is in this one")
    parser.add_argument("--ray", action="store_true", help="ranks are on a Ray cluster, with --ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--folder", default="", help="of run directories; default: a temporary one")
    return parser.parse_args(words)


def main() -> int:
    """Print the table; exit code 1 where what a step waits for beside its samples misses the target."""
    args, late = parse(), False
    print(f"| samples a step | ledger | {' | '.join(PARTS)} | after | all, CPU | all, wall | target, after |")
    print("| --- " * (len(PARTS) + 6) + "|", flush=True)
    for samples in args.samples:
        for ledger in args.ledger:
            found = row(samples, ledger, args)
            late |= found["after"] > TARGET
            figures = " | ".join(f"{found[name]:.1f}" for name in (*PARTS, "after", "cpu", "wall"))
            print(f"| {samples} | {ledger} | {figures} | {TARGET:.0f} |", flush=True)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
