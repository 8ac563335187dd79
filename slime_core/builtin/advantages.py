"""The core's advantage estimators, bound to a Batch and the [train] section, and the terms added to those of all.

A_t - kl_coef KL_t(policy, reference) - opd_kl_coef (lp_t - lp_teacher_t), then whitened over the step, a plugin's
estimators too. At masked tokens an advantage means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.config.algorithms import ALGORITHMS, WHITENED
from slime_core.errors import ConfigError, TrainerError
from slime_core.protocols import Estimator, Role
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

Values = Callable[[Batch, Any], Columns]
BY_TOKEN, BY_TURN = "token_rewards", "turn_rewards"


def estimators() -> list[Estimator]:
    """One a name of `config.algorithms.ALGORITHMS`; what each reads depends on the [train] section."""
    return [
        Estimator(
            name=name,
            fn=_OWN.get(name) or partial(_grouped, name=name),
            needs=frozenset({"values"}) if name == "ppo" else frozenset(),
            needs_when=_teacher if name == "on_policy_distillation" else None,
            terms=name != "sft",
            kl_in_reward=name in ("reinforce_plus_plus", "ppo"),
            whitens=name in WHITENED,
        )
        for name in ALGORITHMS
    ]


def _teacher(train: Any) -> frozenset[Role]:
    return teacher_role(train) | {"policy"}


def _supervised(batch: Batch, train: Any) -> Columns:
    """`algo.estimators.sft`."""
    from slime_core.algo.estimators import sft

    return {"advantages": sft(batch.sample_of_token())}


def _distillation(batch: Batch, train: Any) -> Columns:
    """`algo.estimators.on_policy_distillation`; the reward does not enter."""
    return {"advantages": distillation(batch, train)}


def peers(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group and rollout of each sample, [S] each, apart by role: agents are compared with others of their role alone.

    What two agents of one role in a rollout are worth counts once, as their mean, as fan-out siblings' does.
    """
    _, role = np.unique(batch.roles or [""] * len(batch), return_inverse=True)
    count = int(role.max(initial=0)) + 1
    return batch.group * count + role, batch.rollout * count + role


def _grouped(batch: Batch, train: Any, *, name: str) -> Columns:
    """The group-relative estimators, of whole responses or, by ``credit_level``, of turns or tokens."""
    from slime_core.algo import estimators as algo

    ids = (*peers(batch), batch.sample_of_token())
    divide = not train.disable_grpo_std_normalization
    if train.credit_level != "trajectory":
        return {"advantages": _credited(batch, train, name)}
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        found = algo.dr_grpo(batch.reward, *ids)
    elif name == "rloo":
        found = algo.rloo(batch.reward, *ids)
    else:
        found = algo.grpo(batch.reward, *ids, std=divide, std_scope=train.grpo_std_scope)
    return {"advantages": found}


def _credited(batch: Batch, train: Any, name: str) -> NDArray[np.float32]:
    from slime_core.algo.credit import group_credit
    from slime_core.algo.estimators import compare

    rewards, total = given_rewards(batch)
    divides = name in ("grpo", "gspo", "cispo") and not train.disable_grpo_std_normalization
    return group_credit(
        rewards,
        total,
        batch.loss_mask,
        *peers(batch),
        batch.sample_of_token(),
        level=train.credit_level,
        gamma=train.gae_gamma,
        compare=partial(compare, std=train.grpo_std_scope if divides else "none", leave_one_out=name == "rloo"),
    )


def _pass_at_k(batch: Batch, train: Any) -> Columns:
    """`algo.estimators.pass_at_k`.

    Raises:
        ConfigError: CFG04 credit below a trajectory.
        TrainerError: TRN99 a group with fewer than ``pass_k`` rollouts.
    """
    from slime_core.algo.estimators import pass_at_k

    if train.credit_level != "trajectory":
        raise ConfigError(
            f"credit_level = {train.credit_level} with advantage_estimator = pass_at_k",
            code="CFG04",
            where="train.credit_level",
            why="the best of k is defined for whole responses",
            fix="--credit-level trajectory",
        )
    std = not train.disable_grpo_std_normalization
    ids = (*peers(batch), batch.sample_of_token())
    try:
        return {"advantages": pass_at_k(batch.reward, *ids, k=train.pass_k, std=std)}
    except ValueError as error:
        raise TrainerError(
            str(error),
            code="TRN99",
            where=f"step {batch.version}",
            why="a group needs at least pass_k rollouts; one of exactly pass_k teaches nothing",
            fix="lower train.pass_k, or raise rollout.n_samples_per_prompt",
        ) from None


def _token_rewards(batch: Batch, train: Any) -> NDArray[np.float64]:
    """Rewards a token with KL to the reference in them."""
    rewards, _ = given_rewards(batch)
    return rewards - train.kl_coef * reference_kl(batch, train) if train.kl_coef > 0 else rewards


def _discount(batch: Batch, train: Any, factor: float) -> NDArray[np.float64]:
    from slime_core.algo.credit import discounts

    return discounts(batch.loss_mask, batch.sample_of_token(), factor, train.credit_level)


def _reinforce(batch: Batch, train: Any) -> Columns:
    """REINFORCE++ (Hu et al. 2025): discounted reward-to-go of reward less KL; whitened after."""
    from slime_core.algo.returns import reward_to_go

    discount = _discount(batch, train, train.gae_gamma)
    found = reward_to_go(_token_rewards(batch, train), batch.loss_mask, batch.sample_of_token(), discount)
    return {"advantages": found}


def _ppo(batch: Batch, train: Any) -> Columns:
    """PPO with a critic (Schulman et al. 2017): `algo.returns.gae` over reward less KL."""
    from slime_core.algo.returns import gae

    advantages, returns = gae(
        _token_rewards(batch, train),
        role_column(batch, "values"),
        batch.loss_mask,
        batch.sample_of_token(),
        _discount(batch, train, train.gae_gamma),
        _discount(batch, train, train.gae_lambda),
    )
    return {"advantages": advantages, "returns": returns.astype(np.float32)}


_OWN: dict[str, Values] = {
    "pass_at_k": _pass_at_k,
    "on_policy_distillation": _distillation,
    "sft": _supervised,
    "reinforce_plus_plus": _reinforce,
    "ppo": _ppo,
}


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
