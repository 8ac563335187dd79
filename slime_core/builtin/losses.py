"""The core's losses, bound to a micro-batch's columns and a [train] section that leaves nothing open.

Old log-probs are the column ``policy`` where it is there, the engine's with ``use_rollout_logprobs``, else those of
the forward pass itself, which are the same where one optimizer step follows each rollout. Corrections compare the
trainer's (``policy`` or the forward pass) with the engine's (``rollout_log_probs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slime_core.errors import TrainerError
from slime_core.protocols import Loss, Role
from slime_core.types import Columns

ENGINE = "rollout_log_probs"
MEAN_WEIGHT = "tis_mean_weight"


def losses() -> list[Loss]:
    """``policy_loss``: ratio, corrections, KL and entropy. ``sft_loss``: negative log-prob. ``dpo_loss``: pairs."""
    return [
        Loss(
            name="policy_loss",
            fn=_policy_loss,
            needs_when=_policy_needs,
            columns=("advantages",),
            local=_policy_local,
            prepare=_policy_prepare,
        ),
        Loss(name="sft_loss", fn=_sft_loss, local=lambda train: True),
        Loss(name="dpo_loss", fn=_dpo_loss, columns=("advantages", "returns"), local=lambda train: True),
    ]


def _policy_needs(train: Any) -> frozenset[Role]:
    """The trainer's log-probs from before the first of several optimizer steps, or for a mean weight; a reference."""
    several = train.num_steps_per_rollout > 1 or train.global_batch_size > 0
    reads_own = not train.use_rollout_logprobs or train.use_tis or train.use_rs or train.rs_veto_threshold > 0
    policy = (several and reads_own) or (train.use_tis and train.tis_batch_normalize)
    roles: dict[Role, bool] = {"policy": policy, "reference": train.kl_loss_coef > 0}
    return frozenset(role for role, needed in roles.items() if needed)


def _policy_local(train: Any) -> bool:
    """Whether every ratio and every rejection is a token's own."""
    return (
        train.importance_level == "token"
        and (not train.use_tis or train.tis_level == "token")
        and (not train.use_rs or train.rs_level == "token")
        and not train.rs_veto_threshold
        and not train.use_opsm
    )


def _policy_prepare(columns: Columns, train: Any) -> Columns:
    """The mean of the weights of one optimizer step, at each of its tokens, for ``tis_batch_normalize``."""
    if not (train.use_tis and train.tis_batch_normalize):
        return {}
    import torch

    from slime_core.algorithms.shared import corrections

    names = ("policy", ENGINE, "loss_mask", "sample")
    missing = [name for name in names if name not in columns]
    if missing:
        raise _lacking(missing[0], "train.tis_batch_normalize")
    trainer, engine, mask, sample = (torch.from_numpy(np.ascontiguousarray(columns[name])) for name in names)
    gap = corrections.engine_gap(trainer, engine, mask)
    mean = corrections.mean_weight(_weights(gap, mask, sample, train).value, mask)
    return {MEAN_WEIGHT: np.full(len(mask), mean, dtype=np.float32)}


def _policy_loss(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
    from slime_core.algorithms.shared import losses

    mask, sample = columns["loss_mask"], columns["sample"]
    trainer = columns["policy"] if "policy" in columns else log_probs.detach()
    if train.use_rollout_logprobs and ENGINE not in columns:
        raise _lacking(ENGINE, "train.use_rollout_logprobs")
    if train.kl_loss_coef > 0 and "reference" not in columns:
        raise _lacking("reference", "train.kl_loss_coef")
    old = columns[ENGINE] if train.use_rollout_logprobs else trainer
    weights, rejected, metrics = _correct(log_probs.detach(), trainer, old, columns, train)
    loss, more = losses.policy_loss(
        log_probs,
        old,
        columns["advantages"],
        losses.PolicyTerms.of(train),
        mask=mask,
        sample=sample,
        weights=weights,
        rejected=rejected,
        ref_log_probs=columns.get("reference"),
        entropy=entropy,
    )
    overflow = more["ratio_overflow"]
    if "ratio_overflow" in metrics:
        overflow = overflow.maximum(metrics["ratio_overflow"])
    return loss, {**metrics, **more, "ratio_overflow": overflow}


def _correct(
    log_probs: Any, trainer: Any, old: Any, columns: Mapping[str, Any], train: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Weights of the policy term, rejected tokens (each None where no key sets them), and metrics."""
    from slime_core.algorithms.shared import corrections

    mask, sample, engine = columns["loss_mask"], columns["sample"], columns.get(ENGINE)
    weights = rejected = None
    metrics: dict[str, Any] = {}
    if engine is None:
        if wants := [key for key in ("use_tis", "use_rs", "rs_veto_threshold") if getattr(train, key)]:
            raise _lacking(ENGINE, f"train.{wants[0]}")
    else:
        metrics = corrections.mismatch(trainer, engine, mask)
        gap = corrections.engine_gap(trainer, engine, mask)
        if train.use_tis:
            tis = _weights(gap, mask, sample, train)
            weights = tis.value / columns[MEAN_WEIGHT] if train.tis_batch_normalize else tis.value
            metrics |= {"tis_weight": weights, "tis_clip_fraction": tis.clipped, "ratio_overflow": tis.overflow}
        if train.use_rs:
            low, high = train.rs_lower_bound, train.rs_upper_bound
            rejected = corrections.rejected(gap, mask, sample, level=train.rs_level, lower=low, upper=high)
            metrics["rs_fraction"] = rejected
        if train.rs_veto_threshold:
            veto = corrections.vetoed(gap, mask, sample, train.rs_veto_threshold)
            rejected = veto if rejected is None else rejected | veto
            metrics["veto_fraction"] = veto
    if train.use_opsm:
        dropped = corrections.off_policy(log_probs, old, columns["advantages"], mask, sample, train.opsm_delta)
        metrics["opsm_fraction"] = dropped
        weights = (~dropped).to(log_probs.dtype) * (1 if weights is None else weights)
    return weights, rejected, {name: value.to(log_probs.dtype) for name, value in metrics.items()}


def _weights(gap: Any, mask: Any, sample: Any, train: Any) -> Any:
    from slime_core.algorithms.shared import corrections

    return corrections.importance_weights(
        gap,
        mask,
        sample,
        level=train.tis_level,
        mode=train.tis_mode,
        lower=train.tis_clip_low,
        upper=train.tis_clip,
    )


def _lacking(column: str, key: str) -> TrainerError:
    return TrainerError(
        f"the batch has no column {column}, which {key} reads",
        where=key,
        why="no sample of the step has it" if column == ENGINE else "the trainer did not score it",
        fix=f"leave {key.rpartition('.')[2]} out"
        + (", or have slime_generate keep the engine's log-probs" if column == ENGINE else ""),
    )


def _sft_loss(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
    from slime_core.algorithms.shared.losses import sft_loss

    return sft_loss(log_probs, columns["loss_mask"])


def _dpo_loss(log_probs: Any, entropy: Any, columns: Mapping[str, Any], train: Any) -> tuple[Any, dict[str, Any]]:
    from slime_core.algorithms.shared.losses import dpo_loss

    return dpo_loss(log_probs, columns["advantages"], columns["returns"], train)
