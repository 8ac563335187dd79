"""Estimates and their intervals from counts and scores: pure functions, and the same answer every time.

    pass@k     Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1
    maj@k      the mean over all k of a question's n samples, as pass@k is, of "the most frequent answer is right"
    intervals  Wilson's where a figure lies in [0, 1]; a percentile bootstrap over questions for anything else

The sampling unit is the question: samples of one question are correlated and never counted as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slime_core.evaluation.questions import Question

Z95 = 1.959963984540054  # of a 95 % interval
RESAMPLES = 5000
CHUNK = 1 << 22  # resampled values held at once, 32 MiB


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of a question's ``n`` samples, of which ``c`` are right, hold a right one: 1 - C(n-c,k) / C(n,k).

    Unbiased for the chance that k new samples do (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.

    Example:
        pass_at_k(4, 1, 2) == 0.5
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n = {n} samples, c = {c} right, k = {k}: 0 <= c <= n and 1 <= k <= n must hold")
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def majority_at_k(votes: Sequence[tuple[int, float]], k: int, *, silent: int = 0) -> float:
    """Chance that the most frequent answer among k of a question's samples is right.

    It is the mean over all subsets of k samples, so it is unbiased for k new samples, as pass@k is. Answers that are
    equally frequent win equally often; a subset without an answer is wrong.

    Args:
        votes: a pair an answer: how many samples gave it, and how right it is (0 to 1).
        k: size of the subsets, at most the number of samples.
        silent: samples without an answer; they are drawn and do not vote.

    Raises:
        ValueError: k below 1 or above the number of samples.

    Example:
        majority_at_k([(2, 1.0), (1, 0.0)], 2)   # aa, ab, ab: 1 + 1/2 + 1/2 of 3 subsets
    """
    n = sum(count for count, _ in votes) + silent
    if not 1 <= k <= n:
        raise ValueError(f"maj@k of {n} samples has k from 1 to {n}, not {k}")
    counts = tuple(sorted(count for count, _ in votes))
    won = sum(Fraction(value) * _wins(count, _without(counts, count), silent, k) for count, value in votes if value)
    return float(won)


def wilson(mean: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share ``mean`` of so many trials; never a point, never outside [0, 1].

    E. B. Wilson 1927. It keeps its coverage near 0 and 1, where most benchmarks are, unlike mean ± z·SE.

    Example:
        wilson(0.0, 10)   # (0.0, 0.278)
    """
    square = z * z
    centre = (mean + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * math.sqrt(mean * (1 - mean) / trials + square / (4 * trials * trials))
    low, high = (0.0 if mean == 0 else centre - half), (1.0 if mean == 1 else centre + half)
    return max(0.0, low), min(1.0, high)


def share_interval(values: Sequence[float], most: float = 1.0) -> tuple[float, float]:
    """95 % interval of the mean of a question's shares, each in [0, 1]: Wilson's, with the effective number of trials.

    That number is p (1 - p) / Var(mean) (Kish 1965; with Wilson's interval: Franco et al. 2019): questions where they
    are only right or wrong, more where each is a mean over samples, never more than ``most`` a question.

    Example:
        share_interval([1.0, 0.0, 1.0, 1.0]) == wilson(0.75, 4)
    """
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / count / count
    spread = mean * (1 - mean)
    trials = count * most if variance <= 0 or spread <= 0 else min(spread / variance, count * most)
    return wilson(mean, count if spread <= 0 else max(trials, 1.0))


def bootstrap_interval(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of the mean, by drawing questions again (Efron 1979); a fixed seed, a fixed answer.

    For figures without bounds. Where all values are alike it is a point.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.Generator(np.random.Philox(key=0))
    rows = max(1, CHUNK // len(data))
    means: list[NDArray[np.float64]] = []
    for start in range(0, resamples, rows):
        indices = rng.integers(0, len(data), size=(min(rows, resamples - start), len(data)))
        means.append(data[indices].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def _without(counts: tuple[int, ...], one: int) -> tuple[int, ...]:
    rest = list(counts)
    rest.remove(one)
    return tuple(rest)


@lru_cache(maxsize=4096)
def _wins(count: int, others: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Share of k-subsets that an answer given ``count`` times wins, ties shared; exact."""
    won = Fraction(0)
    for votes in range(1, min(count, k) + 1):
        room = k - votes
        ways: dict[tuple[int, int], int] = {(0, 0): 1}  # (taken, answers that tie) -> subsets
        for other in others:
            totals: dict[tuple[int, int], int] = {}
            for (used, ties), number in ways.items():
                for more in range(min(votes, other, room - used) + 1):
                    key = used + more, ties + (more == votes)
                    totals[key] = totals.get(key, 0) + number * math.comb(other, more)
            ways = totals
        for (used, ties), number in ways.items():
            won += Fraction(number * math.comb(count, votes) * math.comb(silent, room - used), ties + 1)
    return won / math.comb(sum(others) + count + silent, k)


Figures = dict[str, float]


def figures_of(questions: Sequence[Question], threshold: float) -> Figures:
    """The figures of a set; a sample is right from the reward ``threshold`` on."""
    sizes = ks_of(questions)
    figures: Figures = {}
    for k in sizes:
        figures |= _interval(f"pass@{k}", passed(questions, k, threshold), k, questions)
    if any(answer is not None for q in questions for answer in q.answers):
        for k in sizes[1:]:
            figures |= _interval(f"maj@{k}", voted(questions, k, threshold), k, questions)
    if means := [_mean([score for score, _ in q.judged]) for q in questions if q.judged]:
        figures["reward/mean/low"], figures["reward/mean/high"] = bootstrap_interval(means)
    return figures | _categories(questions, threshold, sizes)


def ks_of(questions: Sequence[Question]) -> list[int]:
    """1, 2, 4 ... up to the most samples that a question has, and that number."""
    most = max((len(q.scores) for q in questions), default=0)
    return sorted({*(2**i for i in range(most.bit_length())), most} - {0})


def passed(questions: Sequence[Question], k: int, threshold: float) -> list[float]:
    """pass@k of each question that was judged at least k times."""
    scores = [[score for score, _ in q.judged] for q in questions]
    return [pass_at_k(len(s), sum(score >= threshold for score in s), k) for s in scores if len(s) >= k]


def voted(questions: Sequence[Question], k: int, threshold: float) -> list[float]:
    """maj@k of each question that was judged at least k times; an answer is as right as its samples are on average."""
    return [_majority(q.judged, k, threshold) for q in questions if len(q.judged) >= k]


def _majority(judged: Sequence[tuple[float, str | None]], k: int, threshold: float) -> float:
    groups: dict[str, list[float]] = {}
    for score, answer in judged:
        if answer is not None:
            groups.setdefault(answer, []).append(float(score >= threshold))
    votes = [(len(right), _mean(right)) for right in groups.values()]
    return majority_at_k(votes, k, silent=len(judged) - sum(count for count, _ in votes))


def _interval(name: str, values: Sequence[float], k: int, questions: Sequence[Question]) -> Figures:
    if not values:
        return {}
    most = max(len(q.scores) for q in questions)
    low, high = share_interval(values, max(1, most // k))
    figures = {name: _mean(values), f"{name}/low": low, f"{name}/high": high}
    return figures if len(values) == len(questions) else figures | {f"{name}/questions": float(len(values))}


def _categories(questions: Sequence[Question], threshold: float, sizes: Sequence[int]) -> Figures:
    figures: Figures = {}
    for name in sorted({q.category for q in questions} - {""}):
        part = [q for q in questions if q.category == name]
        category_figures: Figures = {"questions": float(len(part))}
        for k in dict.fromkeys((sizes[0], sizes[-1])):
            category_figures |= _interval(f"pass@{k}", passed(part, k, threshold), k, part)
        if len(sizes) > 1 and any(answer is not None for q in part for answer in q.answers):
            category_figures |= _interval(f"maj@{sizes[-1]}", voted(part, sizes[-1], threshold), sizes[-1], part)
        figures |= {f"category/{name}/{key}": value for key, value in category_figures.items()}
    return figures


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
