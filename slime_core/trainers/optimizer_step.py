"""An optimizer step, whatever the backend: its rate, its loss over micro-batches and ranks, and what became of it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from slime_core.errors import TrainerError

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Loss
    from slime_core.trainers.data_parallel import RankBatch
    from slime_core.types import MicroBatch

log = logging.getLogger(__name__)

Fate = Literal["made", "masked", "no_gradient", "nonfinite", "critic_only"]
SKIPS: tuple[Fate, ...] = ("masked", "no_gradient", "nonfinite")
FILE = "nonfinite.jsonl"
SHOWN = 8  # sample ids in a message


@dataclass(slots=True, frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to ``peak``, then decay to ``low``.

    Example: peak 1, low 0, warmup 2, decay 4, linear
        steps 0, 1, 2, 3, 4 have 1/2, 1, 1, 1/2, 0
    """

    peak: float
    low: float = 0.0
    style: str = "constant"  # constant, linear, cosine
    warmup: int = 0  # optimizer steps
    decay: int = 0  # optimizer steps, warm-up included, after which the rate is ``low``

    def at(self, step: int) -> float:
        """The rate of optimizer step ``step``, counted from 0 in the stage."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.decay - self.warmup))
        remaining = 1 - done if self.style == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.low + (self.peak - self.low) * remaining


def optimizer_steps(stage: Config, without: int = 0) -> int:
    """Optimizer steps of a whole stage, less those of its first ``without`` rollouts."""
    rollout, train = stage.rollout, stage.train
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    a_rollout = -(-rollouts // train.global_batch_size) if train.global_batch_size else train.num_steps_per_rollout
    return max(1, (rollout.num_rollout - without) * a_rollout)


class LossSums:
    """Weighted sums of loss and metrics of one optimizer step, over micro-batches and then ranks.

    They stay on the device until they are asked for: one read a step, which is not in the way of its passes.
    """

    def __init__(self, rank_batch: RankBatch, device: torch.device) -> None:
        self.rank_batch, self.device = rank_batch, device
        self._parts: list[tuple[tuple[str, ...], torch.Tensor, Callable[[LossSums], None]]] = []  # not read yet
        self._totals: dict[str, float] = {}
        self._bad: set[int] = set()

    def add(self, values: dict[str, torch.Tensor], mark: Callable[[LossSums], None], *, counted: bool = True) -> None:
        """Add one micro-batch's sums; ``mark`` is called with these sums if its ``loss`` is not finite.

        Where they are not ``counted``, another rank of the same micro-batch adds them.
        """
        row = torch.stack([value.detach().double() for value in values.values()])
        row = row if counted else torch.zeros_like(row)
        self._parts.append((tuple(values), row, mark))

    @property
    def totals(self) -> dict[str, float]:
        """By name, over this rank's micro-batches."""
        self._read()
        return self._totals

    @property
    def bad(self) -> set[int]:
        """Samples whose loss is not finite, places in the whole Batch."""
        self._read()
        return self._bad

    def _read(self) -> None:
        parts, self._parts = self._parts, []
        numbers = iter(torch.cat([row for _, row, _ in parts]).tolist() if parts else ())
        for names, _, mark in parts:
            values = dict(zip(names, numbers))
            for name, number in values.items():
                self._totals[name] = self._totals.get(name, 0.0) + number
            if not math.isfinite(values["loss"]):
                mark(self)

    def mark_nonfinite(self, values: torch.Tensor, counts: torch.Tensor, rows: NDArray[np.int64], pack: Any) -> None:
        """Mark the samples of tokens whose loss is not finite; all of a pack where only its sum is not.

        Args:
            values: losses of tokens
            counts: bool, where they enter the loss
            rows: of the tokens in the columns of the rank batch
            pack: its samples
        """
        bad = (~torch.isfinite(values) & counts).nonzero()[:, 0].cpu().numpy()
        owners = np.searchsorted(self.rank_batch.batch.response_offsets, rows[bad], side="right") - 1
        self._bad.update(map(int, self.rank_batch.places[owners if len(bad) else pack]))

    def finish(self, world: int) -> tuple[dict[str, float], list[int]]:
        """Totals over all ranks, and the samples of any rank whose loss is not finite."""
        if world == 1:
            return dict(self.totals), sorted(self.bad)
        names = sorted(self.totals)
        flags = [float(i in self.bad) for i in range(len(self.rank_batch.ids))]
        row = torch.tensor([*(self.totals[n] for n in names), *flags], dtype=torch.float64, device=self.device)
        dist.all_reduce(row)
        numbers = row.tolist()
        bad = [i for i, flag in enumerate(numbers[len(names) :]) if flag]
        return dict(zip(names, numbers)), bad


class MicroBatchLoss:
    """A micro-batch's part of the loss on its response ``rows``, computed whole or in blocks of them."""

    def __init__(
        self, loss: Loss, train: Any, micro: MicroBatch, rows: NDArray[np.int64], device: torch.device
    ) -> None:
        self.loss, self.train, self.micro, self.rows = loss, train, micro, rows
        self.columns = {name: to_device(values[rows], device) for name, values in micro.columns.items()}
        self.weight = to_device(micro.weight[rows], device)
        self.metric_sums: dict[str, torch.Tensor] = {}  # weighted
        self.values: list[torch.Tensor] = []  # of the rows, a tensor a block

    def __call__(self, part: slice, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """The sum of weighted losses of the rows ``part``."""
        columns = {name: values[part] for name, values in self.columns.items()}
        values, metrics = self.loss.fn(log_probs, entropy, columns, self.train)
        if values.shape != log_probs.shape or not values.requires_grad:
            raise TrainerError(
                f"the loss '{self.loss.name}' gave shape {tuple(values.shape)} for {len(log_probs)} tokens"
                if values.shape != log_probs.shape
                else f"the loss '{self.loss.name}' has no gradient",
                fix="return one value a response token, computed from log_probs",
            )
        weight = self.weight[part]
        counts = weight > 0
        with torch.no_grad():
            self.values.append(values.detach())
            for name, row in {"entropy": entropy.detach(), **metrics}.items():
                total = torch.where(counts, row * weight, 0).sum(dtype=torch.float64)
                self.metric_sums[name] = self.metric_sums[name] + total if name in self.metric_sums else total
        return torch.where(counts, values * weight, 0).sum()

    def mark_nonfinite(self, sums: LossSums) -> None:
        """Mark the samples of tokens whose loss is not finite."""
        rows = self.micro.response[self.rows]
        sums.mark_nonfinite(torch.cat(self.values), self.weight > 0, rows, self.micro.samples)


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a column to the device, without waiting."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@dataclass(slots=True)
class StepOutcome:
    """One optimizer step. ``metrics`` are empty where there was nothing to measure."""

    fate: Fate
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class NonFiniteGuard:
    """Counts steps in a row whose loss or gradient is not finite, and stops the run after ``most`` of them.

    Sample ids are appended to ``errors / "nonfinite.jsonl"``, one JSON object a skipped step.
    """

    most: int = 0  # train.max_nonfinite_steps
    errors: Path | None = None  # the run's folder, where this rank writes
    in_a_row: int = 0

    def skip(self, rank_batch: RankBatch, bad: list[int], loss: float, norm: float) -> StepOutcome:
        """A step that is not finite.

        Args:
            bad: samples whose loss is not finite, places in ``rank_batch.ids``; empty where only the gradient is not

        Raises:
            TrainerError: TRN95, one more than ``most`` in a row.
        """
        ids, version = rank_batch.ids, rank_batch.batch.version
        self.in_a_row += 1
        if self.in_a_row > self.most:
            raise not_finite(version, ids, bad, loss, norm)
        named = ids_of(ids, bad) if bad else "all of the step"
        log.warning(
            "step %d: the loss is %s, the gradient norm %s; skipped, %d in a row of at most %d; samples: %s",
            version, loss, norm, self.in_a_row, self.most, named,
        )  # fmt: skip
        if self.errors is not None:
            row = {
                "step": version,
                "samples": [ids[i] for i in bad] or ids,
                "loss": str(loss),
                "grad_norm": str(norm),
                "in_a_row": self.in_a_row,
            }
            self.errors.mkdir(parents=True, exist_ok=True)
            with (self.errors / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return StepOutcome("nonfinite")


def not_finite(version: int, ids: Sequence[str], bad: list[int], loss: float, norm: float) -> TrainerError:
    """TRN95 for a loss or a gradient, with the samples where they are known: ``bad`` are places in ``ids``."""
    shown = ids_of(ids, bad)
    message = f"the loss of samples {shown} is not finite" if bad else f"the gradient norm is {norm}, the loss {loss}"
    return TrainerError(
        message,
        code="TRN95",
        where=f"step {version}" + (f", samples {shown}" if bad else f", {len(ids)} samples"),
        why="no weight was changed by this optimizer step",
        fix="lower train.lr, or set train.clip_grad=1.0",
    )


def ids_of(names: Sequence[str], samples: list[int], most: int = SHOWN) -> str:
    """Ids of samples for a message, the first few of them."""
    ids = [names[i] for i in samples]
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def summary(outcomes: Sequence[StepOutcome], trained: float) -> dict[str, float]:
    """Means over the optimizer steps that have a figure, and counts of what became of them.

    ``optimizer_steps`` counts those that changed the policy, ``skipped_steps`` those that changed nothing, and
    ``skipped_steps/REASON`` says why, where any was. ``trained`` are the batch's trainable tokens.
    """
    fates = [outcome.fate for outcome in outcomes]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
    figures: dict[str, float] = {"loss": 0.0}
    for name in names:
        values = [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]
        figures[name] = values[-1] if name.endswith("lr") else sum(values) / len(values)
    counts = {f"skipped_steps/{reason}": float(fates.count(reason)) for reason in SKIPS if reason in fates}
    if "critic_only" in fates:
        counts["critic_only_steps"] = float(fates.count("critic_only"))
    return {
        "lr": 0.0,
        **figures,
        "train_tokens": trained,
        "optimizer_steps": float(fates.count("made")),
        "skipped_steps": float(sum(reason in SKIPS for reason in fates)),
        **counts,
    }
