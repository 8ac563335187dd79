"""Terms that the core adds to the advantages of every estimator, by the [train] section, and the columns they read.

A_t - kl_coef KL_t(policy, reference) - opd_kl_coef (lp_t - lp_teacher_t), then whitened over the step, a plugin's
estimators too. At masked tokens an advantage means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.algorithms.shared.kl import minus_reverse_kl, reward_kl
from slime_core.algorithms.shared.returns import whiten
from slime_core.errors import TrainerError
from slime_core.protocols import Estimator, Role
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray


def role_columns(scores: Mapping[str, Columns]) -> Columns:
    """One column a role, as estimators and losses read it: its log-probs or values; also ``policy_entropy``.

    Example: {"policy": {"log_probs": lp, "entropy": h}} returns {"policy": lp, "policy_entropy": h}
    """
    result: Columns = {}
    for role, columns in scores.items():
        for name, values in columns.items():
            result[role if name in ("log_probs", "values") else f"{role}_{name}"] = values
    return result


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
    kl = reward_kl(role_column(batch, "policy"), role_column(batch, "reference"), train.kl_reward_type)
    return np.where(batch.loss_mask > 0, kl, 0.0)


def distillation(batch: Batch, train: Any) -> NDArray[np.float64]:
    """Minus the reverse KL to the teacher per token, float64 [R]; 0 where masked."""
    gap = minus_reverse_kl(role_column(batch, "policy"), teacher_column(batch, train))
    return np.where(batch.loss_mask > 0, gap.astype(np.float64), 0.0)


def role_column(batch: Batch, role: str) -> NDArray[Any]:
    """A role's log-probs or values [R].

    Raises:
        TrainerError: TRN00 the trainer did not score it.
    """
    if role not in batch.columns:
        raise TrainerError(
            f"the step has no column '{role}'",
            where=f"step {batch.version}",
            why=f"the advantage estimator reads it; the step has {', '.join(sorted(batch.columns)) or 'none'}",
            fix="score the step with every role that plugins.needs names",
        )
    return batch.columns[role]


def teacher_column(batch: Batch, train: Any) -> NDArray[Any]:
    """The teacher's log-probs [R]: of the trainer's model ``teacher_load``, else those that samples bring.

    With ``teacher_place = engine`` the core's `slime_sample_done` has filled the samples.

    Raises:
        TrainerError: TRN00 neither is there.
    """
    if train.teacher_load and train.teacher_place == "trainer":
        return role_column(batch, "teacher")
    if "teacher_log_probs" not in batch.columns:
        raise TrainerError(
            "distillation has no teacher's log-probs",
            where=f"step {batch.version}",
            why="train.teacher_load is empty, or an engine's, and not every sample has teacher_log_probs",
            fix="name the teacher: --teacher-load DIR   or fill sample.teacher_log_probs in slime_generate",
        )
    return batch.columns["teacher_log_probs"]
