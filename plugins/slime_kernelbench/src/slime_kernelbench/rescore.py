"""Rescoring: the kernels that a run wrote, each judged again by a judge of today."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import DataError
from slime_kernelbench.records import PROBLEMS, read, read_problems
from slime_kernelbench.types import Judge, KernelProblem


@dataclass(slots=True, kw_only=True)
class Kernel:
    """One source that a run wrote for a problem, however often."""

    source: str
    problem: KernelProblem
    first: str  # id of the first turn that wrote it
    before: str  # the verdict's status then
    times: int = 1


def kernels(run_dir: Path) -> list[Kernel]:
    """Every different kernel of a run, in the order in which they were first written.

    Raises:
        DataError: DAT17 or DAT19, as `records.read`; DAT17 a turn's problem is not among the run's.
    """
    problems = {problem.id: problem for problem in read_problems(run_dir)}
    kernels: dict[tuple[str, str], Kernel] = {}
    for turn in read(run_dir):
        if turn["source"] is None or turn["verdict"]["status"] == "infra":
            continue
        if turn["problem"] not in problems:
            raise DataError(
                f"turn {turn['id']} answers problem {turn['problem']}, which the run did not write down",
                code="DAT17",
                where=str(run_dir / PROBLEMS),
                why="it was made by an earlier version, or the file was removed",
            )
        key = turn["problem"], turn["source"]
        if key in kernels:
            kernels[key].times += 1
        else:
            problem, status = problems[turn["problem"]], turn["verdict"]["status"]
            kernels[key] = Kernel(source=turn["source"], problem=problem, first=turn["id"], before=status)
    return list(kernels.values())


async def rescore(items: Sequence[Kernel], judge: Judge, *, at_once: int) -> list[dict[str, Any]]:
    """A row a kernel, in order; ``at_once`` are judged at the same time."""
    free = asyncio.Semaphore(at_once)

    async def one(kernel: Kernel) -> dict[str, Any]:
        async with free:
            verdict = await judge.judge(kernel.source, kernel.problem)
        return {
            "first": kernel.first,
            "problem": kernel.problem.id,
            "times": kernel.times,
            "before": kernel.before,
            "now": verdict.status,
            "flags": sorted({flag.rule for flag in verdict.flags}),
            "diagnostics": [
                {"kind": diagnostic.kind, "message": diagnostic.message} for diagnostic in verdict.diagnostics
            ],
            "source_hash": verdict.source_hash,
        }

    return list(await asyncio.gather(*(one(kernel) for kernel in items)))
