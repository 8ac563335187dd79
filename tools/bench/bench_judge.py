"""Judgements a second of the kernelbench judge on this machine, over problems that come with the plugin.

    python tools/bench/bench_judge.py [--workers 2] [--seconds 20] [--level auto] [--gpus UUID,...] [--askers 1 4 13]

Every candidate is a distinct text, so that none is remembered. Printed: judgements a second of honest kernels, of
wrong ones and of refused ones, the time of each stage at the median, what honest ones were suspected of, and the
machine's load before and after. ``steady_per_second`` leaves out the first judgements of all callers and the end, when
fewer and fewer ask. ``--askers`` asks for honest ones alone, by so many callers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from slime_kernelbench.judge import JudgeOptions, LocalJudge
from slime_kernelbench.types import KernelProblem, Verdict

CORPUS = Path(__file__).parents[2] / "plugins" / "slime_kernelbench" / "tests" / "corpus"
HONEST = ("add_one_shot", "relu_with_main", "row_softmax", "heuristics_gelu", "autograd_function")
WRONG = ("memory_never_written", "zeros", "identity_for_positive_inputs")
REFUSED = ("plain_torch", "try_falls_back")


@dataclass(slots=True)
class Measured:
    """One kind of candidates."""

    askers: int
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # seconds from the beginning, while all were asking

    def steady(self) -> float | None:
        """Judgements a second between the end of the first ones and the last while all still asked."""
        if len(self.ends) <= self.askers:
            return None
        return round((len(self.ends) - self.askers) / (self.ends[-1] - self.ends[self.askers - 1]), 2)

    def row(self) -> dict[str, object]:
        stages: dict[str, list[float]] = {}
        for verdict in self.verdicts:
            for stage, seconds in verdict.seconds.items():
                stages.setdefault(stage, []).append(seconds * 1e3)
        return {
            "judgements": len(self.verdicts),
            "per_second": round(len(self.verdicts) / self.seconds, 2),
            "steady_per_second": self.steady(),
            "statuses": dict(Counter(verdict.status for verdict in self.verdicts)),
            "median_ms": {stage: round(statistics.median(held), 2) for stage, held in stages.items()},
            "suspected": sorted(
                {f"{flag.rule}: {flag.detail}" for verdict in self.verdicts for flag in verdict.flags}
            )[:8],
        }


def candidates(names: tuple[str, ...], kind: str) -> list[tuple[str, KernelProblem]]:
    found = []
    for name in names:
        text = (CORPUS / kind / f"{name}.txt").read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# problem: ")
        source = (CORPUS / "problems" / f"{title}.txt").read_text(encoding="utf-8")
        found.append((text, KernelProblem(id=f"corpus/{title}", name=title, source=source)))
    return found


async def measure(judge: LocalJudge, kind: list[tuple[str, KernelProblem]], seconds: float, askers: int) -> Measured:
    measured, number = Measured(askers), 0
    await asyncio.gather(*(judge.judge(f"{text}\n# warm", problem) for text, problem in kind))  # references, once
    began = time.perf_counter()

    async def keep_asking() -> None:
        nonlocal number
        while time.perf_counter() - began < seconds:
            number += 1
            text, problem = kind[number % len(kind)]
            measured.verdicts.append(await judge.judge(f"{text}\n# {number} {began}", problem))
            if (end := time.perf_counter() - began) < seconds:
                measured.ends.append(end)

    await asyncio.gather(*(keep_asking() for _ in range(askers)))
    measured.seconds = time.perf_counter() - began
    return measured


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--level", default="auto")
    parser.add_argument("--gpus", default="")
    parser.add_argument("--askers", type=int, nargs="+", default=[])
    asked = parser.parse_args()
    gpus = tuple(filter(None, asked.gpus.split(",")))
    options = JudgeOptions(
        workers=asked.workers, level=asked.level, i_trust_this_code=asked.level == "none", gpus=gpus
    )
    before = os.getloadavg()
    rows: dict[str, object] = {"load_before": before, "cores": os.cpu_count(), "workers": asked.workers}
    honest, every = candidates(HONEST, "honest"), asked.workers + 1
    async with LocalJudge(options) as judge:
        for askers in asked.askers:
            rows[f"honest, {askers} at once"] = (await measure(judge, honest, asked.seconds, askers)).row()
        if not asked.askers:
            wrong, refused = candidates(WRONG, "cheats"), candidates(REFUSED, "cheats")
            rows["honest"] = (await measure(judge, honest, asked.seconds, every)).row()
            rows["wrong"] = (await measure(judge, wrong, asked.seconds / 2, every)).row()
            rows["refused"] = (await measure(judge, refused, 1.0, every)).row()
    print(json.dumps(rows | {"load_after": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
