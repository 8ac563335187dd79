"""The core's advantage estimators, bound to a step's Batch and the [train] section.

KL, distillation and whitening come after them, as for a plugin's (`builtin.terms`). At masked tokens an advantage
means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.builtin.terms import distillation, given_rewards, reference_kl, role_column, teacher_role
from slime_core.config.algorithms import ALGORITHMS, WHITENED
from slime_core.errors import ConfigError, TrainerError
from slime_core.protocols import Estimator, Role
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

Values = Callable[[Batch, Any], Columns]


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
