"""REINFORCE, leave one out: a reward less the mean of its group's others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, CREDIT, GROUP, LOSS, PARTS, PER_TOKEN, ROLLOUT_MEAN, TOKEN_RATIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.algorithms.shared.groups import Floats, Ints
    from slime_core.types import Batch, Columns


def rloo(reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints) -> NDArray[np.float32]:
    """A_i = r_i - mean of the group's other rollouts (Kool et al. 2019; Ahmadian et al. 2024, RLOO), float32 [R].

    The baseline does not contain the reward it is subtracted from, so the gradient is unbiased; for n rollouts it is
    n / (n - 1) times `dr_grpo.dr_grpo`. A group of one is centred by itself: 0 where siblings agree. THUDM/slime has
    no RLOO; TRL takes the sequence's KL from the reward before the baseline, here KL is taken from the advantages.
    Arguments and errors as `grpo.grpo`.
    """
    from slime_core.algorithms.shared.groups import compare, spread

    return spread(compare(reward, group, rollout, leave_one_out=True), reward, sample_of_token)


def advantages(batch: Batch, train: Any) -> Columns:
    """Of whole responses or, by ``credit_level``, of turns or tokens."""
    from slime_core.algorithms.shared.rewards import credited, peers

    if train.credit_level != "trajectory":
        return credited(batch, train, leave_one_out=True)
    return {"advantages": rloo(batch.reward, *peers(batch), batch.sample_of_token())}


ALGORITHM = Algorithm(
    name="rloo",
    title="REINFORCE, leave one out",
    formula={
        "advantage": "A_i = r_i - mean of the group's other rewards = n / (n - 1) (r_i - mean_group r); " + PER_TOKEN,
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": ROLLOUT_MEAN,
    },
    source=(
        "Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human "
        "Feedback in LLMs, section 2.2",
        "Kool, van Hoof and Welling 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!",
    ),
    differs={
        "slime": "Not built in.",
        "verl": "The same advantage; a group of one keeps its raw reward in rloo and gets 0 in rloo_vectorized.",
        "TRL": "RLOOTrainer takes one ratio of the whole response's summed log-probs, clips that, averages over "
        "responses, and puts KL with beta = 0.05 into the reward.",
    },
    options=(*GROUP, *CREDIT, *LOSS),
    advice="An unbiased baseline and no division by a standard deviation: easy and hard prompts weigh alike. "
    "loss_aggregation = rollout_sum is the paper's gradient, which takes the response for one action.",
    functions=("rloo.rloo", "shared.losses.clipped"),
    related=("grpo", "dr_grpo", *PARTS),
    advantages=advantages,
    groups=True,
)
