"""The core's advantage estimators, bound to a step's Batch and the [train] section."""

from __future__ import annotations

from typing import Any

from slime_core.protocols import Estimator
from slime_core.types import Batch, Columns


def estimators() -> list[Estimator]:
    """One a name of `config.algorithms.ALGORITHMS`."""
    return [Estimator(name="grpo", fn=_grpo), Estimator(name="sft", fn=_sft)]


def _grpo(batch: Batch, train: Any) -> Columns:
    from slime_core.algo.estimators import grpo

    std = not train.disable_grpo_std_normalization
    return {"advantages": grpo(batch.reward, batch.group, batch.rollout, batch.sample_of_token(), std=std)}


def _sft(batch: Batch, train: Any) -> Columns:
    from slime_core.algo.estimators import sft

    return {"advantages": sft(batch.sample_of_token())}
