"""What the [train] section adds to the advantages of every estimator, the core's and a plugin's alike.

A_t - kl_coef KL_t(policy, reference) - opd_kl_coef (lp_t - lp_teacher_t), then whitened over the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.builtin.given import role_column, teacher_column
from slime_core.protocols import Estimator, Role
from slime_core.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def needed_roles(estimator: Estimator, train: Any) -> frozenset[Role]:
    """Roles that the terms read: policy, reference and teacher, where the [train] section sets their weights."""
    if not estimator.terms:
        return frozenset()
    roles: set[Role] = {"policy"} if train.kl_coef > 0 or train.opd_kl_coef > 0 else set()
    if train.kl_coef > 0:
        roles.add("reference")
    return frozenset(roles) | (teacher_role(train) if train.opd_kl_coef > 0 else frozenset())


def teacher_role(train: Any) -> frozenset[Role]:
    """The role ``teacher`` where the trainer scores by it, and not an engine or the samples themselves."""
    return frozenset({"teacher"} if train.teacher_load and train.teacher_place == "trainer" else ())


def add_terms(estimator: Estimator, advantages: NDArray[Any], batch: Batch, train: Any) -> NDArray[np.float32]:
    """``advantages`` [R] with the terms of the [train] section, float32 [R]. Masked tokens get no term.

    KL to the reference is left to estimators that take it in their rewards (``kl_in_reward``); otherwise it is
    subtracted per token, as slime's reinforce_plus_plus_baseline does. Whitening, over the step's trainable tokens,
    follows ``normalize_advantages`` and the estimator's own ``whitens``.

    Raises:
        TrainerError: TRN00 a column that a term reads is missing.
    """
    from slime_core.algo.returns import whiten

    total = np.asarray(advantages, dtype=np.float64)
    if not estimator.terms:
        return total.astype(np.float32)
    if train.kl_coef > 0 and not estimator.kl_in_reward:
        total = total - train.kl_coef * reference_kl(batch, train)
    if train.opd_kl_coef > 0:
        total = total + train.opd_kl_coef * distillation(batch, train)
    if estimator.whitens or train.normalize_advantages:
        return whiten(total, batch.loss_mask)
    return total.astype(np.float32)


def reference_kl(batch: Batch, train: Any) -> NDArray[np.float64]:
    """KL to the reference per token by ``kl_reward_type``, float64 [R]; 0 where masked."""
    from slime_core.algo.returns import reward_kl

    kl = reward_kl(role_column(batch, "policy"), role_column(batch, "reference"), train.kl_reward_type)
    return np.where(batch.loss_mask > 0, kl, 0.0)


def distillation(batch: Batch, train: Any) -> NDArray[np.float64]:
    """Minus the reverse KL to the teacher per token, float64 [R]; 0 where masked."""
    from slime_core.algo.estimators import on_policy_distillation

    gap = on_policy_distillation(role_column(batch, "policy"), teacher_column(batch, train))
    return np.where(batch.loss_mask > 0, gap.astype(np.float64), 0.0)
