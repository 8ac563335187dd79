"""How far the judge's times of one kernel lie apart, from one process to the next, on a GPU.

    python tools/bench/bench_judge_times.py --gpus UUID [--texts 12] [--kernel NAME] [--askers 1 6] [--events 40 120]

The same kernel is judged again and again as distinct texts, by so many callers at once, with so many timed calls a
process. Printed for each: how far apart the medians of all processes are, and what judgements tell, the slower of
their two; and each judgement's two medians in milliseconds, with the half width of the first one's 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from bench_judge import candidates

from slime_kernelbench.judge import JudgeOptions, LocalJudge, speed
from slime_kernelbench.types import Timing


def apart(values: Sequence[float]) -> str:
    """The largest over the smallest, less one."""
    return f"{max(values) / min(values) - 1:.1%}"


async def measure(judge: LocalJudge, kernel: str, texts: int, askers: int) -> dict[str, Any]:
    """Judge so many texts of the kernel, and read what was told of their times."""
    ((text, problem),) = candidates((kernel,), "honest")
    text, waiting, found = text.replace("= 128", "= 1024"), list(range(texts)), list[Timing]()
    await judge.judge(f"{text}\n# warm", problem)  # the reference, once

    async def ask() -> None:
        while waiting:
            verdict = await judge.judge(f"{text}\n# {waiting.pop()}", problem)
            if verdict.timing is not None:
                found.append(verdict.timing)

    await asyncio.gather(*(ask() for _ in range(askers)))
    return {
        "calls": found[0].repeats,
        "put aside": texts - len(found),
        "processes apart": apart([time for one in found for time in (one.candidate, one.remeasured)]),
        "judgements apart": apart([one.slower for one in found]),
        "judgements": [
            [round(time, 5) for time in (one.candidate, one.remeasured, one.candidate_ci)] for one in found
        ],
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", required=True)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--kernel", default="add_one_shot")
    parser.add_argument("--askers", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--events", type=int, nargs="+", default=[speed.EVENTS, 3 * speed.EVENTS])
    asked = parser.parse_args()
    options = JudgeOptions(workers=max(asked.askers), gpus=tuple(asked.gpus.split(",")), seconds=120.0)
    for askers in asked.askers:
        for speed.EVENTS in asked.events:
            async with LocalJudge(options) as judge:
                found = await measure(judge, asked.kernel, asked.texts, askers)
            print(json.dumps({"callers": askers} | found), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
