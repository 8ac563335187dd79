"""What a step costs beside generation, training and weight transfer: a whole run whose engine and trainer take no time.

    python tools/bench_overhead.py                         # 128 and 512 samples a step, durable ledger and none
    python tools/bench_overhead.py --samples 512 --ledger durable --profile 25

The loop, collector, checks, reward hook, ledger, advantage, batch, sync, report and metrics file are the product's
own. The engine answers each request after one pass of the event loop with tokens that were made before, 32 to 512 of
them by the request's seed; the trainer answers scores and metrics of the right shape. Figures are milliseconds a step,
the median after --skip steps: "wall" by part of `seconds` in metrics.jsonl, and "CPU", the whole process's, which
other work on the machine does not lengthen. "rollout" is what the collector does to get a step's samples; in a real
run it goes on while the engine generates. What a step waits for besides is the other columns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from bench_collector import NoLedger

from slime_core import loop
from slime_core.buffer.ledger import SqliteLedger
from slime_core.clusters.turns import QuietTurns
from slime_core.config.load import load_config
from slime_core.plugins import load_plugins
from slime_core.protocols import Parts
from slime_core.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine, FakeTrainer
from slime_core.types import Batch, Completion, GenerateRequest, StepReport

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


class Uncounted(NoLedger):
    """A ledger that keeps nothing and counts nothing."""

    async def counts(self) -> Counter[str]:
        """See `protocols.Ledger`."""
        return Counter(issued=0)


class Enough(Exception):
    """All steps are measured: no checkpoint at the end."""


class Times:
    """CPU time of the process at the end of each step, and the steps' wall seconds by part."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.reports: list[StepReport] = []


def run(samples: int, ledger: str, steps: int, folder: Path) -> Times:
    """A run of ``steps`` steps."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"{n}+2=", "a": str(n + 2)}) + "\n" for n in range(1000)))
    flags = [
        *("--hf-checkpoint", ".", "--plugin", "rm_math", "--num-rollout", str(steps + 1)),
        *("--prompt-data", str(rows), "--input-key", "q", "--label-key", "a"),
        *("--rollout-batch-size", str(samples // A_PROMPT), "--n-samples-per-prompt", str(A_PROMPT)),
        *("--rollout-max-response-len", str(LONGEST), "--skip-eval-before-train", "--save-interval", "0"),
    ]
    config = load_config(None, flags)
    plugins = load_plugins(config)
    times = Times()

    @asynccontextmanager
    async def fakes(*_: Any) -> AsyncIterator[Parts]:
        engine, trainer = QuickEngine(vocab_size=VOCAB), QuickTrainer()
        kept: Any = SqliteLedger(folder / "run") if ledger == "durable" else Uncounted()
        yield Parts(
            engines=engine,
            tokenizer=CharTokenizer(),
            vocab_size=VOCAB,
            trainer=trainer,
            ledger=kept,
            turns=QuietTurns(engine),
        )
        await kept.close()

    try:
        with RunDir.create("overhead", at=folder / "run") as run_dir:
            report = Report(run_dir, config)
            told = report.step

            def step(done: StepReport) -> None:
                told(done)
                times.cpu.append(time.process_time())
                times.reports.append(done)
                if len(times.reports) == steps:
                    raise Enough

            report.step = step  # type: ignore[method-assign]
            report.start()
            with suppress(Enough):
                asyncio.run(loop.run(config, plugins, report, cluster=fakes))
            report.finish()
    finally:
        plugins.close()
    return times


def row(samples: int, ledger: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step by part, and of all of it."""
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        times = run(samples, ledger, args.steps + args.skip + 1, Path(folder))
    cpu = 1000 * np.diff(times.cpu)[args.skip :]
    seconds = [report.seconds for report in times.reports[args.skip + 1 :]]
    found = {part: statistics.median(1000 * one.get(part, 0.0) for one in seconds) for part in PARTS}
    return found | {
        "wall": statistics.median(1000 * sum(one.values()) for one in seconds),
        "cpu": float(np.median(cpu)),
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--ledger", choices=("none", "durable"), nargs="+", default=["none", "durable"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--folder", default="", help="of run directories; default: a temporary one")
    parser.add_argument("--profile", type=int, default=0, help="lines of cProfile's table to print")
    return parser.parse_args(words)


def main() -> int:
    """Print the table; exit code 1 where what a step waits for beside its samples misses the target."""
    args, late = parse(), False
    print(f"| samples a step | ledger | {' | '.join(PARTS)} | all, wall | all, CPU |")
    print("| --- " * (len(PARTS) + 4) + "|", flush=True)
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    for samples in args.samples:
        for ledger in args.ledger:
            found = row(samples, ledger, args)
            late |= found["wall"] - found["rollout"] > TARGET
            figures = " | ".join(f"{found[name]:.1f}" for name in (*PARTS, "wall", "cpu"))
            print(f"| {samples} | {ledger} | {figures} |", flush=True)
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
