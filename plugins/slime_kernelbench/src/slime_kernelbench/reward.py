"""The reward of a verdict: terms with weights, monotone, inside a range that is known beforehand.

    term        value                                                 weight (default)
    compiled    1 where it was imported (and compiled, where asked)   compiled_weight 0.1
    correct     1 where every case agrees                             correct_weight 0.9
    cases       share of cases that agree, 1 where all do             cases_weight 0
    speed       of a right answer whose speed was measured:           speed_weight 0.5
                speed_shape log: log2(1 + s), 1 at the baseline's own speed, without a cap
                            saturating: s / (1 + s), below 1; linear: s; clipped: min(s, speed_cap);
                            gain: s - 1, from 0 to speed_cap; off: 0

A turn's reward is the sum of weight times term. A cheat (`hack`, or a flag on any verdict) and what the policy refuses
have ``hack_reward`` and 0: never more than an honest failure. Speed-up s is the faster live baseline over the slower
of two measurements. A faster right answer is worth more (with ``clipped`` and ``gain``: not less), and every right
answer more than every wrong one. Nothing here knows whether a dialogue ends, so no reward steps there
(`dialogue.returns`).

**Tier.** Speed counts where it was measured (``auto``; in a group where any was, a right answer without one is
masked); with ``correctness`` never, so that the same run pays the same on every machine; with ``speed`` a right answer
without a time could not be judged, and is masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_kernelbench.types import Verdict

if TYPE_CHECKING:
    from slime_kernelbench.options import Options


@dataclass(slots=True, frozen=True, kw_only=True)
class Worth:
    """What one turn is worth; ``value`` is None where nothing could be judged.

    Example: Worth(value=1.5, terms={"compiled": 1.0, "correct": 1.0, "speed": 1.0})
    """

    value: float | None
    terms: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # why there is no value


def worth(verdict: Verdict, options: Options) -> Worth:
    """The reward of one turn and its terms, unweighted.

    Example:
        worth(Verdict(status="wrong", reached="correctness"), Options()).value           # 0.1
    """
    if verdict.status == "infra":
        message = verdict.diagnostics[0].message if verdict.diagnostics else "the judge gave no verdict"
        return Worth(value=None, reason=message)
    cheat = verdict.status == "hack" or bool(verdict.flags)
    if cheat or verdict.status == "rejected":
        return Worth(value=options.hack_reward if cheat else 0.0, terms=dict.fromkeys(TERMS, 0.0))
    timed = verdict.correct and verdict.timing is not None and options.reward_tier != "correctness"
    if verdict.correct and not timed and options.reward_tier == "speed":
        return Worth(value=None, reason="a right answer whose speed was not measured, with reward_tier = speed")
    agreeing = sum(case.agrees for case in verdict.cases) / max(len(verdict.cases), 1)
    speedup = verdict.timing.speedup if timed and verdict.timing is not None else 0.0
    terms = {
        "compiled": float(verdict.compiled),
        "correct": float(verdict.correct),
        "cases": 1.0 if verdict.correct else agreeing,
        "speed": speed_term(speedup, options) if timed else 0.0,
    }
    return Worth(value=sum(weight * terms[name] for name, weight in weights(options).items()), terms=terms)


TERMS = ("compiled", "correct", "cases", "speed")


def weights(options: Options) -> dict[str, float]:
    """The weight of each term."""
    return {name: float(getattr(options, f"{name}_weight")) for name in TERMS}


def speed_term(speedup: float, options: Options) -> float:
    """The speed term of a right answer, at least 0 and never falling in ``speedup`` >= 0."""
    shapes = {
        "log": math.log2(1.0 + speedup),
        "saturating": speedup / (1.0 + speedup) if math.isfinite(speedup) else 1.0,
        "linear": speedup,
        "clipped": min(speedup, options.speed_cap),
        "gain": min(max(speedup - 1.0, 0.0), options.speed_cap),
        "off": 0.0,
    }
    return shapes[options.speed_shape]


def reward_range(options: Options) -> tuple[float, float]:
    """The lowest and the highest reward that a turn can have; the highest is inf where the speed term has no bound.

    Example: reward_range(Options(speed_shape="saturating"))                             # (0.0, 1.5)
    """
    measured = options.reward_tier != "correctness"
    speed = options.speed_weight * speed_term(math.inf, options) if options.speed_weight and measured else 0.0
    highest = options.compiled_weight + options.correct_weight + options.cases_weight + speed
    return min(0.0, options.hack_reward), highest


def check_weights(options: Options) -> None:
    """Refuse weights whose rewards leave the declared range, or that pay a cheat more than an honest failure.

    Raises:
        ValueError: with the values.
    """
    if options.hack_reward > 0:
        raise ValueError(f"hack_reward = {options.hack_reward:g} pays a cheat more than an honest failure, 0")
    if options.reward_range is None:
        return
    (low, high), (lowest, highest) = reward_range(options), options.reward_range
    if low < lowest or high > highest:
        raise ValueError(
            f"rewards from {low:g} to {high:g} leave reward_range = {lowest:g}, {highest:g}; lower the weights, widen "
            "the range, or bound the speed term with speed_shape = saturating, clipped or gain"
        )
