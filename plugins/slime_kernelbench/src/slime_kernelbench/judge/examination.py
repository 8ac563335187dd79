"""What candidates of one problem are asked: cases from the reference's process, under secret seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from slime_kernelbench.judge.asked import RecentCache, require_answer
from slime_kernelbench.judge.compare import Expected, numbers_of, scales_of
from slime_kernelbench.judge.opened import OpenedBox
from slime_kernelbench.judge.tolerance import well_conditioned
from slime_kernelbench.judge.wire import Leaf, Tree, leaves_of, pack
from slime_kernelbench.secret import Secret
from slime_kernelbench.types import KernelProblem
from slime_sandbox import Limits

REFERENCE = "slime_kernelbench.judge.reference:main"
STYLES = ("even", "odd", "long")
PLAN = {"even": ("normal", "negative", "extreme"), "odd": ("sparse", "large"), "long": ("again",)}
"""Regimes asked under each style; where one is not to be had, the next of `_INSTEAD` is."""
_INSTEAD = ("mixed", "small", "again", "normal")
KEPT = 256  # examinations


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One call of a candidate's model, and what is expected of it."""

    style: str
    regime: str
    shapes: str
    inputs: Tree
    expected: Expected


@dataclass(slots=True, kw_only=True)
class SizeStyle:
    """One set of sizes."""

    name: str
    init: Tree
    state: Tree
    woken: dict[str, float]  # weights that have other values than the model is made with, and what they were
    questions: list[ModelCall]
    spare: ModelCall  # asked with the kernels taken out


@dataclass(slots=True, kw_only=True)
class Examination:
    """All questions under one pair of secret seeds."""

    weights_seed: int
    order: int  # that programs of a kernel run in follows from it, for each call
    styles: list[SizeStyle]
    dtypes: frozenset[str] = field(default_factory=frozenset)


class Examiner:
    """Examines candidates: every occasion on which a problem is asked has an examination of its own.

    Without an occasion a problem has ``sets`` of them, and the candidate's text says which is its. What is in one
    follows from ``secret`` alone: the same candidate is asked the same in every order.
    """

    def __init__(self, opened: OpenedBox, secret: Secret, sets: int, seconds: float = 60.0) -> None:
        self._opened, self._secret, self._sets, self._seconds = opened, secret, sets, seconds
        self._cache = RecentCache[tuple[str, str], Examination](KEPT)
        self._larger = RecentCache[tuple[str, str, int], list[SizeStyle]](KEPT // 8)

    async def examination(self, problem: KernelProblem, source: str = "") -> Examination:
        """Questions for the candidate ``source``. Raises `Unjudgeable`."""
        which = problem.occasion or str(self._secret.number("set", problem.source, source) % self._sets)
        return await self._cache.get((problem.source, which), partial(self._draw, problem, which))

    async def larger(self, problem: KernelProblem, source: str, least: int) -> list[SizeStyle]:
        """Questions of at least so many elements for the candidate ``source``, where such can be had. Raises
        `Unjudgeable`."""
        which = problem.occasion or str(self._secret.number("set", problem.source, source) % self._sets)

        async def draw() -> list[SizeStyle]:
            return (await self._examine(problem, which, {"least": least}))[0]

        return await self._larger.get((problem.source, which, least), draw)

    async def _examine(self, problem: KernelProblem, which: str, more: Tree) -> tuple[list[SizeStyle], Tree]:
        request = {
            "source": problem.source,
            "seed": self._secret.number("inputs", problem.source, which, bits=48),
            "weights_seed": self._secret.number("weights", problem.source, which),
        }
        limits = Limits(wall_seconds=self._seconds, cpu_seconds=int(self._seconds) + 1, memory_bytes=4 << 30)
        box = await self._opened.box()
        outcome = await box.run(REFERENCE, pack(request | more), limits)
        with require_answer(outcome, problem, "examined") as answer:
            styles = [_style(name, style) for name, style in answer["styles"].items()]
        return styles, answer

    async def _draw(self, problem: KernelProblem, which: str) -> Examination:
        styles, answer = await self._examine(problem, which, {"styles": list(STYLES)})
        weights_seed = self._secret.number("weights", problem.source, which)
        order = self._secret.number("order", problem.source, which, bits=48)
        return Examination(weights_seed=weights_seed, order=order, styles=styles, dtypes=frozenset(_dtypes(answer)))


def _style(name: str, answer: Tree) -> SizeStyle:
    cases = {case["regime"]: case for case in answer["cases"] if _well_conditioned(case["exact"], case["computed"])}
    if not cases:
        raise ValueError("the reference's own rounding is as large as its answers")
    normal = cases.get("normal") or next(iter(cases.values()))
    scales = scales_of(normal["exact"])

    def question(regime: str) -> ModelCall:
        case = cases[regime]
        expected = Expected(exact=case["exact"], computed=case["computed"], scales=scales)
        return ModelCall(style=name, regime=regime, shapes=answer["shapes"], inputs=case["inputs"], expected=expected)

    regimes: list[str] = []
    for preferred in PLAN.get(name, ("normal",)):
        chosen = next(
            (regime for regime in (preferred, *_INSTEAD, *cases) if regime in cases and regime not in regimes), None
        )
        regimes.extend([chosen] if chosen else [])
    spare = next(
        (regime for regime in ("mixed", "again", *cases) if regime in cases and regime not in regimes), regimes[0]
    )
    return SizeStyle(
        name=name,
        init=answer["init"],
        state=answer["state"],
        woken=answer["woken"],
        questions=[question(regime) for regime in regimes],
        spare=question(spare),
    )


def _well_conditioned(exact: Tree, computed: Tree) -> bool:
    """Whether every output of the reference says something in its own dtype."""
    pairs = zip(leaves_of(exact), leaves_of(computed))
    return all(well_conditioned(numbers_of(one), numbers_of(two), two.dtype) for one, two in pairs)


def _dtypes(tree: Tree) -> Iterator[str]:
    leaves: list[Leaf] = leaves_of(tree)
    yield from (leaf.dtype for leaf in leaves)
