"""Problems in, those that ask nothing named, with why: a task that a trivial answer passes teaches to cheat.

    runs        the reference runs at some size, within the limits of a candidate, and is finite
    repeats     twice with the same seeds it gives the same bits
    constants   zeros, ones or the mean of its first output do not pass for it
    inputs      no input, handed back as it came, passes for it
    replay      its first output does not pass for the others: the inputs matter

The reference runs in the sandbox, on the inputs that the judge would draw; what passes is decided here, by the judge's
own comparison, over every case of every size. One case that a trivial answer fails is enough to keep a problem.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_kernelbench.judge.compare import Expected, array_of, compare, scales_of
from slime_kernelbench.judge.wire import Leaf, Tree, leaves_of, pack, unpack
from slime_kernelbench.types import KernelProblem

if TYPE_CHECKING:
    from slime_kernelbench.options import Options
    from slime_sandbox import Sandbox

ENTRY = "slime_kernelbench.judge.reference:main"
PRELOAD = ("torch", "slime_kernelbench.judge.reference")
STYLES = ("even", "odd")
SEEDS = (20_011, 20_021)  # of inputs; of weights. Nobody trains on what is drawn here
SECONDS = 60.0
TOO_LARGE = re.compile(r"Unusable: (it|its largest input) has \d+ (elements|parameters)")  # `judge.reference`'s words
Sized = tuple[str, dict[str, Any]]  # a size, and a case of it
Answer = Callable[[dict[str, Any], Tree], Tree]


@dataclass(slots=True, frozen=True, kw_only=True)
class Screened:
    """What was found out about one problem.

    Example: Screened(problem=problem, reasons=("zeros pass for it",), cases=14).verdict == "unsound"
    """

    problem: KernelProblem
    reasons: tuple[str, ...] = ()  # it is not sound
    unknown: str = ""  # nothing is known about it, and why
    cases: int = 0  # that were compared

    @property
    def verdict(self) -> str:
        """``sound``, ``unsound`` or ``unknown``."""
        return "unsound" if self.reasons else "unknown" if self.unknown else "sound"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        problem = self.problem
        fields = {"id": problem.id, "name": problem.name, "where": problem.where, "verdict": self.verdict}
        return {**fields, "reasons": list(self.reasons), "unknown": self.unknown, "cases": self.cases}

    def cells(self) -> list[str]:
        """For the table."""
        return [self.problem.id, self.problem.name, self.verdict, ("; ".join(self.reasons) or self.unknown)[:200]]


async def screen_all(problems: Sequence[KernelProblem], options: Options, *, at_once: int) -> list[Screened]:
    """A row a problem, in order.

    Raises:
        SandboxError: the isolation that ``options.sandbox`` asks for cannot be had.
    """
    from slime_sandbox import Policy, Sandbox

    policy = Policy(level=options.sandbox, i_trust_this_code=options.i_trust_this_code)
    free = asyncio.Semaphore(at_once)

    async def one(box: Sandbox, problem: KernelProblem) -> Screened:
        async with free:
            return await screen(problem, box)

    async with await Sandbox.open(policy, preload=PRELOAD) as box:
        return list(await asyncio.gather(*(one(box, problem) for problem in problems)))


async def screen(problem: KernelProblem, box: Sandbox) -> Screened:
    """Look at one problem; ``box`` has :data:`PRELOAD` loaded."""
    first = await _run(problem, box)
    again = await _run(problem, box) if isinstance(first, list) else first
    if isinstance(first, Screened) or isinstance(again, Screened):
        return first if isinstance(first, Screened) else again  # type: ignore[return-value]
    varies = [] if _outputs(first) == _outputs(again) else ["it gives other bits every time"]
    return Screened(problem=problem, reasons=(*varies, *trivial(first)), cases=len(first))


def write_sound(path: Path, rows: Sequence[Screened]) -> None:
    """Write the problems that are sound as rows that `load` reads, with the ids they have."""
    sound = [row.problem for row in rows if row.verdict == "sound"]
    records = [
        {"id": problem.id, "name": problem.name, "level": problem.level, "code": problem.source} for problem in sound
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")


def trivial(cases: Sequence[Sized]) -> list[str]:
    """Which trivial answers pass for the reference, over its cases as (size, case)."""
    scales = {style: scales_of(case["exact"]) for style, case in reversed(cases)}
    expected = [
        Expected(exact=case["exact"], computed=case["computed"], scales=scales[style]) for style, case in cases
    ]
    answers = []
    for name, answer in _answers(cases):
        outputs = [answer(case, case["computed"]) for _, case in cases]
        if all(compare(output, reference).agrees for output, reference in zip(outputs, expected, strict=True)):
            answers.append(f"{name} for it")
    if len(cases) > 1 and _replayed(cases, expected):
        answers.append("its first output passes for the others: inputs do not matter")
    return answers


def _answers(cases: Sequence[Sized]) -> Iterator[tuple[str, Answer]]:
    first = cases[0][1]
    yield "zeros pass", lambda case, like: _filled(like, 0.0)
    yield "ones pass", lambda case, like: _filled(like, 1.0)
    numbers = [array_of(leaf).astype(np.float64).ravel() for leaf in leaves_of(first["exact"])]
    mean = float(np.concatenate([*numbers, np.empty(0)]).mean()) if any(map(len, numbers)) else 0.0
    yield f"the constant {mean:.3g} passes", lambda case, like: _filled(like, mean)
    for number in range(len(leaves_of(first["inputs"]))):
        yield f"input {number + 1} passes", partial(_input, number)


def _input(number: int, case: dict[str, Any], like: Tree) -> Tree:
    return leaves_of(case["inputs"])[number]


def _replayed(cases: Sequence[Sized], expected: Sequence[Expected]) -> bool:
    """Whether, for every size, the output of its first case agrees with all its cases."""
    outputs: dict[str, Tree] = {}
    compared = 0
    for (style, case), reference in zip(cases, expected, strict=True):
        if style not in outputs:
            outputs[style] = case["computed"]
            continue
        compared += 1
        if not compare(outputs[style], reference).agrees:
            return False
    return compared > 0


def _filled(like: Tree, value: float) -> Tree:
    """A tree of the same form, every number of it ``value``."""
    if isinstance(like, Leaf):
        return replace(like, data=_bytes(like, value))
    if isinstance(like, dict):
        return {key: _filled(item, value) for key, item in like.items()}
    if isinstance(like, (list, tuple)):
        return type(like)(_filled(item, value) for item in like)
    return type(like)(value) if isinstance(like, (bool, int, float)) else like


def _bytes(leaf: Leaf, value: float) -> bytes:
    if value == 0 or leaf.dtype.startswith("float8"):
        return bytes(len(leaf.data))
    count = int(np.prod(leaf.shape, dtype=np.int64))
    if leaf.dtype == "bfloat16":
        return (np.full(count, value, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.full(count, value).astype(np.dtype(leaf.dtype).newbyteorder("<")).tobytes()


def _outputs(cases: Sequence[Sized]) -> list[bytes]:
    return [bytes(leaf.data) for _, case in cases for leaf in leaves_of(case["computed"])]


async def _run(problem: KernelProblem, box: Sandbox) -> list[Sized] | Screened:
    """What the reference makes, as (size, case); or what is to be said where it makes nothing."""
    from slime_sandbox import Limits

    seed, weights_seed = SEEDS
    request = {"source": problem.source, "seed": seed, "weights_seed": weights_seed, "styles": list(STYLES)}
    outcome = await box.run(ENTRY, pack(request), Limits(wall_seconds=SECONDS))
    if outcome.status == "infra":
        return Screened(problem=problem, unknown=f"the sandbox failed: {outcome.reason}")
    if outcome.status != "ok":
        reason = f"its reference could not be run: {outcome.status}, {outcome.reason}"
        return Screened(problem=problem, reasons=(reason,))
    try:
        answer = unpack(outcome.result)
        if "error" not in answer:
            return [(style, case) for style, answer_of in answer["styles"].items() for case in answer_of["cases"]]
        reason = " ".join(str(answer["error"]).split())[:300]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"its process answered nonsense: {error}"
    if TOO_LARGE.match(reason):
        return Screened(problem=problem, unknown=f"no sizes were found at which the judge can ask it here: {reason}")
    return Screened(problem=problem, reasons=(f"its reference does not run: {reason}",))
