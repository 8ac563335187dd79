"""Alarms about reward hacking: the training reward rises, and something else says that the model gets no better.

Amodei et al. 2016 ("Concrete problems in AI safety") name it; Gao et al. 2023 ("Scaling laws for reward model
overoptimization") measure it: the proxy's reward rises while the gold reward has its peak behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from slime_diagnose.diagnosis import Diagnosis
from slime_diagnose.history import EARLY, RECENT, History, Row
from slime_diagnose.rules.rewards import label_of
from slime_diagnose.texts import compression_ratio, shown
from slime_diagnose.trends import correlation, course_of, middle

EVALUATIONS = 3
SURE = 3.0
"""Standard errors by which a held-out figure must have fallen; its questions are the same, so the error is less."""
FALLS = 0.2
"""Share of a term's first mean that it loses."""
LONGER = 1.5
TIED = 0.5
"""Correlation of reward and length within groups; Singhal et al. 2023 ("A long way to go") find that length alone
explains most of the reward where it is this high."""
PAIRS = 64
LONG_TEXT = 200  # characters; shorter ones do not compress
REPEATED, BEFORE = 0.25, 0.6
"""zlib's ratio of a response, and its share of the ratio at first, that only repetition gives: prose and code of this
length have 0.4 to 0.7."""
ONE_ANSWER, ANSWERS = 0.8, 8
"""Share of the best samples, and their least number, that are one response to different questions."""


def heldout_falls(history: History) -> Diagnosis | None:
    """A held-out set's reward is below its best by `SURE` standard errors, and the training reward has not fallen.

    With at least three evaluations. verl's issue 5038 is of this kind.
    """
    for name in dict.fromkeys(row["name"] for row in history.evaluations):
        named = [row for row in history.evaluations if row["name"] == name]
        rows = [row for row in named if row["metrics"].get("reward/mean") is not None]
        if not history.rewarded or len(rows) < EVALUATIONS:
            continue
        best, last = max(rows, key=lambda row: row["metrics"]["reward/mean"]), rows[-1]
        high, now = best["metrics"]["reward/mean"], last["metrics"]["reward/mean"]
        error = math.sqrt(_variance(best) + _variance(last))
        before, after = _reward_near(history, best["version"]), _reward_near(history, last["version"])
        if high - now > SURE * error and best is not last and after >= before:
            return Diagnosis(
                severity="warning",
                summary=f"training improves, held-out set '{name}' does not: {high:.3g} at its best, {now:.3g} now",
                evidence=(
                    f"{name}: "
                    + ", ".join(f"step {row['version']} {row['metrics']['reward/mean']:.4g}" for row in rows[-6:]),
                    f"reward/mean of training: {before:.4g} then, {after:.4g} now; standard error {error:.2g}",
                ),
                fix=f"take the checkpoint of step {best['version']}; then more prompts or fewer epochs, "
                "--kl-loss-coef, or a lower --lr; see whether the two rewards pay for the same",
                key="train.kl_loss_coef",
            )
    return None


def judges_disagree(history: History) -> Diagnosis | None:
    """The reward rises, and one of its terms (another judge) loses a fifth or more, both beyond noise.

    open-r1's issue 255 is of this kind: the format's reward rises, the accuracy's falls.
    """
    rewards = course_of(history.values("reward/mean"))
    if not history.rewarded or rewards is None or not rewards.up:
        return None
    falling = {
        name: course
        for name in history.terms
        if (course := course_of(history.values(f"reward/{name}/mean"))) is not None
        and course.down
        and -course.change > FALLS * abs(course.early)
    }
    if not falling:
        return None
    name, course = min(falling.items(), key=lambda item: item[1].change)
    return Diagnosis(
        severity="warning",
        summary=f"the reward rises while its term '{name}' falls",
        evidence=(f"reward/mean {rewards}", *(f"reward/{term}/mean {one}" for term, one in falling.items())),
        fix="if that term is what you want, weigh it more (reward_weights), or let it gate the others",
        key="reward.reward_weights",
    )


def length_pays(history: History) -> Diagnosis | None:
    """Reward and length rise beyond noise, length by half, and longer samples of a prompt have the higher reward."""
    rewards, lengths = course_of(history.values("reward/mean")), course_of(history.values("response_len/mean"))
    if not history.rewarded or rewards is None or lengths is None or not rewards.up or not lengths.up:
        return None
    pairs = _within_groups(history)
    tie = correlation(pairs)
    if lengths.late < LONGER * lengths.early or len(pairs) < PAIRS or tie < TIED:
        return None
    return Diagnosis(
        severity="warning",
        summary=f"length pays: responses grow by {lengths.late / lengths.early - 1:.0%}, and longer ones earn more",
        evidence=(
            f"correlation of reward and length within groups {tie:.2f} ({len(pairs)} samples, {history.where()})",
            f"reward/mean {rewards}",
            f"response_len/mean {lengths}",
        ),
        fix="see whether the long responses are better or only longer; --overlong-buffer-len penalises length",
        key="reward.overlong_buffer_len",
    )


def repetition_pays(history: History) -> Diagnosis | None:
    """The best samples of the last steps compress to a quarter or less: they repeat themselves, and earn by it.

    Where the first steps' best samples are long enough to compare, to less than 0.6 of theirs.
    """
    low, high = history.reward_range
    early, late = (_long_best(history, rows) for rows in (history.steps[:EARLY], history.steps[-RECENT:]))
    late = [row for row in late if row["reward"] > low]
    if not history.rewarded or len(late) < EVALUATIONS or low == high:
        return None
    now = middle([compression_ratio(row["response"]) for row in late])
    first = middle([compression_ratio(row["response"]) for row in early])
    if now > REPEATED or (first and now > BEFORE * first):
        return None
    return Diagnosis(
        severity="warning",
        summary="the best responses repeat themselves",
        evidence=(
            f"zlib leaves {now:.0%} of the best responses of {history.where()}"
            + (f", of the first steps' {first:.0%}" if first else ""),
            f"{late[-1]['id']}, reward {late[-1]['reward']:g}: {shown(late[-1]['response'])}",
        ),
        fix="let the reward see repetition (a term that penalises it), or --kl-loss-coef 0.001",
        key="reward.reward_weights",
    )


def one_answer_pays(history: History) -> Diagnosis | None:
    """Four fifths of the best samples are one response to questions with different labels, and it is rewarded.

    Visual-RFT's issue 176 is of this kind: an empty answer counts as contained in every label.
    """
    low, high = history.reward_range
    best = [row for row in history.samples_of(history.steps[-RECENT:], "best") if row["reward"] is not None]
    best = [row for row in best if label_of(row) and row["reward"] > low]
    if not history.rewarded or low == high or len(best) < ANSWERS:
        return None
    responses = [row["response"] for row in best]
    answer = max(set(responses), key=responses.count)
    labels = {label_of(row) for row in best if row["response"] == answer}
    if responses.count(answer) < ONE_ANSWER * len(best) or len(labels) * 2 < responses.count(answer):
        return None
    return Diagnosis(
        severity="warning",
        summary="one response earns the reward of different questions",
        evidence=(
            f"{responses.count(answer)} of the {len(best)} best samples of {history.where()} are {shown(answer)}",
            f"their labels: {', '.join(shown(label) for label in sorted(labels)[:5])}",
        ),
        fix="compare extracted answers: the grader asks whether one text contains the other, or takes an empty one",
        key="reward.rm_type",
    )


def _variance(row: Row) -> float:
    """Of an evaluation's mean reward: the questions are drawn, their samples are not counted as independent."""
    metrics = row["metrics"]
    return float(metrics.get("reward/std", 0.0)) ** 2 / max(1.0, float(metrics.get("prompts", 1.0)))


def _reward_near(history: History, version: int) -> float:
    """Mean training reward of the five steps that end at a version, or begin with the stage."""
    rows = [row for row in history.steps if row["version"] <= version][-EARLY:] or history.steps[:EARLY]
    return fmean(float(row["metrics"].get("reward/mean") or 0.0) for row in rows)


def _within_groups(history: History) -> list[tuple[float, float]]:
    """Length and reward of each sample, less its group's means, of groups whose rewards differ."""
    pairs = []
    for group in history.groups:
        if len({sample.reward for sample in group}) > 1:
            length, reward = fmean(sample.length for sample in group), fmean(sample.reward for sample in group)
            pairs += [(sample.length - length, sample.reward - reward) for sample in group]
    return pairs


def _long_best(history: History, rows: Sequence[Row]) -> list[Row]:
    return [
        row
        for row in history.samples_of(rows, "best")
        if len(row["response"]) >= LONG_TEXT and isinstance(row["reward"], int | float)
    ]
