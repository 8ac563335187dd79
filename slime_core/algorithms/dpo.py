"""Direct preference optimization: a preferred and a rejected response to each prompt, both of the data.

With h the pair's margin, dL/d(log pi_t) is the same at all tokens of a response. It is computed once a step from the
log-probs of both, before the update, and then each token is trained alone: a pair may lie in two micro-batches, packs
or ranks. That is exact where every step has one optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import ROLLOUT_MEAN

if TYPE_CHECKING:
    from slime_core.config.problems import Problem
    from slime_core.types import Batch, Columns

PAIR = 2


def advantages(batch: Batch, train: Any) -> Columns:
    """``advantages`` [R]: minus the loss's derivative by a token's log-prob, as ``rollout_mean`` weighs it; and
    ``returns`` [R]: the margin h of the token's pair.

    ``sigmoid``: h = beta (d_chosen - d_rejected), d the sum of log pi - log pi_ref over a response's trained tokens.
    ``ipo``: the same with means over tokens for sums, and without beta. The chosen response has the higher reward.

    Raises:
        TrainerError: TRN00 a group is not a pair with a chosen and a rejected response.
    """
    import numpy as np

    from slime_core.algorithms.shared.terms import role_column

    mask, sample = batch.loss_mask.astype(np.float64), batch.sample_of_token()
    gap = np.where(mask > 0, role_column(batch, "policy") - role_column(batch, "reference"), 0.0).astype(np.float64)
    tokens = np.maximum(np.bincount(sample, mask, len(batch)), 1.0)
    log_ratio = np.bincount(sample, gap, len(batch))
    ipo, beta = train.dpo_objective == "ipo", train.dpo_beta
    score = log_ratio / tokens if ipo else beta * log_ratio
    chosen, rejected = _pairs(batch)
    margin = score[chosen] - score[rejected]
    if ipo:
        slope = 2 * (margin - 1 / (2 * beta))
    else:
        smoothing = train.dpo_label_smoothing
        slope = beta * (smoothing / (1 + np.exp(-margin)) - (1 - smoothing) / (1 + np.exp(margin)))
    weight, margins = np.zeros(len(batch)), np.zeros(len(batch))
    for members, sign in ((chosen, -1.0), (rejected, 1.0)):
        # rollout_mean divides by a response's tokens, and by the rollouts, of which each pair has two
        weight[members] = sign * PAIR * slope * (1.0 if ipo else tokens[members])
        margins[members] = margin
    return {name: values[sample].astype(np.float32) for name, values in (("advantages", weight), ("returns", margins))}


def _pairs(batch: Batch) -> tuple[Any, Any]:
    """Indices of the chosen and of the rejected samples, pair by pair."""
    import numpy as np

    from slime_core.errors import TrainerError

    order = np.lexsort((-batch.reward, batch.group))
    group = batch.group[order]
    even = len(order) % PAIR == 0
    if not even or (group[::2] != group[1::2]).any() or (batch.reward[order[::2]] == batch.reward[order[1::2]]).any():
        raise TrainerError(
            "a group is not a pair of a chosen and a rejected response",
            where=f"step {batch.version}",
            why="dpo_loss compares two responses, of which the chosen one has the higher reward",
            fix="name the columns of both: data.chosen_key and data.rejected_key",
        )
    return order[::2], order[1::2]


def _conflicts(config: Any) -> Iterator[Problem]:
    from slime_core.config.problems import conflict

    train, rollout = config.train, config.rollout
    if train.loss_type != "dpo_loss":
        yield conflict(
            f"advantage_estimator = dpo with loss_type = {train.loss_type}",
            ["train.advantage_estimator", "train.loss_type"],
            why="pairs are read by dpo_loss alone, which needs no advantage_estimator",
            fix="set loss_type = dpo_loss",
        )
        return
    if any(size != PAIR for size in rollout.group_sizes(config.data)):
        yield conflict(
            f"dpo_loss with n_samples_per_prompt = {rollout.n_samples_per_prompt}",
            ["train.loss_type", "rollout.n_samples_per_prompt"],
            why="a prompt has two responses: the chosen and the rejected one",
            fix="set n_samples_per_prompt to 2 in this stage",
        )
    rollouts = rollout.rollout_batch_size * PAIR
    if train.num_steps_per_rollout > 1 or train.global_batch_size not in (0, rollouts):
        yield conflict(
            "dpo_loss with several optimizer steps a step",
            ["train.loss_type", "train.num_steps_per_rollout", "train.global_batch_size"],
            why="a pair's margin is computed once, before the update",
            fix="lower rollout_batch_size, and leave num_steps_per_rollout and global_batch_size out",
        )
    if train.loss_aggregation not in ("auto", "rollout_mean"):
        yield conflict(
            f"dpo_loss with loss_aggregation = {train.loss_aggregation}",
            ["train.loss_type", "train.loss_aggregation"],
            why="the loss is the mean over pairs",
            fix="leave loss_aggregation out",
        )
    if train.dpo_label_smoothing and train.dpo_objective != "sigmoid":
        yield conflict(
            f"dpo_label_smoothing = {train.dpo_label_smoothing} with dpo_objective = {train.dpo_objective}",
            ["train.dpo_label_smoothing", "train.dpo_objective"],
            why="smoothing belongs to the sigmoid",
            fix="leave one of them out",
        )


ALGORITHM = Algorithm(
    name="dpo",
    title="Direct preference optimization: pairs of a chosen and a rejected response",
    formula={
        "advantage": "A_t = -dL/d(log pi_t)",
        "ratio": "h = beta (d_w - d_l), d = sum over trained tokens of log pi - log pi_ref; ipo: means, without beta",
        "objective": "sigmoid: -(1 - e) log sigma(h) - e log sigma(-h), e = dpo_label_smoothing; "
        "ipo: (h - 1 / (2 beta))^2",
        "aggregation": f"{ROLLOUT_MEAN}, which is the mean over pairs",
    },
    source=(
        "Rafailov et al. 2023, Direct Preference Optimization, equation 7",
        "Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Human Preferences, equation 17",
        "Mitchell 2023, A note on DPO with noisy preferences (label smoothing)",
    ),
    differs={
        "slime": "Has none.",
        "verl": "A recipe of its own.",
        "TRL": "DPOTrainer, the same losses; its ipo divides by the length too.",
    },
    options=("loss_type", "dpo_beta", "dpo_objective", "dpo_label_smoothing", "ref_load"),
    advice="For preferences that no reward can tell. A stage learns from pairs by loss_type = dpo_loss; "
    "n_samples_per_prompt is 2, and the reference is ref_load, or the run's first weights.",
    functions=("dpo.advantages", "shared.losses.dpo_loss"),
    related=("sft",),
    advantages=advantages,
    needs=frozenset({"policy", "reference"}),
    terms=False,
    conflicts=_conflicts,
)
