"""Gradings a second of rm_math's `math`, with workers warm, beside math-verify alone.

    python tools/bench/bench_grading.py [--workers 2] [--gradings 4000] [--seed 0] [--json]

The mix: 70% plain numbers and short expressions (integers, decimals, fractions, percents, roots), the rest the pairs
of the plugin's tests (sets, intervals, matrices, units, LaTeX, text). Printed: gradings a second of the mix; those of
the rest with one worker beside math-verify in this process, over the same pairs in turns; the time of one grading at
the median and the 99th percentile; milliseconds of a processor, which other load does not change; the load. Below, a
line a target: met or not by the clock, and by processor time, which counts on a machine that does other things.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_rm_math.graders import plain
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.pool import processor_seconds
from slime_rm_math.graders.worker import Mathematics

PAIRS = Path(__file__).parents[2] / "plugins" / "slime_rm_math" / "tests" / "data" / "answer_pairs.jsonl"
SHORT = ("integers", "decimals", "fractions", "percent")
PLAIN_SHARE = 0.6  # of the 70%: numbers; the others are short expressions
Pair = tuple[str, str]


def read(short: bool) -> list[Pair]:
    """Label and answer of the pairs that are, or are not, of the short categories; plain numbers are left out."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    pairs = [(row["label"], row["answer"]) for row in rows if (row["category"] in SHORT) == short]
    return [pair for pair in pairs if plain.compare(pair[1], pair[0]) is None]


def mix(count: int, draw: random.Random) -> list[Pair]:
    """The mix, shuffled."""
    short, rest, found = read(True), read(False), []
    for _ in range(count):
        kind = draw.random()
        if kind < 0.7 * PLAIN_SHARE:
            label = str(draw.randrange(1000))
            found.append((label, draw.choice((label, f"{label}.0", str(draw.randrange(1000))))))
        else:
            found.append(draw.choice(short if kind < 0.7 else rest))
    return found


async def graded(equal: Equivalence, pairs: Sequence[Pair], at_once: int) -> tuple[float, list[float]]:
    """Seconds for all, and for each from its turn on."""
    seconds: list[float] = []
    turn = asyncio.Semaphore(at_once)

    async def one(label: str, answer: str) -> None:
        async with turn:
            start = time.perf_counter()
            await equal.verdict(answer, label)
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(one(*pair) for pair in pairs))
    return time.perf_counter() - start, seconds


def processor(equal: Equivalence) -> float:
    """Seconds of a processor that this process and the idle workers have had."""
    mine = time.process_time()
    return mine + sum(processor_seconds(process) for process in equal.pool().processes())


def own_time(pairs: Sequence[Pair]) -> list[float]:
    """Seconds of a processor for each pair, with the code of a worker in this process."""
    mathematics, found = Mathematics(), []
    for label, answer in pairs:
        start = time.process_time()
        if Equivalence.at_once(answer, label) is None:
            mathematics.outcome(label, answer)
        found.append(time.process_time() - start)
    return sorted(found)


def alone(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Seconds that math-verify takes in this process, without clocks: of the clock, and of a processor."""
    from math_verify import parse, verify

    start, used = time.perf_counter(), time.process_time()
    for pair in pairs:
        boxes = ["\\boxed{" + text + "}" for text in pair]
        verify(*(parse(box, parsing_timeout=None) for box in boxes), timeout_seconds=None)
    return time.perf_counter() - start, time.process_time() - used


def beside(single: Equivalence, rest: Sequence[Pair]) -> tuple[float, float, float, float]:
    """Seconds of the rest by one worker and by math-verify alone, each of the clock and of a processor."""
    used = processor(single)
    clock = asyncio.run(graded(single, rest, 1))[0]
    return clock, processor(single) - used, *alone(rest)


def targets(row: Mapping[str, float]) -> list[str]:
    """What has to be reached, and whether it is."""
    lines = [
        ("500 gradings/s of the mix on two processors", "mix_per_second", "mix_per_second_two_processors", 500.0),
        ("the rest at 0.9 times math-verify's speed", "rest_over_math_verify", "rest_over_by_processor", 0.9),
        ("99 of 100 gradings of the mix within 50 ms", "mix_p99_ms", "mix_p99_processor_ms", -50.0),
    ]
    found = []
    for what, clock, own, bound in lines:
        both = (clock, "by the clock"), (own, "by processor time")
        told = [f"{row[key]:g} {how}: {_met(row[key], bound)}" for key, how in both]
        found.append(f"target: {what}: {'; '.join(told)}")
    cores = os.cpu_count() or 1
    return [*found, f"load {row['load_before']:g} before and {row['load_after']:g} after, on {cores} processors"]


def _met(value: float, bound: float) -> str:
    """A bound below 0 is one from above."""
    return "met" if (value >= bound if bound > 0 else value <= -bound) else "NOT met"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gradings", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="figures alone, as JSON")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    draw, before = random.Random(args.seed), os.getloadavg()[0]
    pairs = mix(args.gradings, draw)
    rest = [draw.choice(read(False)) for _ in range(max(args.gradings // 8, 50))]
    equal = Equivalence(workers=args.workers, seconds=1.5, memory_mb=512)
    single = Equivalence(workers=1, seconds=1.5, memory_mb=512)
    for one in (equal, single):
        one.pool().start()
    asyncio.run(graded(equal, read(True) + read(False), args.workers))
    asyncio.run(graded(single, read(False), 1))
    alone(read(False))
    used = processor(equal)
    seconds, each = asyncio.run(graded(equal, pairs, args.workers))
    used = processor(equal) - used
    rounds = [beside(single, rest) for _ in range(3)]
    for one in (equal, single):
        one.close()
    own = own_time(pairs)
    mine, mine_own, theirs, theirs_own = (statistics.median(values) for values in zip(*rounds, strict=True))
    row = {
        "workers": args.workers,
        "mix_per_second": round(len(pairs) / seconds),
        "mix_processor_ms": round(used / len(pairs) * 1e3, 2),
        "mix_per_second_and_processor": round(len(pairs) / used),
        "mix_per_second_two_processors": round(2 * len(pairs) / used),
        "mix_p50_ms": round(statistics.median(each) * 1e3, 2),
        "mix_p99_ms": round(sorted(each)[int(len(each) * 0.99)] * 1e3, 2),
        "mix_p99_processor_ms": round(own[int(len(own) * 0.99)] * 1e3, 2),
        "rest_per_second_one_worker": round(len(rest) / mine),
        "rest_per_second_math_verify_alone": round(len(rest) / theirs),
        "rest_over_math_verify": round(theirs / mine, 3),
        "rest_over_by_processor": round(theirs_own / mine_own, 3),
        "load_before": round(before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(row, indent=1))
    if not args.json:
        print("\n".join(targets(row)))


if __name__ == "__main__":
    main()
