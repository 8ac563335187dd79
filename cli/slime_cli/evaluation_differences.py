"""Compare two evaluations of the same sets: per set the difference, its interval and a paired test.

Questions are paired by their place in the set. A question that both models were asked says most of what there is to
say; comparing two means with two intervals would throw that away.

    one sample a question     McNemar's exact test on the questions that only one of the two got right
    more                      sign-flip test on each question's difference of pass@1
    interval                  paired bootstrap over questions
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from slime_cli.evaluation_records import by_name
from slime_core.errors import DataError
from slime_core.evaluation.questions import Question
from slime_core.evaluation.record import Evaluation
from slime_core.evaluation.statistics import CHUNK, bootstrap_interval, passed

LEVEL = 0.05
FLIPS = 20_000
EXACT = 20  # questions that differ, up to which every flip of signs is looked at


@dataclass(slots=True, frozen=True, kw_only=True)
class Difference:
    """B minus A, over the questions on which both were judged.

    Example:
        Difference(name="aime", questions=30, first=0.4, second=0.6, low=0.03, high=0.37, p=0.03, test="McNemar")
    """

    name: str
    questions: int
    first: float  # mean pass@1 of A
    second: float  # of B
    low: float  # 95 % interval of the difference
    high: float
    p: float  # two-sided
    test: str  # "McNemar" or "sign flip"
    first_only: int = 0  # questions on which A is better
    second_only: int = 0  # and B
    left_out: int = 0  # questions of one alone, or not judged
    reward: dict[str, float] = field(default_factory=dict)  # difference low high of the mean reward
    categories: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # questions, A, B

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        moved = self.second - self.first
        better = "B is better" if moved > 0 else "A is better" if moved < 0 else "no difference"
        claim = better if self.p < LEVEL or moved == 0 else "no significant difference"
        return (
            f"{self.name}: {claim}: {moved:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p:.3g} ({self.test}, "
            f"A alone better on {self.first_only} and B alone on {self.second_only} of {self.questions} questions)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "difference": self.second - self.first, "sentence": self.sentence}


def compare(first: Sequence[Evaluation], second: Sequence[Evaluation]) -> list[Difference]:
    """The difference of every set that both have, in A's order.

    Raises:
        DataError: DAT29 no set in common, or one whose questions differ.
    """
    others = by_name(second)
    common = [record for record in first if record.name in others]
    if not common:
        raise DataError(
            "the two evaluations have no set in common",
            code="DAT29",
            where="A and B",
            why=f"A has {', '.join(by_name(first))}; B has {', '.join(others)}",
            fix="evaluate both with the same config: slime eval MODEL CONFIG",
        )
    return [_difference(record, others[record.name]) for record in common]


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided p-value that the same questions are as often right for both: the exact binomial (McNemar 1947).

    Args:
        first_only: questions that only the first got right.
        second_only: questions that only the second got right.

    Example:
        mcnemar(0, 5) == 2 / 2**5
    """
    n, low = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(n, i) for i in range(low + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**n)))


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p-value that paired differences have mean 0, by flipping their signs (Fisher 1935).

    Every flip is looked at for up to 20 differences that are not 0; beyond, 20,000 of a fixed seed, counted as
    Phipson and Smyth (2010) do, so that it is never 0. With differences of -1, 0 and 1 it is McNemar's exact test.
    """
    data = np.asarray([value for value in differences if value], dtype=np.float64)
    if not len(data):
        return 1.0
    observed = abs(math.fsum(data)) * (1 - 1e-12)  # sums that are equal but for rounding count as equal
    if len(data) <= EXACT:
        sums = np.zeros(1)
        for value in data:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed).mean())
    rng = np.random.Generator(np.random.Philox(key=0))
    hits, rows = 0, max(1, CHUNK // len(data))
    for start in range(0, FLIPS, rows):
        signs = 2.0 * rng.integers(0, 2, size=(min(rows, FLIPS - start), len(data))) - 1
        hits += int((np.abs(signs @ data) >= observed).sum())
    return (1 + hits) / (1 + FLIPS)


def _difference(one: Evaluation, two: Evaluation) -> Difference:
    pairs = _pairs(one, two)
    scores = [(passed([a], 1, one.threshold)[0], passed([b], 1, two.threshold)[0]) for a, b in pairs]
    moved = [b - a for a, b in scores]
    binary = all(value in (0.0, 1.0) for pair in scores for value in pair)
    down, up = sum(d < 0 for d in moved), sum(d > 0 for d in moved)
    low, high = bootstrap_interval(moved)
    rewards = [_reward(b) - _reward(a) for a, b in pairs]
    ids = {q.id for record in (one, two) for q in record.questions}
    return Difference(
        name=one.name,
        questions=len(pairs),
        first=_mean([a for a, _ in scores]),
        second=_mean([b for _, b in scores]),
        low=low,
        high=high,
        p=mcnemar(down, up) if binary else sign_flip(moved),
        test="McNemar" if binary else "sign flip",
        first_only=down,
        second_only=up,
        left_out=len(ids) - len(pairs),
        reward=dict(zip(("difference", "low", "high"), (_mean(rewards), *bootstrap_interval(rewards)), strict=True)),
        categories=_categories(pairs, scores),
    )


def _pairs(one: Evaluation, two: Evaluation) -> list[tuple[Question, Question]]:
    """Questions on which both were judged at least once."""
    questions = {q.id: q for q in two.questions}
    pairs = [(q, questions[q.id]) for q in one.questions if q.id in questions]
    other = next((a.id for a, b in pairs if a.key != b.key), None)
    judged = [(a, b) for a, b in pairs if a.judged and b.judged]
    if other is None and judged and one.threshold == two.threshold:
        return judged
    raise DataError(
        f"the evaluations of set {one.name!r} cannot be paired",
        code="DAT29",
        where=other or one.name,
        why="the label of this question differs: the data is not the same"
        if other is not None
        else f"right is a reward from {one.threshold} on in A, and from {two.threshold} on in B"
        if judged
        else "there is no question that both were asked and judged on",
        fix="evaluate both with the same config and data: slime eval MODEL CONFIG",
    )


def _categories(
    pairs: Sequence[tuple[Question, Question]], scores: Sequence[tuple[float, float]]
) -> dict[str, tuple[int, float, float]]:
    pairs_of: dict[str, list[tuple[float, float]]] = {}
    for (question, _), pair in zip(pairs, scores, strict=True):
        if question.category:
            pairs_of.setdefault(question.category, []).append(pair)
    return {
        name: (len(part), _mean([a for a, _ in part]), _mean([b for _, b in part]))
        for name, part in sorted(pairs_of.items())
    }


def _reward(question: Question) -> float:
    return _mean([score for score, _ in question.judged])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
