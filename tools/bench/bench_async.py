"""Samples a second of runs ahead of training against a run that takes turns, on as many GPUs, long tails included.

    python tools/bench/bench_async.py                  # simulated GPUs, the real loop: minutes, on any machine
    python tools/bench/bench_async.py --real --gpus 4  # SGLang and a trainer on 4 GPUs (2: --gpus 2), random weights
    python tools/bench/bench_async.py --real --smoke   # what a CPU can: tiny model, embedded engine; proves nothing

**sync** uses all GPUs to generate, then all to train. **lockstep** and **free** give --trainers of them to a trainer
and the others to engines, and run --ahead versions ahead. Response lengths are log-normal, drawn from a sample's id,
so that all generate the same lengths; the workload's name is lognormal-MEDIAN-SIGMA-LIMIT.

What the measured stage times and the lengths allow, k versions ahead: with W(v) scoring and training of the step of
version v, S(v) the update of weights after it, and D(v) the longest of the responses that begin with version v,

    update(v) = take(v - 1) + W(v - 1) + S(v - 1)                                         new prompts begin
    take(v)   = max(update(v), update(v - k) + D(v - k))                                  sync is k = 0
    lockstep:   update(v) = max(take(v - 1) + W(v - 1), update(v - 1) + D(v - 1)) + S(v - 1),   take(v) = update(v)

What begins with version u trains at u + k at the latest, so the take of that step waits for the longest of it; in
lockstep an update waits for all that is in flight. With constant times a step of a free run takes
max(W + S, (D + W + S) / (k + 1)). The share reached is the mean step that this gives over the mean step that was
measured. D is that of the same run, under its own load; a real run cannot tell it, and takes the rollout of sync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_tail import MODES, plugin, run
from simulated_gpus import Done, Gpus, Nobody, TimedEngine, TimedTrainer

from slime_core import loop
from slime_core.clusters.colocation import DedicatedDevices
from slime_core.clusters.engine_set import EngineSet
from slime_core.config.load import load_config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer

WORK, SYNC = ("score", "verify", "train"), ("sync",)
HEAD = """| run | samples/s | of sync | step | what the stages allow | share | longest | training | parts |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


@dataclass(slots=True, kw_only=True)
class Measured:
    """One run, its first and last steps left out; seconds a step."""

    mode: str
    ahead: int
    wall: float
    work: float  # scoring and training
    longest: float  # D, mean
    allowed: float  # what the stages allow
    parts: dict[str, float]


def allowed(
    mode: str, ahead: int, work: Sequence[float], sync: Sequence[float], longest: Sequence[float]
) -> list[float]:
    """When each step could have taken its groups: seconds from the first prompts on. See the module."""
    take, update = [longest[0]], [0.0]
    for v in range(1, len(work)):
        trained = take[v - 1] + work[v - 1]
        if mode == "lockstep":
            begun = max(trained, update[v - 1] + (longest[v - 1] if v > 1 else 0.0)) + sync[v - 1]
            update.append(begun)
            take.append(begun)
        else:
            update.append(trained + sync[v - 1])
            take.append(max(update[v], update[max(0, v - ahead)] + longest[max(0, v - ahead)]))
    return take


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All steps of a run; a line that was cut off is left out."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "step"]


def measured(
    args: argparse.Namespace,
    mode: str,
    ahead: int,
    rows: Sequence[Mapping[str, Any]],
    longest: Sequence[float],
    each: float,
) -> Measured:
    """What a run shows; ``longest`` is D of every version, ``each`` a measured second in the figures' seconds."""
    work, sync = ([seconds([row], *names) * each for row in rows] for names in (WORK, SYNC))
    takes = allowed(mode, ahead, work, sync, longest)
    first, last = min(args.skip, len(rows) - 2), max(len(rows) - 1 - ahead, 1)  # the ends ramp up and run dry
    kept = rows[first + 1 : last + 1]
    return Measured(
        mode=mode,
        ahead=ahead,
        wall=statistics.fmean(sum(row["seconds"].values()) for row in kept) * each,
        work=statistics.fmean(work[first:last]),
        longest=statistics.fmean(longest[first:last]),
        allowed=(takes[last] - takes[first]) / (last - first),
        parts={name: seconds(kept, name) * each for name in kept[0]["seconds"]},
    )


def seconds(rows: Sequence[Mapping[str, Any]], *names: str) -> float:
    """Mean seconds a step of some parts."""
    return statistics.fmean(sum(row["seconds"].get(name, 0.0) for name in names) for row in rows)


# -- simulated


def simulate(args: argparse.Namespace, mode: str, ahead: int, folder: Path) -> Measured:
    """One run of the real loop over engines and a trainer that only take their time."""
    gpus, shared = model(args), mode == "sync"
    done: list[Done] = []
    count = (args.gpus if shared else args.gpus - args.trainers) // gpus.engine_gpus
    flags = ["--plugin", "long_tail", "--hf-checkpoint", ".", "--num-rollout", str(args.steps + args.skip + 1 + ahead)]
    flags += ["--rollout-batch-size", str(args.batch), "--n-samples-per-prompt", str(args.samples), "--no-colocate"]
    flags += ["--rollout-max-response-len", str(args.limit_tokens // gpus.grain), "--save-interval", "0"]
    flags += [
        "--no-export-final",
        "--save-samples",
        "0",
        "--max-staleness",
        str(ahead),
        "--async-schedule",
        MODES[mode],
    ]
    config = load_config(None, flags)
    trainer = TimedTrainer(gpus, args.gpus if shared else args.trainers, gpus.turn if shared else gpus.transfer)

    @asynccontextmanager
    async def cluster(config: Any, plugins: Any, report: Any) -> Any:
        ledger = SqliteLedger(report.run_dir.path)
        engine: Any = EngineSet([TimedEngine(gpus, done) for _ in range(count)])
        try:
            yield RunComponents(
                engines=engine,
                tokenizer=CharTokenizer(),
                vocab_size=16,
                trainer=trainer,
                ledger=ledger,
                devices=DedicatedDevices(),
            )
        finally:
            await ledger.close()

    plugins = load_plugins(config)
    with RunDir.create("bench", at=folder / f"{mode}-{ahead}") as run_dir:
        report = Report(run_dir, config, live=Nobody())
        report.start()
        try:
            asyncio.run(loop.run(config, plugins, report, cluster=cluster))
        finally:
            report.finish()
            plugins.close()
    begun: dict[int, float] = defaultdict(float)
    for one in done:
        begun[one.version] = max(begun[one.version], one.seconds)
    rows = read(run_dir.path)
    return measured(args, mode, ahead, rows, [begun[v] for v in range(len(rows))], gpus.faster)


def model(args: argparse.Namespace) -> Gpus:
    """A dense model of 32 billion weights in bfloat16 on GPUs of 4.8 TB/s and 990 TFLOP/s, caches in 8 bits.

    The two GPUs of an engine read 33 GB of weights each a step: 7 ms, and 2 for all else; and a sequence's cache of
    2,500 tokens, 131 kB each: 0.034 ms. Training takes 6 operations a weight and token, two scorings 2 each, at 0.45
    of the peak: 1,360 tokens a second a GPU. Memory and weights change hands in 4 s, weights alone in 1 s.
    """
    return Gpus(
        step=0.009,
        each=0.000034,
        engine_gpus=2,
        rate=1360.0,
        turn=4.0,
        transfer=1.0,
        grain=args.grain,
        faster=args.faster,
    )


def told(found: Measured, samples: int, sync: float) -> str:
    """A row of the table."""
    rate = samples / found.wall
    name = found.mode if found.mode == "sync" else f"{found.mode}, {found.ahead} ahead"
    parts = ", ".join(f"{part} {value:.1f}" for part, value in found.parts.items() if value >= 0.05)
    return (
        f"| {name} | {rate:.2f} | {rate / sync:.2f} | {found.wall:.1f} | {found.allowed:.1f} "
        f"| {found.allowed / found.wall:.1%} | {found.longest:.1f} | {found.work:.1f} | {parts} |"
    )


def workload(args: argparse.Namespace) -> str:
    """Its name, and how much of it a step is."""
    name = f"lognormal-{args.median:g}-{args.sigma:g}-{args.limit_tokens}"
    return f"{name}, {args.batch * args.samples} samples a step"


def simulated(args: argparse.Namespace) -> None:
    """All modes, one after another, and their rows."""
    samples = args.batch * args.samples
    print(f"{workload(args)}, {args.gpus} simulated GPUs ({args.trainers} of them train apart),")
    print(f"time x {args.faster:g}, a token stands for {args.grain}; seconds are the model's")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as made:
        values = {"PROMPT": args.prompt // args.grain, "MEDIAN": args.median / args.grain, "SIGMA": args.sigma}
        sys.path.insert(0, str(plugin(Path(made), values | {"LIMIT": args.limit_tokens // args.grain})))
        sync = 0.0
        for mode, ahead in [("sync", 0), *((mode, k) for k in args.ahead for mode in args.modes)]:
            if mode == "lockstep" and ahead > 1:
                continue
            found = simulate(args, mode, ahead, Path(made))
            sync = sync or samples / found.wall
            print(told(found, samples, sync), flush=True)
            if mode == "sync":
                ratio = found.parts.get("rollout", 0.0) / (found.work or 1.0)
                print(f"generation and training of sync are {ratio:.2f} to 1", file=sys.stderr)


# -- real


def real(args: argparse.Namespace) -> None:
    """`slime run` twice on these GPUs: taking turns, and ahead on GPUs apart."""
    from sglang_place import NO_SGLANG, Place, make_folder

    place = None if args.smoke else Place.find("cuda")
    if place is None and not args.smoke:
        raise SystemExit(NO_SGLANG)
    samples = args.batch * args.samples
    with tempfile.TemporaryDirectory(dir=args.folder or None) as made:
        folder = Path(made)
        make_folder(folder / "model", args.shape, context_len=args.prompt + args.limit_tokens)
        values = {"PROMPT": args.prompt, "MEDIAN": args.median, "SIGMA": args.sigma, "LIMIT": args.limit_tokens}
        site = plugin(folder, values)
        print(
            f"{workload(args)}, {args.shape}, {args.backend}, {args.gpus} GPUs ({args.trainers} of them train apart)"
        )
        print(HEAD, flush=True)
        found: dict[str, Measured] = {}
        for mode, ahead in [("sync", 0), *(("free", k) for k in args.ahead)]:
            code = run(args, folder, site, mode, ahead, place)
            rows = read(folder / f"{mode}-{ahead}")
            if len(rows) < 3:
                print((folder / f"{mode}-{ahead}.txt").read_text(errors="replace")[-3000:])
                raise SystemExit(f"{mode}, {ahead} ahead: {len(rows)} steps, exit code {code}")
            longest = found["sync"].longest if found else seconds(rows[1:], "rollout")
            one = measured(args, mode, ahead, rows, [longest] * len(rows), 1.0)
            found.setdefault(mode, one)
            print(told(one, samples, samples / found["sync"].wall), f"exit code {code}", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is not given depends on what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("lockstep", "free"), default=["lockstep", "free"])
    parser.add_argument("--ahead", type=int, nargs="+", help="max_staleness; lockstep is measured at 1 alone")
    parser.add_argument("--gpus", type=int, help="on either side")
    parser.add_argument("--trainers", type=int, help="of them, that train where engines have GPUs of their own")
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--skip", type=int, default=2, help="steps that do not, at the start")
    parser.add_argument("--batch", type=int, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--median", type=float, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.1, help="of their logarithm")
    parser.add_argument("--limit-tokens", type=int, help="of a response, at most")
    parser.add_argument("--faster", type=float, default=10.0, help="simulated: seconds in one of ours")
    parser.add_argument("--grain", type=int, default=16, help="simulated: tokens that one stands for")
    parser.add_argument("--folder", default="", help="of the runs; default: a temporary one")
    parser.add_argument("--real", action="store_true", help="GPUs, SGLang, a trainer")
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="megatron")
    parser.add_argument("--shape", choices=("4B", "0.6B", "tiny"), default="4B")
    parser.add_argument("--mem-fraction", type=float, default=0.5, help="SGLang's mem_fraction_static")
    parser.add_argument("--limit", type=float, default=270.0, help="seconds until a real run is cut off and read")
    parser.add_argument("--smoke", action="store_true", help="with --real: a tiny model on a CPU; it proves nothing")
    args = parser.parse_args(words)
    given = {"gpus": 8, "trainers": 6, "batch": 64, "median": 800.0, "limit_tokens": 16384, "ahead": [1, 2]}
    if args.real:
        given = {"gpus": 2, "trainers": 0, "batch": 32, "median": 400.0, "limit_tokens": 4096, "ahead": [1]}
    if args.smoke:
        args.shape, args.backend, args.prompt = "tiny", "fsdp", 16
        given |= {"batch": 4, "median": 16.0, "limit_tokens": 128}
    for name, value in given.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.trainers = args.trainers or max(1, args.gpus // 2)
    if not 0 < args.trainers < args.gpus:
        parser.error(f"--trainers {args.trainers} of --gpus {args.gpus} leaves no GPU for an engine")
    return args


def main() -> None:
    """Measure and print."""
    args = parse()
    if args.real:
        real(args)
    else:
        simulated(args)


if __name__ == "__main__":
    main()
