"""The rewards of a step's samples as estimators read them: a token each, less KL, by group and role, by turn.

`groups`, `credit` and `returns` have the mathematics; here they get a Batch and the [train] section.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.algorithms.shared.credit import discounts, group_credit, token_rewards, turn_of_token
from slime_core.algorithms.shared.groups import Std, compare
from slime_core.algorithms.shared.terms import reference_kl
from slime_core.errors import TrainerError
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY_TOKEN, BY_TURN = "token_rewards", "turn_rewards"


def peers(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group and rollout of each sample, [S] each, apart by role: agents are compared with others of their role alone.

    What two agents of one role in a rollout are worth counts once, as their mean, as fan-out siblings' does.
    """
    _, role = np.unique(batch.roles or [""] * len(batch), return_inverse=True)
    count = int(role.max(initial=0)) + 1
    return batch.group * count + role, batch.rollout * count + role


def credited(batch: Batch, train: Any, *, std: Std = "none", leave_one_out: bool = False) -> Columns:
    """Group-relative advantages of turns or tokens, by ``credit_level``: `credit.group_credit`."""
    rewards, total = given_rewards(batch)
    advantages = group_credit(
        rewards,
        total,
        batch.loss_mask,
        *peers(batch),
        batch.sample_of_token(),
        level=train.credit_level,
        gamma=train.gae_gamma,
        compare=partial(compare, std=std, leave_one_out=leave_one_out),
    )
    return {"advantages": advantages}


def rewards_less_kl(batch: Batch, train: Any) -> NDArray[np.float64]:
    """Rewards a token, less ``kl_coef`` times KL to the reference, float64 [R]."""
    rewards, _ = given_rewards(batch)
    return rewards - train.kl_coef * reference_kl(batch, train) if train.kl_coef > 0 else rewards


def discount(batch: Batch, train: Any, factor: float) -> NDArray[np.float64]:
    """``factor`` after each token, or by ``credit_level`` after each turn, float64 [R]: `credit.discounts`."""
    return discounts(batch.loss_mask, batch.sample_of_token(), factor, train.credit_level)


def given_rewards(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rewards a token, float64 [R] (`credit.token_rewards`), and each sample's whole reward, float64 [S].

    A sample's ``train_metadata`` may hold ``token_rewards`` (a list, one a response token) or ``turn_rewards`` (one
    a turn, a maximal run of trainable tokens), which then take the place of its scalar reward.

    Raises:
        TrainerError: TRN102 both at once, or a list of another length; TRN95 an entry that is no finite number.
    """
    sample_of_token = batch.sample_of_token()
    turns = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(turns, sample_of_token, turn_of_token(batch.loss_mask, sample_of_token) + 1)
    lists: dict[str, dict[int, Sequence[float]]] = {BY_TOKEN: {}, BY_TURN: {}}
    total = batch.reward.astype(np.float64)
    for sample, metadata in enumerate(batch.train_metadata):
        sample_id = batch.sample_ids[sample]
        name = _which(metadata, sample_id)
        if name:
            values = _numbers(metadata[name], name, sample_id)
            counts, unit = (batch.response_lengths, "response tokens") if name == BY_TOKEN else (turns, "turns")
            if len(values) != counts[sample] and turns[sample]:
                raise TrainerError(
                    f"sample {sample_id} has {len(values)} entries of {name} and {counts[sample]} {unit}",
                    code="TRN102",
                    where=f"sample {sample_id}",
                    why="a turn is a maximal run of tokens with loss_mask 1" if name == BY_TURN else "",
                    fix="give one a turn that trains, or token_rewards" if name == BY_TURN else "",
                )
            total[sample] = float(np.sum(values))
            if turns[sample]:
                lists[name][sample] = values
    rewards = token_rewards(
        batch.reward, batch.loss_mask, sample_of_token, by_token=lists[BY_TOKEN], by_turn=lists[BY_TURN]
    )
    return rewards, total


def _which(metadata: Any, sample_id: str) -> str:
    """``token_rewards``, ``turn_rewards`` or neither."""
    names = [name for name in (BY_TOKEN, BY_TURN) if metadata and metadata.get(name) is not None]
    if len(names) > 1:
        raise TrainerError(
            f"sample {sample_id} has token_rewards and turn_rewards",
            code="TRN102",
            where=f"sample {sample_id}",
            why="each says what the whole sample earns",
            fix="give one of them in train_metadata",
        )
    return names[0] if names else ""


def _numbers(entries: Any, name: str, sample_id: str) -> Sequence[float]:
    try:
        values = np.asarray(entries, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.full(1, np.nan)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise TrainerError(
            f"sample {sample_id} has {name} that are not a list of finite numbers",
            code="TRN95",
            where=f"sample {sample_id}",
            why="nothing is replaced by 0 silently",
            fix=f"give one number an entry in train_metadata['{name}']",
        )
    return values.tolist()  # type: ignore[no-any-return]
