"""Group relative policy optimization: a reward less its group's mean, divided by its group's deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import (
    CLIPPED,
    CREDIT,
    GROUP,
    GROUPS_IN_SLIME,
    LOSS,
    PARTS,
    PER_TOKEN,
    ROLLOUT_MEAN,
    STD,
    TOKEN_RATIO,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.algorithms.shared.groups import Floats, Ints, Std
    from slime_core.types import Batch, Columns


def grpo(
    reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints, *, std: bool, std_scope: str = "group"
) -> NDArray[np.float32]:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, 4.1.2), float32 [R], the same for a sample's tokens.

    A_i = (r_i - mean_group r) / (std r + 1e-6), with the mean and the sample standard deviation (ddof 1) over the
    group's rollouts; without ``std`` nothing divides. ``std_scope`` "batch" divides by the standard deviation of all
    rollouts of the step (Liu et al. 2025, "Tricks or Traps?"). GSPO (Zheng et al. 2025) and CISPO (MiniMax 2025) have
    these advantages too; they differ in the loss.

    A sample's own reward is compared, so siblings may differ. A group of one rollout is centred and never divided by
    its own deviation: 0 where siblings agree. A group whose rewards all tie gives exactly 0.

    THUDM/slime finds groups by position and, once samples of a step are missing, makes one group of the whole step;
    a fan-out sibling counts there like a rollout. TRL adds 1e-4 to the deviation.

    Args:
        reward: [S]
        group: [S], any id a group
        rollout: [S], any id a rollout; unique over groups
        sample_of_token: [R], the sample of each response token
        std_scope: "group" or "batch"

    Raises:
        ValueError: a rollout id that occurs in two groups, or another scope.
    """
    from slime_core.algorithms.shared.groups import compare, spread

    if std_scope not in ("group", "batch"):
        raise ValueError(f"the scope of the standard deviation is 'group' or 'batch', not {std_scope!r}")
    scope: Std = "none" if not std else "batch" if std_scope == "batch" else "group"
    return spread(compare(reward, group, rollout, std=scope), reward, sample_of_token)


def advantages(batch: Batch, train: Any) -> Columns:
    """Of whole responses or, by ``credit_level``, of turns or tokens."""
    from slime_core.algorithms.shared.rewards import credited, peers

    std = not train.disable_grpo_std_normalization
    if train.credit_level != "trajectory":
        return credited(batch, train, std=train.grpo_std_scope if std else "none")
    ids = (*peers(batch), batch.sample_of_token())
    return {"advantages": grpo(batch.reward, *ids, std=std, std_scope=train.grpo_std_scope)}


ALGORITHM = Algorithm(
    name="grpo",
    title="Group relative policy optimization",
    formula={
        "advantage": "A_i = (r_i - mean_group r) / (std_group r + 1e-6), std with ddof 1; " + PER_TOKEN,
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": ROLLOUT_MEAN,
    },
    source=(
        "Shao et al. 2024, DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, "
        "equations 3 and 4, section 4.1.2",
        "Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, equation 10 (clip-"
        "higher: eps_clip_high above eps_clip)",
    ),
    differs={
        "slime": GROUPS_IN_SLIME + " With one sample a prompt every advantage is 0 and nothing says so.",
        "verl": "Groups by id; a group of one keeps its raw reward as advantage. The log-ratio is held within "
        "[-20, 20], a dual clip with c = 3 is always on, and the default aggregation is the token mean.",
        "TRL": "Groups by position, divided by std + 1e-4. The default loss_type is dapo, a token mean; grpo "
        "averages the micro-batch's sequences and divides by the accumulation steps.",
    },
    options=(*GROUP, *STD, *CREDIT, *LOSS),
    advice="The first choice where several samples of a prompt can be judged: no critic, few settings. Prompts "
    "that all samples solve, or none, teach nothing; dynamic_sampling replaces them.",
    functions=("grpo.grpo", "shared.losses.clipped"),
    related=("dr_grpo", "gspo", "rloo", *PARTS),
    advantages=advantages,
    groups=True,
    spreads=True,
)
