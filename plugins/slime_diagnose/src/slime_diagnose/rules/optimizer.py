"""Rules about the optimizer: a rate of nothing, updates below rounding, nothing to train on."""

from __future__ import annotations

from statistics import fmean

from slime_diagnose.diagnosis import Diagnosis
from slime_diagnose.history import RECENT, History, Row
from slime_diagnose.trends import middle

STEPS = 3
WEIGHT = 0.02
"""Size of a usual weight: `initializer_range` of GPT-2, Llama and Qwen."""
SMALL = 0.01
"""Share of `WEIGHT`: if not even weights a hundred times smaller than usual change, the policy does not."""
HALF_SPACING = {"bfloat16": 2.0**-9, "float32": 2.0**-25}
"""Half the relative distance of neighbouring numbers, below which an addition changes nothing: 8 and 24 bits of
mantissa. Mukherjee et al. 2025 ("RL finetunes small subnetworks") and AReaL's pull request 1634 show what it hides."""
ZERO = 1e-4
"""Mean |advantage| of a step that trains nothing, where 1 is usual and 0.1 is what a hard task has; relative to
the std of rewards where that is below 1, for estimators that do not divide by it."""
FAR_ABOVE = 20.0
"""Gradient norm over clip_grad, at every step, from which the limit and not the learning rate sets the step; Adam
divides it out again, so below this it is no trouble."""


def lr_zero(history: History) -> Diagnosis | None:
    """The learning rate was 0 in each of the last `STEPS` or more steps that changed weights."""
    steps = _moved(history)
    rows = steps[-RECENT:]
    if not history.trains or len(rows) < STEPS or any(row["metrics"].get("lr") != 0 for row in rows):
        return None
    train, ended = history.config.train, any(row["metrics"]["lr"] for row in steps)
    return Diagnosis(
        severity="critical",
        summary="the learning rate is 0: the schedule has ended before the run" if ended else "the learning rate is 0",
        evidence=(
            f"lr 0 in {history.where(len(rows))}",
            f"lr {train.lr:g}, min_lr {train.min_lr:g}, {train.lr_decay_style}, lr_decay_iters {train.lr_decay_iters}",
        ),
        fix="--lr-decay-iters 0 spreads the decay over the whole stage; or set --min-lr" if ended else "--lr 1e-6",
        key="train.lr_decay_iters" if ended else "train.lr",
    )


def warmup_too_long(history: History) -> Diagnosis | None:
    """The warm-up takes more optimizer steps than the stage has: the peak rate is never reached."""
    train, planned = history.config.train, _planned(history)
    warmup = train.lr_warmup_iters
    if not history.trains or not 0 < planned < warmup:
        return None
    return Diagnosis(
        severity="warning",
        summary=f"the warm-up of {warmup} optimizer steps is longer than the stage, which has {planned:.0f}",
        evidence=(f"lr ends at {train.lr * planned / warmup:.3g}, its peak would be {train.lr:g}",),
        fix=f"--lr-warmup-iters {planned // 10:.0f}, or a longer run",
        key="train.lr_warmup_iters",
    )


def lr_too_small(history: History) -> Diagnosis | None:
    """All updates of the stage together are too small to change a weight in the dtype that computes.

    AdamW changes a weight by about lr a step (Kingma and Ba 2015, section 2.1), so by at most lr times the number of
    steps; masters are float32 and must keep a single step. Both are compared with half the spacing of numbers at
    `SMALL` of a usual weight.
    """
    train, planned = history.config.train, _planned(history)
    rates = [row["metrics"]["lr"] for row in _moved(history) if row["metrics"].get("lr")]
    if not history.trains or not rates:
        return None
    half = HALF_SPACING.get(train.dtype, HALF_SPACING["float32"])
    whole, step, weight = train.lr * planned, max(rates), WEIGHT * SMALL
    if whole > half * weight and step > HALF_SPACING["float32"] * weight:
        return None
    usual = half * WEIGHT / max(1, planned)
    return Diagnosis(
        severity="critical",
        summary=f"lr {train.lr:g} is too small for {train.dtype}: the weights that compute do not change",
        evidence=(
            f"{planned:.0f} optimizer steps move a weight by {whole:.2g} at most; in {train.dtype} a weight of "
            f"{WEIGHT:g} changes from {half * WEIGHT:.2g} on, one of {weight:g} from {half * weight:.2g}",
        ),
        fix=f"raise the learning rate: weights of usual size change from --lr {usual:.0e} on",
        key="train.lr",
    )


def weights_unchanged(history: History) -> Diagnosis | None:
    """The ledger's fingerprint of the weights is the same after each of the last steps, though steps were made."""
    marks, count = set(history.fingerprints), sum(history.recent("optimizer_steps"))
    if not history.trains or len(history.fingerprints) < STEPS or len(marks) > 1 or "" in marks or not count:
        return None
    if lr_zero(history):
        return None
    return Diagnosis(
        severity="critical",
        summary=f"{count:.0f} optimizer steps changed no bit of the weights",
        evidence=(f"fingerprint {next(iter(marks))} after each of {history.where()}",),
        fix="raise the learning rate, and see that the model has parameters that train",
        key="train.lr",
    )


def all_masked(history: History) -> Diagnosis | None:
    """The loss mask is 0 at every token in each of the last `STEPS` steps or more: nothing trains."""
    shares = history.recent("train/masked_ratio")
    if not history.trains or len(shares) < STEPS or min(shares) < 1:
        return None
    reward = history.config.reward
    return Diagnosis(
        severity="critical",
        summary="every token is masked: no loss is left",
        evidence=(
            f"train/masked_ratio 1 in {history.where()}",
            f"truncated_ratio {fmean(history.recent('truncated_ratio') or [0.0]):.2g}",
        ),
        fix="all responses are cut off, and mask_truncated leaves them out: raise rollout_max_response_len"
        if reward.mask_truncated
        else "see what sets loss_mask or remove_sample: a plugin, data.loss_mask_type, or stale_policy = mask",
        key="reward.mask_truncated" if reward.mask_truncated else "data.loss_mask_type",
    )


def advantages_cancelled(history: History) -> Diagnosis | None:
    """Rewards differ within groups, and all advantages of the last steps are below `ZERO`."""
    sizes, equal = history.recent("advantages/abs_mean"), history.recent("reward/equal_groups")
    spread = fmean(history.recent("reward/std") or [0.0])
    if history.recent("reward/min") == history.recent("reward/max"):
        return None  # no reward differs
    if not history.rewarded or len(sizes) < STEPS or max(sizes) > ZERO * min(1.0, spread):
        return None
    if equal and fmean(equal) > 0.9:
        return None  # a rule about groups looks at it
    train = history.config.train
    return Diagnosis(
        severity="critical",
        summary="rewards differ and advantages do not: normalisation or a hook cancels them",
        evidence=(
            f"advantages/abs_mean at most {max(sizes):.2g}, reward/std {spread:.3g}, groups with equal rewards "
            f"{fmean(equal or [0.0]):.0%}, in {history.where()}",
            f"advantage_estimator {train.advantage_estimator}, normalize_advantages {train.normalize_advantages}"
            + (f", pass_k {train.pass_k}" if train.advantage_estimator == "pass_at_k" else ""),
        ),
        fix="see what comes between: pass_k as large as the group, one reward far from all others, slime_batch, "
        "custom_advantage_function_path or a post-processed reward",
        key="train.advantage_estimator",
    )


def always_clipped(history: History) -> Diagnosis | None:
    """The gradient norm is `FAR_ABOVE` times clip_grad or more, in each of the last ten steps."""
    norms, limit = history.recent("grad_norm"), history.config.train.clip_grad
    if not history.trains or limit <= 0 or len(norms) < RECENT or min(norms) < FAR_ABOVE * limit:
        return None
    return Diagnosis(
        severity="note",
        summary=f"every step is clipped: the gradient norm is {middle(norms):.3g}, clip_grad {limit:g}",
        evidence=(f"grad_norm {min(norms):.3g} to {max(norms):.3g} in {history.where()}",),
        fix="larger batches or a lower loss scale (loss_aggregation); a norm that keeps growing asks for a lower --lr",
        key="train.clip_grad",
    )


def not_finite(history: History) -> Diagnosis | None:
    """Optimizer steps were skipped because their loss or gradient was not finite."""
    rows = [row for row in history.steps if row["metrics"].get("skipped_steps/nonfinite")]
    if not rows:
        return None
    count = sum(row["metrics"]["skipped_steps/nonfinite"] for row in rows)
    return Diagnosis(
        severity="warning",
        summary=f"{count:.0f} optimizer steps were skipped: their loss or gradient was not finite",
        evidence=(f"first at step {rows[0]['version']}, last at step {rows[-1]['version']}; errors/nonfinite.jsonl",),
        fix="lower --lr; with --dtype bfloat16 try float32",
        key="train.lr",
    )


def _moved(history: History) -> list[Row]:
    """Steps that changed the policy: of others the learning rate is not known."""
    return [row for row in history.steps if row["metrics"].get("optimizer_steps", 0) > 0]


def _planned(history: History) -> float:
    """Optimizer steps of the policy in the whole stage, by those of its steps so far."""
    rows = [row["metrics"] for row in history.steps if "optimizer_steps" in row["metrics"]]
    both = [row for row in rows if not row.get("critic_only_steps")]
    counts = [row["optimizer_steps"] + row.get("skipped_steps", 0) for row in both]
    return fmean(counts) * (history.steps[-1]["of"] - len(rows) + len(both)) if counts else 0.0
