"""One micro-batch through the model, forward or forward and backward, and the sums that a step reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from slime_core.errors import TrainerError
from slime_core.trainers.fsdp.attention import Segments

if TYPE_CHECKING:
    from slime_core.protocols import Loss
    from slime_core.trainers.fsdp.policy import Policy
    from slime_core.types import MicroBatch


@dataclass(slots=True)
class Sums:
    """Weighted sums of one optimizer step, over micro-batches and then ranks."""

    response_offsets: NDArray[np.int64]  # of the Batch, S + 1
    device: torch.device
    totals: dict[str, float] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)  # samples whose loss is not finite

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add one micro-batch's sums."""
        numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
        for name, number in zip(values, numbers):
            self.totals[name] = self.totals.get(name, 0.0) + number

    def reduce_scalar(self, value: float, world: int) -> float:
        """The sum over ranks of one number."""
        if world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def finish(self, world: int) -> tuple[dict[str, float], list[int]]:
        """Totals over all ranks, and the samples of any rank whose loss is not finite."""
        if world == 1:
            return dict(self.totals), sorted(self.bad)
        names = sorted(self.totals)
        flags = [float(i in self.bad) for i in range(len(self.response_offsets) - 1)]
        row = torch.tensor([*(self.totals[n] for n in names), *flags], dtype=torch.float64, device=self.device)
        dist.all_reduce(row)
        numbers = row.tolist()
        bad = [i for i, flag in enumerate(numbers[len(names) :]) if flag]
        return dict(zip(names, numbers)), bad


def forward(
    policy: Policy, micro: MicroBatch, temperature: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every response token of the pack, [R]."""

    def on_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    found: tuple[torch.Tensor, torch.Tensor] = policy(
        on_device(micro.tokens),
        on_device(micro.position_ids),
        Segments.of(micro.cu_seqlens, micro.prefix, device),
        on_device(micro.predict),
        on_device(micro.target),
        temperature,
    )
    return found


def backward(
    policy: Policy, loss: Loss, train: Any, micro: MicroBatch, temperature: torch.Tensor | None, sums: Sums
) -> None:
    """Add the pack's share of the loss to the gradients, and its sums to ``sums``.

    Raises:
        TrainerError: a loss of another shape, or without a gradient.
    """
    log_probs, entropy = forward(policy, micro, temperature, sums.device)
    columns = {n: torch.from_numpy(np.ascontiguousarray(v)).to(sums.device) for n, v in micro.columns.items()}
    values, metrics = loss.fn(log_probs, entropy, columns, train)
    if values.shape != log_probs.shape or not values.requires_grad:
        raise TrainerError(
            f"the loss '{loss.name}' gave shape {tuple(values.shape)} for {len(log_probs)} tokens"
            if values.shape != log_probs.shape
            else f"the loss '{loss.name}' has no gradient",
            fix="return one value a response token, computed from log_probs",
        )
    weight = torch.from_numpy(micro.weight).to(sums.device)
    counts = weight > 0
    total = torch.where(counts, values * weight, 0).sum()
    total.backward()
    if not torch.isfinite(total.detach()):
        _name_bad(micro, values.detach(), counts, sums)
    with torch.no_grad():
        seen = {"entropy": entropy.detach(), **metrics}
        sums.add({"loss": total, **{n: torch.where(counts, v * weight, 0).sum() for n, v in seen.items()}})


def _name_bad(micro: MicroBatch, values: torch.Tensor, counts: torch.Tensor, sums: Sums) -> None:
    """Note the samples that own tokens with a loss that is not finite."""
    rows = (~torch.isfinite(values) & counts).nonzero()[:, 0].cpu().numpy()
    sums.bad.update((np.searchsorted(sums.response_offsets, micro.response[rows], side="right") - 1).tolist())
    if not len(rows):  # finite values whose sum is not
        sums.bad.update(int(i) for i in micro.samples)
