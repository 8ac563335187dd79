"""Supervised: every token has the advantage 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import ROLLOUT_MEAN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.algorithms.shared.groups import Ints
    from slime_core.config.problems import Problem
    from slime_core.types import Batch, Columns


def sft(sample_of_token: Ints) -> NDArray[np.float32]:
    """1 for every response token, float32 [R]: supervised training weighs by mask alone."""
    import numpy as np

    return np.ones(len(sample_of_token), dtype=np.float32)


def advantages(batch: Batch, train: Any) -> Columns:
    """1 for every token."""
    return {"advantages": sft(batch.sample_of_token())}


def _conflicts(config: Any) -> Iterator[Problem]:
    from slime_core.config.problems import conflict

    train = config.train
    by_function = train.custom_loss_function_path or config.rollout.rollout_function_path
    if train.loss_type == "policy_loss" and not by_function:
        yield conflict(
            "advantage_estimator = sft with loss_type = policy_loss",
            ["train.advantage_estimator", "train.loss_type"],
            why="every sampled token has the advantage 1: the policy is pushed towards whatever it says",
            fix="set loss_type = sft_loss to train on labels, or name an estimator that reads rewards",
        )


ALGORITHM = Algorithm(
    name="sft",
    title="Supervised: the advantage of every token is 1",
    formula={
        "advantage": "A_t = 1",
        "ratio": "none",
        "objective": "-log pi(y_t), with loss_type = sft_loss",
        "aggregation": ROLLOUT_MEAN,
    },
    source=("Williams and Zipser 1989 (teacher forcing); maximum likelihood",),
    differs={
        "slime": "The same loss; the mean of rollout means unless --calculate-per-token-loss.",
        "verl": "A trainer of its own (fsdp_sft_trainer), token mean.",
        "TRL": "SFTTrainer, token mean over the accumulated batch.",
    },
    options=("loss_type", "loss_aggregation", "loss_divisor"),
    advice="For warm-ups. A stage is supervised by loss_type = sft_loss; labels become the responses, and the "
    "estimator's name does not matter then.",
    functions=("sft.sft", "shared.losses.sft_loss"),
    related=("on_policy_distillation", "aggregation"),
    advantages=advantages,
    terms=False,
    spreads=True,
    conflicts=_conflicts,
)
