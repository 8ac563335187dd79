"""`slime.observability.rollout_metrics`: figures of a rollout's samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime_compat.served.loading import group_by
from slime_compat.served.measures import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from slime_compat.served.tracking import log
from slime_core.compat.sample import Sample
from slime_core.types import Status

Figures = dict[str, Any]


def compute_metrics_from_samples(args: Any, samples: Sequence[Sample]) -> Figures:
    """Response lengths, groups whose rewards tie, reward categories, cached tokens, repetition and truncation."""
    count = len(samples)
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompts = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    return {
        **dict_add_prefix(
            compute_statistics([sample.effective_response_length for sample in samples]), "response_len/"
        ),
        **_ties(args, samples),
        **_categories(args, samples),
        "prefix_cache_hit_rate": cached / prompts if prompts else 0.0,
        "avg_cached_tokens_per_sample": cached / count,
        "repetition_frac": sum(has_repetition(sample.response) for sample in samples) / count,
        "truncated_ratio": sum(sample.status is Status.TRUNCATED for sample in samples) / count,
    }


def _ties(args: Any, samples: Sequence[Sample]) -> Figures:
    if args.advantage_estimator == "ppo":
        return {}
    rewards = [[s.get_reward_value(args) for s in group] for group in group_by(samples, _group).values()]
    ties = Counter(round(values[0], 1) for values in rewards if len(set(values)) == 1)
    return {f"zero_std/count_{reward}": count for reward, count in ties.items()}


def _group(sample: Sample) -> int | None:
    return sample.group_index


def _categories(args: Any, samples: Sequence[Sample]) -> Figures:
    key = getattr(args, "log_reward_category", None)
    if key is None:
        return {}
    names = Counter(sample.reward[key] for sample in samples)  # type: ignore[index]
    return {f"error_cat/{name}": count / len(samples) for name, count in names.items()}


def compute_perf_metrics_from_samples(args: Any, samples: Sequence[Sample], rollout_time: float) -> Figures:
    """Tokens a second of a rollout of ``rollout_time`` seconds, of all tokens and of those that train."""
    waits = [sample.non_generation_time for sample in samples]
    figures: Figures = {"rollout_time": rollout_time}
    if any(waits):
        figures |= dict_add_prefix(compute_statistics(waits), "non_generation_time/")
    lengths = {"": [sample.response_length for sample in samples]}
    lengths["effective_"] = [sample.effective_response_length for sample in samples]
    for key, counts in lengths.items():
        if gpus := getattr(args, "rollout_num_gpus", None):
            figures[f"{key}tokens_per_gpu_per_sec"] = sum(counts) / rollout_time / gpus
        longest = max(counts)
        figures[f"longest_{key}sample_tokens_per_sec"] = longest / rollout_time
        if any(waits):
            of_longest = [wait for wait, count in zip(waits, counts, strict=True) if count == longest]
            wait = sum(of_longest) / len(of_longest)
            figures[f"longest_{key}sample_non_generation_time"] = wait
            figures[f"longest_{key}sample_tokens_per_sec_without_non_generation"] = longest / (rollout_time - wait)
    return figures


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: Sequence[Sample],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> None:
    """Log a rollout's figures under ``rollout/`` and ``perf/``."""
    figures = {
        **(rollout_extra_metrics or {}),
        **dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/"),
        **dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/"),
        "rollout/step": compute_rollout_step(args, rollout_id),
    }
    log(args, figures, step_key="rollout/step")


def log_eval_rollout_data(
    rollout_id: int, args: Any, data: Mapping[str, Mapping[str, Any]], extra_metrics: Mapping[str, Any] | None = None
) -> Figures:
    """Log an evaluation's figures under ``eval/``, and return them."""
    figures = dict(extra_metrics or {})
    for name, outcome in data.items():
        rewards = outcome["rewards"]
        figures[f"eval/{name}"] = sum(rewards) / len(rewards)
        if outcome.get("samples") is not None:
            figures |= dict_add_prefix(compute_metrics_from_samples(args, outcome["samples"]), f"eval/{name}/")
        if "truncated" in outcome:
            figures[f"eval/{name}-truncated_ratio"] = sum(outcome["truncated"]) / len(outcome["truncated"])
        if getattr(args, "log_passrate", False):
            rates = compute_pass_rate(rewards, args.n_samples_per_eval_prompt)
            figures |= dict_add_prefix(rates, f"eval/{name}-")
    figures["eval/step"] = compute_rollout_step(args, rollout_id)
    log(args, figures, step_key="eval/step")
    return figures


__all__ = [
    "compute_metrics_from_samples",
    "compute_perf_metrics_from_samples",
    "log_eval_rollout_data",
    "log_rollout_data",
]
