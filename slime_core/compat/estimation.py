"""slime's functions before and in the place of an estimator: reward post-process, conversion, advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_core.algorithms import algorithms
from slime_core.algorithms.shared.groups import compare
from slime_core.algorithms.shared.kl import reward_kl
from slime_core.algorithms.shared.terms import role_column
from slime_core.compat.owners import as_returned
from slime_core.compat.sample import Sample
from slime_core.compat.session import CompatSession
from slime_core.compat.steps import check_keys, flat_of, numbers, per_sample, rollout_data, samples_of, write_back
from slime_core.protocols import Estimator
from slime_core.types import Batch, Columns

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Function = Callable[..., Any]
DIVIDED = ("grpo", "gspo", "cispo")
"""Estimators for which slime divides a reward by its group's deviation."""


def estimator(
    inner: Estimator,
    config: Config,
    session: CompatSession,
    samples_by_id: Mapping[str, Sample],
    *,
    convert: Function | None,
    post_process: Function | None,
    advantage: Function | None,
) -> Estimator:
    """``inner`` behind the config's functions, in slime's order: convert, post-process rewards, advantages."""

    def fn(batch: Batch, train: Any) -> Columns:
        args = session.args(config)
        rewards: NDArray[np.float64] | None = None
        if convert is not None:
            samples = samples_of(batch, samples_by_id)
            with as_returned(samples):
                data = convert(args, samples)
            check_keys(data)
            write_back(data, batch)
            rewards = numbers("rewards", data["rewards"], batch) if "rewards" in data else None
        if post_process is not None:
            rewards = _post_processed(post_process, args, batch, samples_of(batch, samples_by_id))
        session.rewards = normalised(batch, train) if rewards is None else rewards
        if advantage is not None:
            return _by_function(advantage, args, batch, session.rewards, samples_of(batch, samples_by_id), train)
        if rewards is None:
            return inner.fn(batch, train)
        if (algorithm := algorithms().get(inner.name)) and algorithm.spreads:
            return {"advantages": rewards[batch.sample_of_token()].astype(np.float32)}
        return inner.fn(replace(batch, reward=rewards), train)

    if advantage is None:
        return replace(inner, fn=fn)
    return replace(inner, fn=fn, needs=inner.needs | {"policy"}, terms=True, kl_in_reward=True, whitens=False)


def _post_processed(fn: Function, args: Any, batch: Batch, samples: Sequence[Sample]) -> NDArray[np.float64]:
    """The rewards of a function that sees them as the reward function returned them.

    A teacher's log-probs that it sets on every sample become the step's.
    """
    with as_returned(samples):
        raw, processed = fn(args, samples)
    numbers("raw_rewards", raw, batch)
    log_probs = [sample.teacher_log_probs for sample in samples]
    if all(row is not None for row in log_probs):
        batch.columns["teacher_log_probs"] = flat_of("teacher_log_probs", log_probs, batch)
    return numbers("rewards", processed, batch)


def _by_function(
    fn: Function, args: Any, batch: Batch, rewards: NDArray[np.float64], samples: Sequence[Sample], train: Any
) -> Columns:
    data = rollout_data(batch, rewards, samples)
    kl = np.zeros(len(batch.loss_mask))
    if train.kl_coef > 0:
        kl = reward_kl(role_column(batch, "policy"), role_column(batch, "reference"), train.kl_reward_type)
    data["kl"] = per_sample(kl.astype(np.float32), batch)
    fn(args, data)
    if "advantages" not in data:
        raise ValueError("rollout_data['advantages'] was not set")
    return {name: flat_of(name, data[name], batch) for name in ("advantages", "returns") if name in data}


def normalised(batch: Batch, train: Any) -> NDArray[np.float64]:
    """Rewards as slime hands them to training: less their group's mean and divided by its deviation, by estimator."""
    algorithm = algorithms().get(train.advantage_estimator)
    if algorithm is None or not (algorithm.spreads and algorithm.groups):
        return batch.reward
    divides = train.advantage_estimator in DIVIDED and not train.disable_grpo_std_normalization
    comparison = compare(batch.reward, batch.group, batch.rollout, std="group" if divides else "none")
    return comparison.of(batch.reward)
