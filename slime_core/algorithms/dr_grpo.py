"""GRPO done right: a reward less its group's mean, and a constant divisor of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, CREDIT, GROUP, LOSS, PARTS, PER_TOKEN, TOKEN_RATIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.algorithms.shared.groups import Floats, Ints
    from slime_core.types import Batch, Columns


def dr_grpo(reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints) -> NDArray[np.float32]:
    """A_i = r_i - mean_group r (Liu et al. 2025, "Understanding R1-Zero-Like Training", Dr. GRPO), float32 [R].

    Without the standard deviation, easy and hard prompts weigh what their rewards say. It is also the group baseline
    of REINFORCE++-baseline (Hu et al. 2025), which whitens over the step. Arguments and errors as `grpo.grpo`.
    """
    from slime_core.algorithms.shared.groups import compare, spread

    return spread(compare(reward, group, rollout), reward, sample_of_token)


def advantages(batch: Batch, train: Any) -> Columns:
    """Of whole responses or, by ``credit_level``, of turns or tokens."""
    from slime_core.algorithms.shared.rewards import credited, peers

    if train.credit_level != "trajectory":
        return credited(batch, train)
    return {"advantages": dr_grpo(batch.reward, *peers(batch), batch.sample_of_token())}


ALGORITHM = Algorithm(
    name="dr_grpo",
    title="GRPO done right: no division by length or standard deviation",
    formula={
        "advantage": "A_i = r_i - mean_group r; " + PER_TOKEN,
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": "constant: sum over the step's trainable tokens, divided by rollouts * loss_divisor",
    },
    source=(
        "Liu et al. 2025, Understanding R1-Zero-Like Training: A Critical Perspective, section 3.1 and appendix A",
    ),
    differs={
        "slime": "Not built in: --disable-grpo-std-normalization and a reducer of your own with a constant divisor.",
        "verl": "norm_adv_by_std_in_grpo = False with loss_agg_mode = seq-mean-token-sum-norm; the divisor is the "
        "padded width of the response tensor unless loss_scale_factor is set.",
        "TRL": "loss_type = dr_grpo divides by batch size times max_completion_length; scale_rewards stays "
        "'group', so the division by the standard deviation has to be switched off as well.",
    },
    options=(*GROUP, *CREDIT, *LOSS),
    advice="Where responses differ much in length: GRPO favours short right answers and long wrong ones, this "
    "does not. Its gradients are smaller by about length / loss_divisor, so raise lr, or set loss_divisor near "
    "the usual length.",
    functions=("dr_grpo.dr_grpo", "shared.losses.clipped"),
    related=("grpo", *PARTS),
    advantages=advantages,
    presets={"loss_aggregation": "constant"},
    groups=True,
    spreads=True,
)
