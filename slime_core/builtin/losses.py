"""The core's losses, bound to a micro-batch's columns and the [train] section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.config.algorithms import settle
from slime_core.protocols import Loss, Role


def losses() -> list[Loss]:
    """``policy_loss``: clipped ratio, KL and entropy. ``sft_loss``: negative log-prob."""
    return [
        Loss(name="policy_loss", fn=_policy_loss, needs_when=_policy_needs, columns=("advantages",)),
        Loss(name="sft_loss", fn=_sft_loss, local=lambda train: True),
    ]


def _policy_needs(train: Any) -> frozenset[Role]:
    """Old log-probs are the trainer's own, unless one optimizer step makes them those of the forward pass itself."""
    one_step = train.num_steps_per_rollout == 1 and train.global_batch_size == 0
    needs: set[Role] = set() if one_step else {"policy"}
    return frozenset(needs | ({"reference"} if train.kl_loss_coef > 0 else set()))


def _policy_loss(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
    from slime_core.algo import losses

    train = settle(train)
    return losses.policy_loss(
        log_probs,
        columns["policy"] if "policy" in columns else log_probs.detach(),
        columns["advantages"],
        eps_clip=train.eps_clip,
        eps_clip_high=train.eps_clip_high,
        ref_log_probs=columns.get("reference"),
        kl_coef=train.kl_loss_coef,
        kl_type=train.kl_loss_type,
        entropy=entropy,
        entropy_coef=train.entropy_coef,
    )


def _sft_loss(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
    from slime_core.algo.losses import sft_loss

    return sft_loss(log_probs)
