"""Compare two run directories step by step, and find the first difference. Nothing is written.

    config -> samples of a step (journal) -> tokens -> rollout log-probs -> rewards -> advantages -> metrics -> weights

The order is that of cause and effect, so the first difference in it is the one to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core.errors import StorageError
from slime_core.report import history
from slime_core.report.recorded import Recorded, StepSample

if TYPE_CHECKING:
    from slime_core.report.recorded import Step
    from slime_core.report.rundir import RunDir
    from slime_core.types import Sample

Verdict = Literal["same", "differs", "unknown"]
PARTS = ("samples", "tokens", "log_probs", "rewards", "masks", "advantages", "metrics", "weights")
BOOKKEEPING = (
    *("data/", "ledger/", "dropped/", "stale/", "async/", "rollout/issued_groups", "rollout/dropped_samples"),
    *("verify/", "canary/", "swap/"),
)
"""Prefixes of metrics about the origin of samples, checks and transfers, not about a step's result; reported
separately."""
CAUSES = (
    ("train_rollout_logprob_abs_diff", "the trainer's scores diverged"),
    ("advantages/", "the advantages diverged"),
    ("train/masked_ratio", "the masks diverged"),
    ("lr", "the learning rates are not the same"),
    ("critic_lr", "the critics' learning rates are not the same"),
)
SHOWN_FIRST = ("loss", "value_loss", "grad_norm", "kl_loss", "entropy")
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, kw_only=True)
class ComparedPart:
    """One thing that was compared in a step."""

    verdict: Verdict
    detail: str = ""  # in words, where it differs or could not be compared
    largest: float | None = None  # absolute difference, where these are numbers


@dataclass(slots=True, kw_only=True)
class StepPair:
    """A step that both runs made."""

    version: int
    stage: tuple[str, str]
    parts: dict[str, ComparedPart]
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)  # those that differ
    bookkeeping: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The first part that differs, in the order of cause and effect; empty where none does."""
        return next((name for name in PARTS if self.parts[name].verdict == "differs"), "")


@dataclass(slots=True, kw_only=True)
class StepComparison:
    """What :func:`compare_steps` found."""

    steps: list[StepPair] = field(default_factory=list)
    only: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]  # versions that one run alone made
    evaluations: list[str] = field(default_factory=list)  # sentences, of sets that differ

    @property
    def first(self) -> StepPair | None:
        """The first step that differs."""
        return next((step for step in self.steps if step.first), None)

    @property
    def equal(self) -> bool:
        """No step differs, and both runs made the same ones."""
        return self.first is None and not self.only[0] and not self.only[1] and not self.evaluations

    def sentence(self) -> str:
        """Where the runs first part."""
        step = self.first
        if step is not None:
            before = [name.replace("_", "-") for name in PARTS[: PARTS.index(step.first)] if _is_mentioned(step, name)]
            same = f"same {_listed(before)}; " if before else ""
            return f"step {step.version}: {same}{step.parts[step.first].detail}"
        if self.only[0] or self.only[1]:
            which, versions = ("first", self.only[0]) if self.only[0] else ("second", self.only[1])
            until = f"equal up to step {self.steps[-1].version}" if self.steps else "no step in common"
            return f"{until}; only the {which} run has step{_range(versions)}"
        if self.evaluations:
            return self.evaluations[0]
        return f"equal in all {len(self.steps)} steps"

    def as_dict(self) -> dict[str, Any]:
        """Stable keys, JSON-ready."""
        steps = [{**asdict(step), "stage": list(step.stage), "first": step.first} for step in self.steps]
        return {
            "equal": self.equal,
            "first_divergence": self.sentence(),
            "first_step": self.first.version if self.first else None,
            "steps": steps,
            "only_in_first": self.only[0],
            "only_in_second": self.only[1],
            "evaluations": self.evaluations,
        }


def compare_steps(
    one: RunDir, other: RunDir, ledgers: tuple[Recorded, Recorded], decode: Decode | None = None
) -> StepComparison:
    """Compare every step of two runs. ``decode`` turns token ids to text, where a tokenizer is near.

    Raises:
        StorageError: a ledger that cannot be read; unreadable payloads count as "unknown".
    """
    journals = ledgers[0].steps(), ledgers[1].steps()
    metrics = tuple({row["version"]: row["metrics"] for row in history.steps_of(run)} for run in (one, other))
    keys = tuple({*journal, *figures} for journal, figures in zip(journals, metrics))
    comparison = StepComparison(only=(sorted(keys[0] - keys[1]), sorted(keys[1] - keys[0])))
    for version in sorted(keys[0] & keys[1]):
        figures = metrics[0].get(version), metrics[1].get(version)
        steps = journals[0].get(version), journals[1].get(version)
        comparison.steps.append(_step(version, steps, figures, ledgers, decode))
    comparison.evaluations = _evaluations(one, other)
    return comparison


def _step(
    version: int,
    steps: tuple[Step | None, Step | None],
    figures: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    ledgers: tuple[Recorded, Recorded],
    decode: Decode | None,
) -> StepPair:
    members = ledgers[0].members(version), ledgers[1].members(version)
    parts = {name: ComparedPart(verdict="unknown") for name in PARTS}
    parts["samples"] = _composition(*members)
    if parts["samples"].verdict == "same":
        try:
            samples = ledgers[0].samples(members[0]), ledgers[1].samples(members[1])
        except StorageError as error:
            unknown = f"{error.what} ({error.why or error.where})"
            for name in ("tokens", "log_probs", "masks", "advantages"):
                parts[name] = ComparedPart(verdict="unknown", detail=unknown)
            parts["rewards"] = _rows_rewards(*members)
        else:
            parts |= _payloads(*samples, decode)
    stage = tuple(step.stage if step else "" for step in steps)
    pair = StepPair(version=version, stage=(stage[0], stage[1]), parts=parts)
    parts["metrics"] = _metrics(pair, *figures)
    parts["weights"] = _weights(*steps)
    return pair


def _composition(one: Sequence[StepSample], other: Sequence[StepSample]) -> ComparedPart:
    """Which samples trained, in which order."""
    if not one or not other:
        return ComparedPart(verdict="unknown", detail="the step is not in the journal")
    ids = [m.id for m in one], [m.id for m in other]
    if ids[0] == ids[1]:
        return ComparedPart(verdict="same")
    place = next((i for i, (a, b) in enumerate(zip(*ids)) if a != b), min(len(one), len(other)))
    first = [order[place] if place < len(order) else "nothing" for order in ids]
    if sorted(ids[0]) == sorted(ids[1]):
        message = f"the same samples train in another order, from place {place} on"
    else:
        apart = len(set(ids[0]) ^ set(ids[1]))
        message = f"other samples train ({apart} are in one run alone)"
    return ComparedPart(verdict="differs", detail=f"{message}: {first[0]} and {first[1]}; what the step took diverged")


def _payloads(one: Sequence[Sample], other: Sequence[Sample], decode: Decode | None) -> dict[str, ComparedPart]:
    return {
        "tokens": _tokens(one, other, decode),
        "log_probs": _numbers(
            [(a.id, a.rollout_log_probs, b.rollout_log_probs) for a, b in zip(one, other)],
            "rollout log-probs",
            "what the engines computed diverged",
        ),
        "rewards": _numbers(
            [(a.id, _reward(a), _reward(b)) for a, b in zip(one, other)], "rewards", "the rewards diverged"
        ),
        "masks": _masks(one, other),
        "advantages": _numbers(
            [(a.id, a.advantages, b.advantages) for a, b in zip(one, other)],
            "stored advantages",
            "the advantages diverged",
        ),
    }


def _tokens(one: Sequence[Sample], other: Sequence[Sample], decode: Decode | None) -> ComparedPart:
    wrong = [(a, b) for a, b in zip(one, other) if a.tokens != b.tokens]
    if not wrong:
        return ComparedPart(verdict="same")
    a, b = wrong[0]
    place = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))
    in_prompt = place < min(a.prompt_length, b.prompt_length)
    where = f"prompt token {place}" if in_prompt else f"response token {place - a.prompt_length}"
    shown = " and ".join(_token(sample.tokens, place, decode) for sample in (a, b))
    cause = "the data diverged" if in_prompt else "generation diverged"
    return ComparedPart(
        verdict="differs",
        detail=f"{len(wrong)} of {len(one)} samples have other tokens, first {a.id} at {where}: {shown}; {cause}",
    )


def _token(tokens: Sequence[int], place: int, decode: Decode | None) -> str:
    if place >= len(tokens):
        return "its end"
    if decode is None:
        return str(tokens[place])
    return f"{tokens[place]} {decode(tokens[place : place + 1])!r}"


def _reward(sample: Sample) -> list[float] | None:
    return [float(sample.reward)] if isinstance(sample.reward, (int, float)) else None


def _masks(one: Sequence[Sample], other: Sequence[Sample]) -> ComparedPart:
    wrong = [
        a.id for a, b in zip(one, other) if (a.loss_mask, a.remove_sample) != (b.loss_mask, b.remove_sample)
    ]  # fmt: skip
    if not wrong:
        return ComparedPart(verdict="same")
    detail = f"{len(wrong)} samples have another loss mask, first {wrong[0]}; what trains of them diverged"
    return ComparedPart(verdict="differs", detail=detail)


def _numbers(
    rows: Sequence[tuple[str, Sequence[float] | None, Sequence[float] | None]], name: str, cause: str
) -> ComparedPart:
    """Compare numbers bit for bit; the sample that is furthest apart is named."""
    if all(a is None and b is None for _, a, b in rows):
        return ComparedPart(verdict="same")
    worst, where = -1.0, ""
    for sample, one, other in rows:
        if one is None or other is None or len(one) != len(other):
            if one is not other:
                return ComparedPart(verdict="differs", detail=f"{name} of {sample} are in one run alone; {cause}")
            continue
        apart = _apart(np.asarray(one, np.float64), np.asarray(other, np.float64))
        if apart > worst:
            worst, where = apart, sample
    if worst <= 0:
        return ComparedPart(verdict="same", largest=0.0)
    return ComparedPart(
        verdict="differs", detail=f"{name} differ by up to {worst:.3g}, most in {where}; {cause}", largest=worst
    )


def _apart(one: Any, other: Any) -> float:
    """The largest absolute difference; 0 only where all bits agree (or both are NaN)."""
    if not one.size or np.array_equal(one, other, equal_nan=True):
        return 0.0
    gaps = np.abs(one - other)
    return math.inf if not np.isfinite(gaps).all() else float(gaps.max())


def _rows_rewards(one: Sequence[StepSample], other: Sequence[StepSample]) -> ComparedPart:
    """Rewards as the ledger's rows have them, which are never pruned."""
    rows = [
        (a.id, [a.reward] if a.reward is not None else None, [b.reward] if b.reward is not None else None)
        for a, b in zip(one, other)
    ]
    return _numbers(rows, "rewards", "the rewards diverged")


def _metrics(pair: StepPair, one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> ComparedPart:
    if one is None or other is None:
        return ComparedPart(verdict="unknown", detail="metrics.jsonl of one run has no line for the step")
    wrong = {name: (one.get(name), other.get(name)) for name in sorted({*one, *other})}
    wrong = {name: values for name, values in wrong.items() if values[0] != values[1]}
    names = {name for name in wrong if name.startswith(BOOKKEEPING) or name not in one or name not in other}
    pair.bookkeeping = {name: wrong[name] for name in sorted(names)}
    pair.metrics = {name: values for name, values in wrong.items() if name not in names}
    if not pair.metrics:
        return ComparedPart(verdict="same")
    name, cause = _cause(pair.metrics)
    a, b = pair.metrics[name]
    apart = abs(a - b) if a is not None and b is not None else math.inf
    more = f" (and {len(pair.metrics) - 1} other metrics)" if len(pair.metrics) > 1 else ""
    return ComparedPart(
        verdict="differs", detail=f"{name} differs {_digit(a, b)}: {a} and {b}{more}; {cause}", largest=apart
    )


def _cause(names: Mapping[str, Any]) -> tuple[str, str]:
    for start, cause in CAUSES:
        if matches := [name for name in names if name.startswith(start)]:
            return matches[0], cause
    shown = next((name for name in SHOWN_FIRST if name in names), next(iter(names)))
    return shown, "the optimizer step diverged"


def _digit(one: float | None, other: float | None) -> str:
    """Which significant digit is the first to differ."""
    if one is None or other is None:
        return "(one is not finite)"
    largest = max(abs(one), abs(other))
    place = max(1, math.floor(math.log10(largest / abs(one - other))) + 1) if largest else 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(place % 10 if place not in (11, 12, 13) else 0, "th")
    return f"in the {place}{ending} digit"


def _weights(one: Step | None, other: Step | None) -> ComparedPart:
    if one is None or other is None or not one.fingerprint or not other.fingerprint:
        return ComparedPart(verdict="unknown", detail="no fingerprint of the weights is recorded")
    if one.fingerprint == other.fingerprint:
        return ComparedPart(verdict="same")
    detail = f"the weights' fingerprints are {one.fingerprint} and {other.fingerprint}; the optimizer step diverged"
    return ComparedPart(verdict="differs", detail=detail)


def _evaluations(one: RunDir, other: RunDir) -> list[str]:
    """Sets that both runs evaluated at the same version, with other results."""
    rows = tuple(
        {(row["version"], row["name"]): row["metrics"] for row in history.evaluations_of(run)} for run in (one, other)
    )
    lines = []
    for version, name in sorted({*rows[0]} & {*rows[1]}):
        pair = rows[0][version, name], rows[1][version, name]
        wrong = [key for key in sorted(pair[0]) if key in pair[1] and pair[0][key] != pair[1][key]]
        if wrong:
            key = next((key for key in wrong if key == "reward/mean"), wrong[0])
            lines.append(f"evaluation {name} at step {version}: {key} is {pair[0][key]} and {pair[1][key]}")
    return lines


def _is_mentioned(step: StepPair, name: str) -> bool:
    """Whether a part goes into the sentence: it was compared, and says more than that there is nothing."""
    return step.parts[name].verdict == "same" and (name != "advantages" or step.parts[name].largest is not None)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _range(versions: Sequence[int]) -> str:
    return f" {versions[0]}" if len(versions) == 1 else f"s {versions[0]} to {versions[-1]}"
