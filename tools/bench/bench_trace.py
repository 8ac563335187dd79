"""Cost of `--trace` a sample, beside what a sample of the demo costs in processor seconds.

python tools/bench/bench_trace.py [--samples 20000]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_core.protocols import Span
from slime_trackers.chrome_trace import ChromeTrace
from slime_trackers.timeline import Timeline

BATCH, GROUP = 512, 8
SHORT, LONG = 2, 12  # steps of the two runs whose difference is measured


def main() -> None:
    """Print both costs and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20000)
    with tempfile.TemporaryDirectory() as name:
        loop, trace, size = traced(Path(name), parser.parse_args().samples)
        sample = demo_sample(Path(name))
    print(f"trace: {loop * 1e6:.1f} us of the loop, {trace * 1e6:.1f} us in all and {size:.0f} bytes a sample")
    print(f"demo:  {sample * 1e3:.2f} ms of processor a sample")
    print(f"share: {loop / sample:.2%} of the loop, {trace / sample:.2%} in all")


def traced(folder: Path, count: int) -> tuple[float, float, float]:
    """Processor seconds a sample, of the loop's thread and in all, and bytes."""
    timeline = Timeline(ChromeTrace())
    timeline.start(folder, {})
    clocks, now, facts = (
        (time.thread_time(), time.process_time()),
        time.monotonic(),
        {"queue": 0.01, "prefill": 0.02, "tokens": 4},
    )
    for first in range(0, count, BATCH):
        names = [f"grpo/{number // GROUP}-{number % GROUP}" for number in range(first, first + BATCH)]
        requests = [Span(name="request", start=now, seconds=0.5, facts={"sample": name, **facts}) for name in names]
        for span in requests:
            timeline.begin(span)
        for span in requests:
            timeline.end(span)
        for at in range(0, BATCH, GROUP):
            pass_through(timeline, Span(name="reward", start=now + 0.5, facts={"samples": names[at : at + GROUP]}))
        batch: Any = SimpleNamespace(sample_ids=names)
        timeline.batch(batch)
        pass_through(timeline, Span(name="train", start=now + 1))
        timeline.writer.flush()
    loop = time.thread_time() - clocks[0]
    timeline.close()
    return loop / count, (time.process_time() - clocks[1]) / count, (folder / "trace.json").stat().st_size / count


def pass_through(timeline: Timeline, span: Span) -> None:
    """A span of a quarter of a second."""
    timeline.begin(span)
    span.seconds = 0.25
    timeline.end(span)


def demo_sample(folder: Path) -> float:
    """Processor seconds a sample of GRPO in the recipe of rm_math, the start of the run left out."""
    costs = [run(folder / f"run-{steps}", steps) for steps in (SHORT, LONG)]
    return (costs[1] - costs[0]) / ((LONG - SHORT) * BATCH)


def run(path: Path, steps: int) -> float:
    """Processor seconds of a run."""
    words = ["run", "--plugin", "rm_math", "stage.warmup.num_rollout=1", "--num-rollout", str(steps)]
    words += [
        "--rollout-batch-size",
        str(BATCH // GROUP),
        "--n-samples-per-prompt",
        str(GROUP),
        "--run-dir",
        str(path),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "slime_cli.main", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
