"""Figures of verdicts by problem, with their intervals. Pure functions; nothing here samples or judges.

A candidate that could not be judged (`infra`) is no sample: it is counted apart. Intervals take a problem for one
draw, however many samples it has, since samples of one problem are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any, Literal

from slime_kernelbench.types import Verdict

Baseline = Literal["eager", "compile"]
Z = 1.959963984540054  # of 95 %


@dataclass(slots=True, frozen=True, kw_only=True)
class Figure:
    """A mean over problems and its 95 % interval.

    Example: Figure(value=0.5, low=0.25, high=0.75, problems=40)
    """

    value: float
    low: float
    high: float
    problems: int  # that it is a mean over

    def as_json(self) -> dict[str, float | int]:
        """For `--json`."""
        return {"value": self.value, "low": self.low, "high": self.high, "problems": self.problems}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples is right, unbiased, where c of n are: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

    Example: pass_at_k(4, 1, 2) == 0.5

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {n} samples of which {c} are right")
    return 1.0 - comb(n - c, k) / comb(n, k)


def speedup_over(verdict: Verdict, baseline: Baseline) -> float | None:
    """Times faster than a baseline, by the slower of the two measurements; None where it was not measured."""
    timing = verdict.timing
    reference = None if timing is None else timing.eager if baseline == "eager" else timing.compiled
    if timing is None or reference is None:
        return None
    return reference / timing.slower


def is_fast(verdict: Verdict, p: float, baseline: Baseline) -> bool | None:
    """Whether it is right and more than p times as fast, strictly; None where that was not measured.

    Source: Ouyang et al., "KernelBench" (2025): fast_p; fast_0 is correctness.
    """
    if not verdict.correct or verdict.flags:
        return False
    if p == 0:
        return True
    speedup = speedup_over(verdict, baseline)
    return None if speedup is None else speedup > p


def mean_over(values: Sequence[float]) -> Figure | None:
    """The mean of a value in [0, 1] a problem, with Wilson's score interval; None where there is none.

    Exact draws of 0 or 1 have the largest variance of all values in [0, 1] with their mean, so that shares of several
    samples are covered at least as often. It is no point where all are alike.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    Example: mean_over([0.0] * 8) == Figure(value=0.0, low=0.0, high=0.3244..., problems=8)
    """
    if not values:
        return None
    n, mean = len(values), sum(values) / len(values)
    middle = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    return Figure(value=mean, low=max(0.0, middle - half), high=min(1.0, middle + half), problems=n)


def figures(verdicts: Mapping[str, Sequence[Verdict]], *, ks: Sequence[int], ps: Sequence[float]) -> dict[str, Any]:
    """What `bench` reports of verdicts by problem id, JSON-ready.

    ``pass@k`` is over problems with at least k samples. ``fast_p`` is null where a right answer was not timed.
    """
    judged = {
        id: [verdict for verdict in verdicts_kept if verdict.status != "infra"]
        for id, verdicts_kept in verdicts.items()
    }
    judged = {id: verdicts_kept for id, verdicts_kept in judged.items() if verdicts_kept}
    right = {id: [_right(verdict) for verdict in verdicts_kept] for id, verdicts_kept in judged.items()}
    statuses = [verdict.status for verdicts_kept in verdicts.values() for verdict in verdicts_kept]
    return {
        "problems": len(verdicts),
        "samples": len(statuses),
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "flagged": sum(bool(verdict.flags) for verdicts_kept in verdicts.values() for verdict in verdicts_kept),
        "compiled": _json(_shares(judged, lambda verdict: verdict.compiled)),
        "correct": _json(_shares(judged, _right)),
        "pass@k": {str(k): _json(_passed(right, k)) for k in ks},
        "fast_p": {base: {f"{p:g}": _json(_fast(judged, p, base)) for p in ps} for base in ("eager", "compile")},
    }


def _right(verdict: Verdict) -> bool:
    return verdict.correct and not verdict.flags


def _shares(judged: Mapping[str, Sequence[Verdict]], holds: Callable[[Verdict], bool]) -> Figure | None:
    return mean_over([sum(map(holds, outcomes)) / len(outcomes) for outcomes in judged.values()])


def _passed(right: Mapping[str, Sequence[bool]], k: int) -> Figure | None:
    return mean_over([pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in right.values() if len(outcomes) >= k])


def _fast(judged: Mapping[str, Sequence[Verdict]], p: float, baseline: Any) -> Figure | None:
    shares = []
    for group in judged.values():
        fast = [is_fast(verdict, p, baseline) for verdict in group]
        if None in fast:
            return None
        shares.append(sum(map(bool, fast)) / len(fast))
    return mean_over(shares)


def _json(figure: Figure | None) -> dict[str, float | int] | None:
    return None if figure is None else figure.as_json()
