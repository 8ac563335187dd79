"""Sentences for people where a finished step went another way than they would think.

Steps in a row that change no weight, losses that are not finite, importance ratios that overflow: each is a defined
outcome and counted, and here it is explained.
"""

from __future__ import annotations

from collections import Counter

from slime_core.types import StepReport

SKIPPED = 5  # optimizer steps in a row without a change of weights, after which it is said, and said again
WHY = {
    "masked": "every token is masked (loss_mask, remove_sample, mask_truncated, or a correction that rejects all)",
    "no_gradient": "every advantage is 0 and neither KL nor entropy acts: the rewards of each group are all equal",
    "nonfinite": "the loss or its gradient is not finite",
}


class Alarms:
    """Looks at one run's steps in order.

    Example:
        for line in alarms.see(report): print(line)
    """

    def __init__(self) -> None:
        self._skipped: Counter[str] = Counter()  # by reason, since a weight last changed
        self._alarms = 0
        self._overflowed = False

    def see(self, report: StepReport) -> list[str]:
        """What is worth a sentence after this step."""
        metrics = report.metrics
        return [*self._not_finite(report), *self._nothing_learnt(report), *self._overflow(metrics, report.version)]

    def _nothing_learnt(self, report: StepReport) -> list[str]:
        metrics = report.metrics
        if metrics.get("optimizer_steps", 0.0) > 0 or "skipped_steps" not in metrics:
            self._skipped.clear()
            self._alarms = 0
            return []
        for reason in WHY:
            self._skipped[reason] += int(metrics.get(f"skipped_steps/{reason}", 0.0))
        count = self._skipped.total()
        if count < SKIPPED * (1 << self._alarms):  # at 5, 10, 20, 40, ... in a row
            return []
        while count >= SKIPPED * (1 << self._alarms):
            self._alarms += 1
        reason = self._skipped.most_common(1)[0][0]
        line = f"{count} optimizer steps in a row changed no weight: {WHY[reason]}"
        if reason == "no_gradient" and "reward/min" in metrics:
            line += f" (this step's lie between {metrics['reward/min']:g} and {metrics['reward/max']:g})"
        if reason == "no_gradient":
            line += "; see `slime show`: is the task too easy, too hard, or the reward constant?"
        return [line]

    def _not_finite(self, report: StepReport) -> list[str]:
        count = int(report.metrics.get("skipped_steps/nonfinite", 0.0))
        if not count:
            return []
        steps = "1 optimizer step" if count == 1 else f"{count} optimizer steps"
        return [
            f"version {report.version}: {steps} skipped, {WHY['nonfinite']}; sample ids are in errors/nonfinite.jsonl"
        ]

    def _overflow(self, metrics: dict[str, float], version: int) -> list[str]:
        share = metrics.get("ratio_overflow", 0.0)
        first = share > 0 and not self._overflowed
        self._overflowed = share > 0
        if not first:
            return []
        return [
            f"version {version}: importance ratios overflow and were cut at {share:.2g} of the tokens: trainer and "
            "sampler disagree by far (see train_rollout_logprob_abs_diff), or the policy has moved too fast (lr)"
        ]
