"""What estimators find in a Batch, and what the [train] section adds to the advantages of all, a plugin's too.

A_t - kl_coef KL_t(policy, reference) - opd_kl_coef (lp_t - lp_teacher_t), then whitened over the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import TrainerError
from slime_core.protocols import Estimator, Role
from slime_core.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY_TOKEN, BY_TURN = "token_rewards", "turn_rewards"


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


def given_rewards(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rewards a token, float64 [R] (`algo.credit.token_rewards`), and each sample's whole reward, float64 [S].

    A sample's ``train_metadata`` may hold ``token_rewards`` (a list, one a response token) or ``turn_rewards`` (one
    a turn, a maximal run of trainable tokens), which then take the place of its scalar reward.

    Raises:
        TrainerError: TRN102 both at once, or a list of another length; TRN95 an entry that is no finite number.
    """
    from slime_core.algo.credit import token_rewards, turn_of_token

    sample_of_token = batch.sample_of_token()
    turns = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(turns, sample_of_token, turn_of_token(batch.loss_mask, sample_of_token) + 1)
    lists: dict[str, dict[int, Sequence[float]]] = {BY_TOKEN: {}, BY_TURN: {}}
    total = batch.reward.astype(np.float64)
    for sample, metadata in enumerate(batch.train_metadata):
        sample_id = batch.sample_ids[sample]
        name = _which(metadata, sample_id)
        if name:
            given = _numbers(metadata[name], name, sample_id)
            wanted, unit = (batch.response_lengths, "response tokens") if name == BY_TOKEN else (turns, "turns")
            if len(given) != wanted[sample] and turns[sample]:
                raise TrainerError(
                    f"sample {sample_id} has {len(given)} entries of {name} and {wanted[sample]} {unit}",
                    code="TRN102",
                    where=f"sample {sample_id}",
                    why="a turn is a maximal run of tokens with loss_mask 1" if name == BY_TURN else "",
                    fix="give one a turn that trains, or token_rewards" if name == BY_TURN else "",
                )
            total[sample] = float(np.sum(given))
            if turns[sample]:
                lists[name][sample] = given
    rewards = token_rewards(
        batch.reward, batch.loss_mask, sample_of_token, by_token=lists[BY_TOKEN], by_turn=lists[BY_TURN]
    )
    return rewards, total


def _which(metadata: Any, sample_id: str) -> str:
    """``token_rewards``, ``turn_rewards`` or neither."""
    found = [name for name in (BY_TOKEN, BY_TURN) if metadata and metadata.get(name) is not None]
    if len(found) > 1:
        raise TrainerError(
            f"sample {sample_id} has token_rewards and turn_rewards",
            code="TRN102",
            where=f"sample {sample_id}",
            why="each says what the whole sample earns",
            fix="give one of them in train_metadata",
        )
    return found[0] if found else ""


def _numbers(given: Any, name: str, sample_id: str) -> Sequence[float]:
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.full(1, np.nan)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise TrainerError(
            f"sample {sample_id} has {name} that are no list of finite numbers",
            code="TRN95",
            where=f"sample {sample_id}",
            why="nothing is replaced by 0 silently",
            fix=f"give one number an entry in train_metadata['{name}']",
        )
    return values.tolist()  # type: ignore[no-any-return]


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
            why="train.teacher_load is empty, or an engine's, and not every sample brings teacher_log_probs",
            fix="name the teacher: --teacher-load DIR   or fill sample.teacher_log_probs in slime_generate",
        )
    return batch.columns["teacher_log_probs"]
