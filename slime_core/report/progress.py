"""How far a run is, as text: a step, an evaluation, and how long the steps that are left may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from slime_core.config.load import stages

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.types import StepReport

DYNAMICS = {"entropy": "entropy", "grad": "grad_norm"}
"""Labels of the live line, and the metrics of training that they show."""


class Pace:
    """Steps of the whole run, and how long those that are left may take, from the last ten."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = 0
        self._recent: deque[float] = deque(maxlen=10)

    def add(self, wall: float) -> None:
        """One more step took ``wall`` seconds."""
        self.done += 1
        self._recent.append(wall)

    @property
    def eta(self) -> float:
        """Seconds to the end."""
        remaining = max(0, self.steps - self.done)
        return remaining * sum(self._recent) / len(self._recent) if self._recent else 0.0


class Trend:
    """How the mean reward of a stage has moved: the last ten steps against the ten before them."""

    def __init__(self) -> None:
        self._stage = ""
        self._rewards: deque[float] = deque(maxlen=20)

    def add(self, report: StepReport) -> float | None:
        """Add a step; the difference of the two means, None until each covers two steps."""
        if report.stage != self._stage:
            self._stage = report.stage
            self._rewards.clear()
        if "reward/mean" in report.metrics:
            self._rewards.append(report.metrics["reward/mean"])
        rewards, half = list(self._rewards), len(self._rewards) // 2
        return fmean(rewards[half:]) - fmean(rewards[:half]) if half > 1 else None


def total_steps(config: Config) -> int:
    """Steps of all stages."""
    return sum(stage.rollout.num_rollout for stage in stages(config))


def place(report: StepReport) -> str:
    """``main step 3/40``."""
    return f"{report.stage} step {report.step + 1}/{report.of}"


def figures(report: StepReport, wall: float, trend: float | None = None) -> list[str]:
    """The few figures of a step that fit on one line.

    Where rewards say something they replace the loss, which policy gradients leave near 0 by construction; ``trend``
    (see `Trend`) follows in parentheses. A supervised step shows its loss.
    """
    metrics = report.metrics
    parts = []
    equal = metrics.get("reward/equal_groups")
    if "reward/mean" in metrics and (equal is not None or metrics.get("reward/min") != metrics.get("reward/max")):
        moved = f" ({trend:+.3f})" if trend is not None else ""
        parts.append(f"reward {metrics['reward/mean']:.3f}{moved}" + (" (all groups equal)" if equal == 1.0 else ""))
    elif "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    parts += [f"{label} {metrics[key]:.2f}" for label, key in DYNAMICS.items() if key in metrics]
    if "response_len/mean" in metrics:
        parts.append(f"len {metrics['response_len/mean']:.0f}")
    if metrics.get("truncated_ratio", 0.0) >= 0.005:
        parts.append(f"truncated {metrics['truncated_ratio']:.0%}")
    if metrics.get("rollout/dropped_samples"):
        parts.append(f"dropped {metrics['rollout/dropped_samples']:.0f}")
    if wall > 0 and "tokens/response" in metrics:
        parts.append(f"tok/s {metrics['tokens/response'] / wall:.0f}")
    return parts


def evaluation_line(name: str, version: int, metrics: Mapping[str, float]) -> str:
    """``eval heldout at step 40: reward 0.912 over 200 samples``."""
    if "samples" not in metrics:
        return f"eval {name} at step {version}: {', '.join(f'{key} {value:.4g}' for key, value in metrics.items())}"
    reward = f"reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else "no rewards"
    passed = f", pass@1 {metrics['pass@1']:.1%}" if metrics.get("pass@1", 0) > 0 else ""
    errors = f", {metrics['infra_errors']:.0f} not judged" if metrics.get("infra_errors") else ""
    return f"eval {name} at step {version}: {reward} over {metrics['samples']:.0f} samples{passed}{errors}"


def duration(seconds: float) -> str:
    """``45s``, ``2m04`` or ``3h20``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}"
