"""Rules about the policy: its entropy, how far it moves, and whether trainer and engine agree about it."""

from __future__ import annotations

from statistics import fmean

from slime_diagnose.diagnosis import Diagnosis
from slime_diagnose.history import History
from slime_diagnose.trends import course_of, middle

STEPS = 3
COLLAPSED, QUIET = 0.1, 0.1
"""Share of its first entropy, and nats a token, below which a policy explores no more. Cui et al. 2025 ("The entropy
mechanism", eq. 1) find R = b - a exp(H): at H near 0 the reward has reached its ceiling; DAPO's figure 2 shows it."""
SOLVED = 0.9
"""Place of the mean reward in the range of rewards from which a low entropy is the solution, not the trouble."""
DOUBLED, LOUD = 2.0, 1.0
"""Growth of entropy, and nats a token, that end in noise: verl's issue 2738; rllm's 116 has 1 as limit."""
FAR = 1.0
"""Nats a token from the reference model: a response of 100 tokens is e^100 times less likely there. Runs that learn
stay below 0.1."""
CLIPPED = 0.4
"""Share of clipped tokens of a token-level ratio; usual is below 0.1, and PPO's own first epochs have 0.1 to 0.2."""
MOVED = 0.3
"""Nats a token that the policy moves in one rollout's steps; Spinning Up's PPO stops at 0.015, and a clip at
0.2 cannot hold back what its gradient no longer sees."""
APART, FURTHER, FLOOR = 0.1, 3.0, 0.03
"""Mean |log-prob of trainer - of engine| a token: the level, and the growth above a floor, at which runs break.
THUDM's slime has 0.01 to 0.04 with SGLang in bfloat16; verl's pull request 2953 and open-instruct's issue 1473 have
runs that broke."""
CROWDED, IDLE = 2.0, 0.1
"""Largest load over the mean, minus 1, and growth of the share of experts without a token; by judgement, and growth
alone: a narrow task has an uneven load from its first step."""


def entropy_collapses(history: History) -> Diagnosis | None:
    """Entropy falls below a tenth and 0.1 nats, while the reward is below 90 % of its range and rises no more."""
    course, rewards = course_of(history.values("entropy")), history.values("reward/mean")
    low, high = history.reward_range
    if not history.rewarded or course is None or not rewards or low == high:
        return None
    place = (fmean(rewards[-10:]) - low) / (high - low)
    late = course_of(rewards[len(rewards) // 2 :])
    rising = late is None or late.up
    if not course.down or course.late > min(QUIET, COLLAPSED * course.early) or place > SOLVED or rising:
        return None
    train = history.config.train
    return Diagnosis(
        severity="warning",
        summary=f"entropy collapsed to {course.late:.2g} nats a token, and the reward rises no more",
        evidence=(f"entropy {course}", f"reward/mean of the second half {late}"),
        fix="start again from an earlier checkpoint with a wider upper clip (--eps-clip-high 0.28, DAPO), or a bonus "
        "(--entropy-coef 0.001), or a lower learning rate",
        key="train.eps_clip_high" if train.eps_clip_high <= train.eps_clip else "train.entropy_coef",
    )


def entropy_explodes(history: History) -> Diagnosis | None:
    """Entropy doubles beyond noise to more than 1 nat a token, and the reward does not rise."""
    course, rewards = course_of(history.values("entropy")), course_of(history.values("reward/mean"))
    if not history.rewarded or course is None or rewards is None or rewards.up:
        return None
    if not course.up or course.late < max(LOUD, DOUBLED * course.early):
        return None
    bonus = history.config.train.entropy_coef > 0
    return Diagnosis(
        severity="warning",
        summary=f"entropy rises to {course.late:.2g} nats a token and the reward does not: responses turn into noise",
        evidence=(f"entropy {course}", f"reward/mean {rewards}"),
        fix="lower --entropy-coef" if bonus else "lower --lr, narrow --eps-clip-high, or add --kl-loss-coef 0.001",
        key="train.entropy_coef" if bonus else "train.lr",
    )


def kl_explodes(history: History) -> Diagnosis | None:
    """KL to the reference model is above 1 nat a token in the last steps."""
    values = history.recent("kl_loss")
    if not history.online or len(values) < STEPS or middle(values) <= FAR:
        return None
    return Diagnosis(
        severity="warning",
        summary=f"the policy is {middle(values):.2g} nats a token away from the reference model",
        evidence=(
            f"kl_loss {min(values):.3g} to {max(values):.3g} in {history.where()}",
            f"kl_loss {history.values('kl_loss')[0]:.3g} at first",
        ),
        fix="lower --lr, or raise --kl-loss-coef; see that ref_load is the model that the run began with",
        key="train.kl_loss_coef",
    )


def ratio_explodes(history: History) -> Diagnosis | None:
    """Importance ratios were cut, `CLIPPED` of the tokens are clipped, or a rollout moves the policy by `MOVED` nats.

    The clip fraction counts for token ratios alone: GSPO clips far more by design (Zheng et al. 2025).
    """
    overflow, moves = history.recent("ratio_overflow"), history.recent("ppo_kl")
    clipped = history.recent("clip_fraction") if history.config.train.importance_level == "token" else []
    signs = {
        f"ratio_overflow up to {max(overflow, default=0):.3g}": max(overflow, default=0) > 0,
        f"clip_fraction {middle(clipped):.3g}": len(clipped) >= STEPS and middle(clipped) > CLIPPED,
        f"ppo_kl {middle(moves):.3g}": len(moves) >= STEPS and abs(middle(moves)) > MOVED,
    }
    if not history.online or not any(signs.values()):
        return None
    staleness = fmean(history.recent("staleness/mean") or [0.0])
    return Diagnosis(
        severity="warning",
        summary="the policy leaves the one that sampled too fast: importance ratios explode",
        evidence=(
            f"{', '.join(sign for sign, holds in signs.items() if holds)} in {history.where()}",
            f"staleness/mean {staleness:.2g}, {_steps_a_rollout(history):.3g} optimizer steps a rollout",
        ),
        fix="lower --lr, or take fewer optimizer steps a rollout (num_steps_per_rollout)"
        + (", or lower --max-staleness" if staleness > 0 else ""),
        key="train.lr",
    )


def experts_collapse(history: History) -> Diagnosis | None:
    """The load of experts is twice as uneven as at first and above `CROWDED`; or `IDLE` more of them have no token."""
    violation = course_of(history.values("moe/load_max_violation"))
    dead = course_of(history.values("moe/dead_experts"))
    if violation is None or dead is None:
        return None
    crowded = violation.up and violation.late > max(CROWDED, DOUBLED * violation.early)
    if not crowded and not (dead.up and dead.late > dead.early + IDLE):
        return None
    return Diagnosis(
        severity="warning",
        summary=f"tokens crowd into few experts: the fullest has {1 + violation.late:.2g} times the mean load",
        evidence=(f"moe/load_max_violation {violation}", f"moe/dead_experts {dead}"),
        fix="lower --lr; routers with a bias (DeepSeek-V3, GLM-4.5): --moe-router-bias-update-rate 0.001; "
        "with Megatron also --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001",
        key="train.moe_router_bias_update_rate",
    )


def engine_gap(history: History) -> Diagnosis | None:
    """Trainer and engine disagree by `APART` nats a token, or three times as much as at first and more than `FLOOR`.

    Where samples are stale the policy has moved since, so `APART` is three times as much.
    """
    values, stale = history.values("train_rollout_logprob_abs_diff"), fmean(history.recent("staleness/mean") or [0.0])
    if not history.online or len(values) < STEPS:
        return None
    level, limit = middle(values[-10:]), APART * (3 if stale > 0 else 1)
    course = course_of(values)
    grows = course is not None and course.up and course.late > max(FLOOR, FURTHER * course.early) and stale == 0
    if level <= limit and not grows:
        return None
    rollout = history.config.rollout
    cut = rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0
    evidence = [f"train_rollout_logprob_abs_diff {level:.3g} in {history.where()}" + (f", {course}" if course else "")]
    if cut:
        evidence.append(
            f"top_p {rollout.rollout_top_p:g}, top_k {rollout.rollout_top_k}: the engine's log-probs are of a part of "
            "the distribution, the trainer's of all"
        )
    if stale > 0:
        evidence.append(f"staleness/mean {stale:.2g}: some of the gap is how far the policy has moved")
    return Diagnosis(
        severity="warning",
        summary=f"trainer and engine disagree by {level:.2g} nats a token: the gradient is of another policy",
        evidence=tuple(evidence),
        fix="--rollout-top-p 1 --rollout-top-k 0"
        if cut
        else "--use-tis weighs tokens by the difference (truncated "
        "importance sampling); with the embedded engine --true-on-policy-mode removes it",
        key="rollout.rollout_top_p" if cut else "train.use_tis",
    )


def _steps_a_rollout(history: History) -> float:
    return fmean(history.recent("optimizer_steps") or [0.0])
