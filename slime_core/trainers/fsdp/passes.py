"""One micro-batch through the model, forward or forward and backward, and the sums that a step reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.trainers.fsdp.attention import Segments
from slime_core.trainers.fsdp.policy import Rows
from slime_core.trainers.share import Share, Sums, on

if TYPE_CHECKING:
    from slime_core.protocols import Loss
    from slime_core.trainers.fsdp.policy import Policy
    from slime_core.types import MicroBatch


def forward(
    policy: Policy, micro: MicroBatch, temperature: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every response token of the pack, [R]."""
    found: tuple[torch.Tensor, torch.Tensor] = policy(
        *on_device(micro, device), Rows(on(micro.predict, device), on(micro.target, device), temperature)
    )
    return found


def backward(
    policy: Policy, loss: Loss, train: Any, micro: MicroBatch, temperature: torch.Tensor | None, sums: Sums
) -> None:
    """Add the pack's share of the loss to the gradients, and its sums to ``sums``.

    Raises:
        TrainerError: a loss of another shape, or without a gradient.
    """
    if within_forward(policy, loss, train):
        rows = np.flatnonzero(micro.weight > 0)
        share = Share(loss, train, micro, rows, sums.device)
        place = torch.from_numpy(rows)
        mine = Rows(
            on(micro.predict[rows], sums.device),
            on(micro.target[rows], sums.device),
            temperature[place.to(temperature.device)] if temperature is not None else None,
        )
        (total,) = policy(*on_device(micro, sums.device), mine, share)
    else:
        share = Share(loss, train, micro, np.arange(len(micro.weight)), sums.device)
        total = share(slice(None), *forward(policy, micro, temperature, sums.device))
    total.backward()
    sums.add({"loss": total, **share.seen})
    if not torch.isfinite(total.detach()):
        share.blame(sums)


def within_forward(policy: Policy, loss: Loss, train: Any) -> bool:
    """Whether the gradient of the loss is taken inside the forward pass, so that logits are made once."""
    return policy.linear_head and loss.local is not None and loss.local(train)


def on_device(micro: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Tokens, their positions and the segments of a pack, as a model takes them."""
    segments = Segments.of(micro.cu_seqlens, micro.prefix, device)
    return on(micro.tokens, device), on(micro.position_ids, device), segments
