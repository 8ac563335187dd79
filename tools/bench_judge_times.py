"""How far the judge's times of one kernel lie apart, from one process to the next, on a GPU.

    python tools/bench_judge_times.py [--texts 12] [--kernel add_one_shot] [--askers 1 6]

The same kernel is judged again and again as distinct texts, by so many callers at once, with so many timed calls a
process. Printed for each: how far apart the medians of all processes are, and what judgements tell, the slower of
their two; and every process's milliseconds by the device's events, as quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from bench_judge import candidates

from slime_kernelbench.judge import JudgeOptions, LocalJudge, speed, timing


def apart(values: Sequence[float]) -> str:
    """The largest over the smallest, less one."""
    return f"{max(values) / min(values) - 1:.1%}"


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(one, 5) for one in statistics.quantiles(values, n=4)]


async def measure(options: JudgeOptions, kernel: str, texts: int, askers: int, events: int) -> dict[str, Any]:
    """Judge ``texts`` texts of the kernel and read what each process measured."""
    seen: list[tuple[timing.Samples, timing.Samples]] = []
    told, speed.EVENTS = timing.told, events

    def noted(**given: Any) -> Any:
        seen.append((given["first"], given["again"]))
        return told(**given)

    timing.told = noted  # type: ignore[assignment]
    ((text, problem),) = candidates((kernel,), "honest")
    text = text.replace("= 128", "= 1024")
    waiting = list(range(texts))
    try:
        async with LocalJudge(options) as judge:
            await judge.judge(f"{text}\n# warm", problem)
            seen.clear()

            async def ask() -> None:
                while waiting:
                    await judge.judge(f"{text}\n# {waiting.pop()}", problem)

            await asyncio.gather(*(ask() for _ in range(askers)))
    finally:
        timing.told = told  # type: ignore[assignment]
    medians = [[timing.median(one.events) for one in pair] for pair in seen]
    return {
        "calls": len(seen[0][0].events),
        "processes apart": apart([one for pair in medians for one in pair]),
        "judgements apart": apart([max(pair) for pair in medians]),
        "quartiles": [quartiles(one.events) for pair in seen for one in pair],
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--kernel", default="add_one_shot")
    parser.add_argument("--askers", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--events", type=int, nargs="+", default=[speed.EVENTS, 3 * speed.EVENTS])
    asked = parser.parse_args()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    options = JudgeOptions(workers=6, gpus=(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}",), seconds=120.0)
    for askers in asked.askers:
        for events in asked.events:
            found = await measure(options, asked.kernel, asked.texts, askers, events)
            print(json.dumps({"callers": askers} | found), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
