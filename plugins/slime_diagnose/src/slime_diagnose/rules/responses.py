"""Rules about responses: how they end and how long they are."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from slime_diagnose.diagnosis import Diagnosis
from slime_diagnose.history import History
from slime_diagnose.rules.policy import SOLVED
from slime_diagnose.trends import Course, course_of

STEPS = 3
NEVER = 0.98
"""Share of truncated responses from which no response ends by itself, but for an accident."""
MANY = 0.25
"""Share of truncated responses that costs learning: their answer is never seen, and length is punished by
chance. verl has it as response_length/clip_ratio; TRL's as completions/clipped_ratio."""
LONGER = 1.5
"""Growth of lengths without reward that is worth a word. Liu et al. 2025 (Dr. GRPO) show it for wrong
responses, whose loss is smaller a token the longer they are."""
SHRUNK = 0.25
"""Share of its first length to which responses fall when the model stops working things out."""


def never_stops(history: History) -> Diagnosis | None:
    """At least `NEVER` of the responses are cut off at the length limit, in each of the last `STEPS` steps or more.

    A note where the reward rises all the same, or is high. The usual reasons: the prompt lacks the chat template of an
    instruct model, the engine does not know its end token, or the limit is far too low.
    """
    shares = history.recent("truncated_ratio")
    if not history.online or len(shares) < STEPS or min(shares) < NEVER:
        return None
    rollout, model = history.config.rollout, model_facts(history.config.rollout.hf_checkpoint)
    template = bool(model.get("chat_template")) and not history.config.data.apply_chat_template
    evidence = [
        f"truncated_ratio {min(shares):.3g} or more in {history.where()}; "
        f"limit {rollout.rollout_max_response_len} tokens"
    ]
    if model:
        evidence.append(
            f"end tokens of the model {model['eos']}, of the tokenizer {model['eos_token']}; rollout_stop "
            f"{list(rollout.rollout_stop)}, rollout_stop_token_ids {list(rollout.rollout_stop_token_ids)}"
        )
    if template:
        evidence.append("the model folder has a chat template, and data.apply_chat_template is false")
        fix, key = "render prompts with the chat template: --apply-chat-template", "data.apply_chat_template"
    else:
        fix, key = (
            "raise rollout_max_response_len; if responses ramble past their answer, name what ends one "
            "(rollout_stop, rollout_stop_token_ids), or begin with a model that was taught to end",
            "rollout.rollout_max_response_len",
        )
    return Diagnosis(
        severity="note" if _learns(history) else "critical",
        summary=f"responses never stop: {fmean(shares):.0%} run into the length limit",
        evidence=tuple(evidence),
        fix=fix,
        key=key,
    )


def truncated(history: History) -> Diagnosis | None:
    """More than `MANY` of the last steps' responses are cut off at the length limit, and not all."""
    shares = history.recent("truncated_ratio")
    if not history.online or len(shares) < STEPS or fmean(shares) < MANY or min(shares) >= NEVER:
        return None
    judged = [row for row in history.samples_of(history.steps[-10:]) if isinstance(row["reward"], int | float)]
    ends = {
        status: [row["reward"] for row in judged if (row["status"] == "truncated") == (status == "truncated")]
        for status in ("truncated", "completed")
    }
    lines = [f"mean reward of {status} samples in samples.jsonl: {fmean(r):.3g}" for status, r in ends.items() if r]
    return Diagnosis(
        severity="warning",
        summary=f"{fmean(shares):.0%} of the responses are cut off at the length limit",
        evidence=(
            f"truncated_ratio {fmean(shares):.3g} in {history.where()}; limit "
            f"{history.config.rollout.rollout_max_response_len} tokens, mean length "
            f"{fmean(history.recent('response_len/mean') or [0.0]):.0f}",
            *lines,
        ),
        fix="raise rollout_max_response_len, or --mask-truncated so that cut-off responses do not train",
        key="rollout.rollout_max_response_len",
    )


def length_bias(history: History) -> Diagnosis | None:
    """Lengths grow by half or more beyond noise, and the reward does not: tokens are spent for nothing."""
    lengths, rewards = _courses(history)
    if lengths is None or rewards is None or rewards.up or not lengths.up or lengths.late < LONGER * lengths.early:
        return None
    train = history.config.train
    biased = train.loss_aggregation == "rollout_mean"
    return Diagnosis(
        severity="warning",
        summary=f"responses grow by {lengths.late / lengths.early - 1:.0%} and the reward does not",
        evidence=(
            f"response_len/mean {lengths}",
            f"reward/mean {rewards}",
            f"loss_aggregation {train.loss_aggregation}",
        ),
        fix="the mean of a response's tokens lets long wrong responses off lightly: --loss-aggregation constant and "
        "--disable-grpo-std-normalization (Dr. GRPO)"
        if biased
        else "penalise the last tokens before the limit: --overlong-buffer-len",
        key="train.loss_aggregation" if biased else "reward.overlong_buffer_len",
    )


def length_collapses(history: History) -> Diagnosis | None:
    """Lengths fall to a quarter or less, and the reward does not rise: the model stops working things out."""
    lengths, rewards = _courses(history)
    if lengths is None or rewards is None or rewards.up or not lengths.down or lengths.late > SHRUNK * lengths.early:
        return None
    return Diagnosis(
        severity="warning",
        summary=f"responses shrink to {lengths.late / lengths.early:.0%} of their length and the reward does not rise",
        evidence=(f"response_len/mean {lengths}", f"reward/mean {rewards}"),
        fix="see that the reward, a penalty of length or a format does not favour an empty answer; a KL term "
        "(--kl-loss-coef) holds the model near its start",
        key="train.kl_loss_coef",
    )


def model_facts(folder: str) -> dict[str, Any]:
    """End tokens and chat template of a model folder; empty where it is not a folder here."""
    path = Path(folder)
    if not folder or not path.is_dir():
        return {}
    config, generation, tokenizer = (
        _read(path / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    end = tokenizer.get("eos_token")
    return {
        "eos": generation.get("eos_token_id", config.get("eos_token_id")),
        "eos_token": end.get("content") if isinstance(end, dict) else end,
        "chat_template": "chat_template" in tokenizer or (path / "chat_template.jinja").is_file(),
    }


def _courses(history: History) -> tuple[Course | None, Course | None]:
    if not history.rewarded:
        return None, None
    return course_of(history.values("response_len/mean")), course_of(history.values("reward/mean"))


def _learns(history: History) -> bool:
    """Whether the reward rises, or is near the highest so far."""
    (low, high), (_, rewards) = history.reward_range, _courses(history)
    late = history.recent("reward/mean")
    solved = high > low and bool(late) and fmean(late) - low > SOLVED * (high - low)
    return history.rewarded and (solved or (rewards is not None and rewards.up))


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}
