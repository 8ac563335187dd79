"""Rules about rewards: a grader that never matches, groups that teach nothing, rewards that fall."""

from __future__ import annotations

import re
from statistics import fmean

from slime_diagnose.diagnosis import Diagnosis
from slime_diagnose.history import History, Row
from slime_diagnose.rules.responses import model_facts
from slime_diagnose.texts import has_label, shown
from slime_diagnose.trends import SURE, course_of, middle, moving

STEPS = 3
"""Steps in a row that a plain fact must hold for."""
EQUAL = 0.9
"""Share of groups with equal rewards from which a step teaches next to nothing: a tenth of the batch is left.
Yu et al. 2025 (DAPO, dynamic sampling) drop such groups; late in a run that learns they are half of all."""
FEW = 64
"""Samples without any reward that tell a grader that never matches from a hard task: at 5 % right, 64 wrong ones in a
row have a chance of 4 %."""
WASTED = {"infra_error": 0.1, "equal_rewards": 0.8}
"""Share of samples dropped for a reason from which it is worth a word; `ELSE` for others. A tenth that could not be
judged is a broken service; dynamic sampling drops half by design, four fifths make a step five times as long."""
ELSE = 0.5
INTENDED = ("over_sampled", "debug_rollout_only")
"""Reasons that the config asks for."""
TINY = 0.01
"""Spread of rewards in a group, relative to the spread of all, that a division by its std blows up a hundred times;
Liu et al. 2025 (Dr. GRPO) describe the bias."""
CUT_OFF = 0.8
"""Share of truncated responses that explains why none is right; below, a fifth ended and was wrong."""
ACCURACY = re.compile(r"correct|accura|answer|exact|match|solved|verif|^acc$", re.I)
"""Names of terms that judge an answer, as graders of TRL, open-r1 and verl call them."""


def grader_never_matches(history: History) -> Diagnosis | None:
    """All samples of the stage have one reward of 0 or less, though they have labels.

    Holds for `STEPS` steps and `FEW` samples; fewer where the labels do stand in the responses. TRL's issue 3903 and
    open-r1's 255 are of this kind.
    """
    low, high = history.reward_range
    rows = labelled(history)
    if not history.rewarded or low != high or high > 0 or not rows or len(history.values("reward/max")) < STEPS:
        return None
    matches = [row for row in rows if has_label(row["response"], label_of(row))]
    if len(matches) * 2 < len(rows) and sum(history.values("rollout/samples")) < FEW:
        return None
    return Diagnosis(
        severity="critical",
        summary=f"no sample has earned a reward: all of {sum(history.values('rollout/samples')):.0f} have {low:g}",
        evidence=beside_labels(rows),
        **reason(history, rows, matches),
    )


def term_never_matches(history: History) -> Diagnosis | None:
    """A term that judges the answer is 0 throughout, while another part of the reward varies.

    Holds for `FEW` samples at least. The model then learns the format and nothing else (TRL's issue 3903).
    """
    low, high = history.reward_range
    if not history.rewarded or low == high or sum(history.values("rollout/samples")) < FEW:
        return None
    for name in history.terms:
        values = history.values(f"reward/{name}/mean")
        if ACCURACY.search(name) and len(values) >= STEPS and min(values) == max(values) <= 0:
            rows = labelled(history)
            matches = [row for row in rows if has_label(row["response"], label_of(row))]
            return Diagnosis(
                severity="warning",
                summary=f"the reward term '{name}' is {values[0]:g} for every sample; only other terms are learnt",
                evidence=beside_labels(rows),
                **reason(history, rows, matches),
            )
    return None


def reward_constant(history: History) -> Diagnosis | None:
    """All samples of the stage have one reward, for `STEPS` steps and `FEW` samples: none is better than another."""
    low, high = history.reward_range
    if not history.rewarded or low != high or len(history.values("reward/max")) < STEPS:
        return None
    if sum(history.values("rollout/samples")) < FEW or (high <= 0 and labelled(history)):
        return None  # with labels, grader_never_matches looks at it
    return Diagnosis(
        severity="critical",
        summary=f"every sample of all {len(history.steps)} steps has the reward {low:g}",
        evidence=(f"reward/min = reward/max = {low:g} in {history.where(len(history.steps))}",),
        fix="see that the reward depends on the response, and is not a default where an answer or a label cannot be "
        "parsed; if the task is solved already, take harder prompts",
        key="reward.custom_rm_path" if history.config.reward.custom_rm_path else "reward.rm_type",
    )


def groups_too_hard(history: History) -> Diagnosis | None:
    """At least `EQUAL` of the groups have equal rewards, and the mean lies in the lowest tenth of all rewards."""
    place = _place_of_equal(history)
    if place is None or place > 0.1:
        return None
    return Diagnosis(
        severity="warning",
        summary=f"the task is too hard: in {_equal(history):.0%} of the groups no sample is better than another",
        evidence=_equal_evidence(history),
        fix="take easier prompts or a supervised warm-up, or more samples a prompt (n_samples_per_prompt 16 to 64); "
        "--dynamic-sampling equal_rewards trains on the groups that differ",
        key="rollout.n_samples_per_prompt",
    )


def groups_too_easy(history: History) -> Diagnosis | None:
    """At least `EQUAL` of the groups have equal rewards, and the mean lies in the highest tenth: it is saturated."""
    place = _place_of_equal(history)
    if place is None or place < 0.9:
        return None
    return Diagnosis(
        severity="note",
        summary=f"the reward is saturated: in {_equal(history):.0%} of the groups all samples are equally good",
        evidence=_equal_evidence(history),
        fix="stop here, or take harder prompts; --dynamic-sampling equal_rewards trains on the groups that differ",
        key="rollout.dynamic_sampling",
    )


def groups_equal(history: History) -> Diagnosis | None:
    """At least `EQUAL` of the groups have equal rewards, though prompts differ: samples of a prompt hardly do."""
    place = _place_of_equal(history)
    if place is None or not 0.1 < place < 0.9:
        return None
    rollout = history.config.rollout
    narrow = rollout.rollout_temperature < 0.7 or rollout.rollout_top_k > 0 or rollout.rollout_top_p < 0.9
    draws = (
        f"temperature {rollout.rollout_temperature:g}, top_p {rollout.rollout_top_p:g}, top_k {rollout.rollout_top_k}"
    )
    return Diagnosis(
        severity="warning",
        summary=f"in {_equal(history):.0%} of the groups all samples have one reward, good or bad by prompt",
        evidence=(*_equal_evidence(history), f"drawn with {draws}"),
        fix="draw more freely: --rollout-temperature 1 --rollout-top-p 1 --rollout-top-k 0"
        if narrow
        else "draw more samples a prompt, or see that the reward depends on the response and not on the prompt alone",
        key="rollout.rollout_temperature" if narrow else "rollout.n_samples_per_prompt",
    )


def samples_dropped(history: History) -> Diagnosis | None:
    """A share of the last steps' samples above `WASTED` was dropped for one reason, which is none of `INTENDED`.

    Dynamic sampling that never fills a batch is asked about in verl's issue 953.
    """
    rows = history.steps[-10:]
    trained = sum(history.recent("rollout/samples"))
    names = {name for row in rows for name in row["metrics"] if name.startswith("dropped/")}
    counts = {name.partition("/")[2]: sum(history.recent(name)) for name in names}
    counts = {reason: count for reason, count in counts.items() if reason not in INTENDED}
    if not counts or not trained or len(rows) < STEPS:
        return None
    reason, count = max(counts.items(), key=lambda item: item[1])
    share = count / (trained + sum(counts.values()))
    if share < WASTED.get(reason, ELSE):
        return None
    fixes = {
        "equal_rewards": (
            "take prompts that the model solves sometimes, or draw more samples a prompt",
            "data.prompt_data",
        ),
        "infra_error": ("see log/run.log for the reason, and repair the service that judges", "reward.reward_timeout"),
        "stale": ("generate less far ahead", "rollout.max_staleness"),
    }
    fix, key = fixes.get(reason, (f"see what drops samples with the reason '{reason}'", ""))
    return Diagnosis(
        severity="warning",
        summary=f"{share:.0%} of the samples were dropped: {reason}",
        evidence=(f"{count:.0f} of {trained + sum(counts.values()):.0f} samples in {history.where()}",),
        fix=fix,
        key=key,
    )


def reward_collapses(history: History) -> Diagnosis | None:
    """The mean reward has lost more than half of its best, above the lowest reward, and more than noise explains.

    Means of 5 steps are compared. Held-out figures near their best say that prompts got harder, as in a curriculum.
    Runs that break after a good start are in open-r1's issue 257 and verl's 2626.
    """
    values = history.values("reward/mean")
    course = course_of(values)
    if not history.rewarded or course is None:
        return None
    means = moving(values)
    best, last = max(means), means[-1]
    low = history.reward_range[0]
    noise = course.error * (course.steps // 5 / 5) ** 0.5
    if best - last <= max(0.5 * (best - low), SURE * noise):
        return None
    if _heldout_holds(history):
        return None
    at = means.index(best)
    return Diagnosis(
        severity="critical",
        summary=f"the reward collapsed: {best:.3g} at its best, {last:.3g} now",
        evidence=(
            f"mean of 5 steps: {best:.4g} from step {history.steps[at]['version']}, {last:.4g} in {history.where(5)}",
            *(
                f"{name}: {one}"
                for name in ("grad_norm", "entropy", "kl_loss", "train_rollout_logprob_abs_diff", "response_len/mean")
                if (one := course_of(history.values(name))) is not None
            ),
        ),
        fix="go back to a checkpoint from before (slime run --resume) with a lower learning rate, or a KL term",
        key="train.lr",
    )


def noise_amplified(history: History) -> Diagnosis | None:
    """Rewards of most groups differ by less than `TINY` of the range of all, and advantages divide by their std.

    Differences without meaning then train as hard as real ones.
    """
    train, groups = history.config.train, [group for group in history.groups if len(group) > 1]
    divides = train.algorithm is not None and "disable_grpo_std_normalization" in train.algorithm.options
    if not history.grouped or not divides or train.disable_grpo_std_normalization or len(groups) < 8:
        return None
    spreads = [max(s.reward for s in group) - min(s.reward for s in group) for group in groups]
    rewards = [sample.reward for group in groups for sample in group]
    spread, whole = middle([value for value in spreads if value > 0]), max(rewards) - min(rewards)
    if not 0 < spread < TINY * whole:
        return None
    return Diagnosis(
        severity="note",
        summary=f"rewards differ by {spread:.2g} in a group, by {whole:.2g} in all: std blows up tiny differences",
        evidence=(f"median spread of a group {spread:.3g}, range of all rewards {whole:.3g}, in {history.where()}",),
        fix="--disable-grpo-std-normalization, or round the reward to differences that mean something",
        key="train.disable_grpo_std_normalization",
    )


def labelled(history: History) -> list[Row]:
    """Samples of the last steps that have a label."""
    return [row for row in history.samples_of(history.steps[-10:]) if label_of(row)]


def label_of(row: Row) -> str:
    """A sample's label; empty where it has none."""
    label = str(row.get("label", ""))
    return "" if label in ("null", '""', "{}", "[]") else label


def beside_labels(rows: list[Row], count: int = 3) -> tuple[str, ...]:
    """Responses beside their labels, of different prompts."""
    by_prompt = {row["prompt"]: row for row in rows}
    return tuple(
        f"{row['id']}: label {shown(label_of(row))}, reward {row['reward']:g}, response {shown(row['response'])}"
        for row in list(by_prompt.values())[:count]
    )


def reason(history: History, rows: list[Row], matches: list[Row]) -> dict[str, str]:
    """The fix and the key for answers that were never right, by what the responses show."""
    config = history.config
    reward_key = "reward.custom_rm_path" if config.reward.custom_rm_path else "reward.rm_type"
    if rows and len(matches) * 2 >= len(rows):
        return {
            "fix": f"the label stands in {len(matches)} of {len(rows)} responses: the grader's extractor or "
            "the format it expects is the reason; tell the prompt the format, or choose another grader",
            "key": reward_key,
        }
    if fmean(history.recent("truncated_ratio") or [0.0]) > CUT_OFF:
        return {
            "fix": "most responses are cut off before an answer: raise rollout_max_response_len",
            "key": "rollout.rollout_max_response_len",
        }
    model = model_facts(config.rollout.hf_checkpoint)
    if model.get("chat_template") and not config.data.apply_chat_template:
        return {
            "fix": f"the label stands in {len(matches)} of {len(rows)} responses, and the model's chat template is "
            "not applied: --apply-chat-template, then see whether the grader finds the answer",
            "key": "data.apply_chat_template",
        }
    return {
        "fix": f"the label stands in {len(matches)} of {len(rows)} responses: the model does not know them (take "
        "easier prompts, or a supervised warm-up), or label_key names the wrong column",
        "key": "data.label_key",
    }


def _heldout_holds(history: History) -> bool:
    """Whether there are held-out sets, evaluated after the best step too, and all are near their best."""
    figures: dict[str, list[float]] = {}
    for row in history.evaluations:
        figures.setdefault(row["name"], []).append(row["metrics"].get("reward/mean") or 0.0)
    several = [values for values in figures.values() if len(values) > 2]
    return bool(several) and all(values[-1] >= 0.9 * max(values) for values in several)


def _equal(history: History) -> float:
    return fmean(history.recent("reward/equal_groups"))


def _equal_evidence(history: History) -> tuple[str, ...]:
    low, high = history.reward_range
    return (
        f"reward/equal_groups {_equal(history):.3g}, reward/mean {fmean(history.recent('reward/mean')):.4g} "
        f"(rewards lie in {low:g} to {high:g}), in {history.where()}",
    )


def _place_of_equal(history: History) -> float | None:
    """Where the mean reward lies between the lowest (0) and the highest (1); None unless groups are equal."""
    low, high = history.reward_range
    shares = history.recent("reward/equal_groups")
    if not history.grouped or low == high or len(shares) < STEPS or fmean(shares) < EQUAL:
        return None
    return (fmean(history.recent("reward/mean")) - low) / (high - low)
