"""Metrics of a step's groups or batch. Pure functions.

Sums are exact (`math.fsum`), so figures do not depend on the order of samples. A statistic over nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from slime_core.ledger.ledger import dropped_in
from slime_core.types import Batch, Columns, Group, Sample, Status

Metrics = dict[str, float]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Population standard deviation of at least one value."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def spread(name: str, values: Sequence[float]) -> Metrics:
    """``NAME/mean``, ``NAME/min`` and ``NAME/max``; nothing where there are no values."""
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/min": float(min(values)), f"{name}/max": float(max(values))}


def rewards_of(samples: Iterable[Sample]) -> list[float]:
    """The numeric rewards, in order; samples without one are left out."""
    return [float(s.reward) for s in samples if isinstance(s.reward, (int, float))]


def rollout_metrics(
    groups: Sequence[Group], version: int, drops: Mapping[str, int], issued: int, adapters: Sequence[str] = ()
) -> Metrics:
    """Figures of the groups that a step trains on.

    Args:
        groups: what was taken for the step.
        version: of the weights in training; staleness is this minus the oldest weights in a group.
        drops: samples dropped since the last step, by reason.
        issued: groups issued since the last step.
        adapters: names of several, whose figures are ``ADAPTER/FIGURE`` too.
    """
    metrics = _groups_metrics(groups, version) | {
        "rollout/issued_groups": float(issued),
        "rollout/dropped_samples": float(sum(drops.values())),
    }
    metrics |= {f"dropped/{reason}": float(count) for reason, count in sorted(drops.items())}
    for name in adapters if len(adapters) > 1 else ():
        if parts := [part for group in groups if (part := _part(group, name, adapters)).samples]:
            metrics |= _named(name, _groups_metrics(parts, version))
    return metrics


def _named(adapter: str, metrics: Metrics) -> Metrics:
    return {f"{adapter}/{key}": value for key, value in metrics.items()}


def _part(group: Group, adapter: str, adapters: Sequence[str]) -> Group:
    """The group of an adapter's samples; one without a model is of the first adapter."""
    models = [sample.model or adapters[0] for sample in group.samples]
    return group.part([place for place, model in enumerate(models) if model == adapter])


def _groups_metrics(groups: Sequence[Group], version: int) -> Metrics:
    samples = [sample for group in groups for sample in group.samples]
    metrics: Metrics = {
        "rollout/groups": float(len(groups)),
        "rollout/samples": float(len(samples)),
        "tokens/response": float(sum(s.response_length for s in samples)),
        "tokens/trained": float(sum(_trained(s) for s in samples)),
        "tokens/total": float(sum(len(s.tokens) for s in samples)),
    }
    if not samples:
        return metrics
    metrics |= sample_metrics(samples)
    metrics |= _by("task", samples) | _by("role", samples)
    equal = [len(set(rewards)) <= 1 for group in groups if len(rewards := rewards_of(group.samples)) > 1]
    if equal:
        metrics["reward/equal_groups"] = mean(equal)
    metrics |= spread("staleness", [float(version - group.lowest_version(version)) for group in groups])
    return metrics


def ledger_metrics(counts: Mapping[str, int]) -> Metrics:
    """The conservation law of a ledger's counts: ``ledger/issued`` = trained + dropped + pending, all so far."""
    counts_now = {name: counts[name] for name in ("issued", "trained", "pending")} | {"dropped": dropped_in(counts)}
    return {f"ledger/{name}": float(count) for name, count in counts_now.items()}


def evaluation_metrics(groups: Sequence[Group]) -> Metrics:
    """Figures of one evaluation set; ``reward/best`` is the mean over prompts of their best sample.

    A sample without a reward (the reward function could not judge) counts in ``infra_errors`` and nowhere else.
    """
    samples = [sample for group in groups for sample in group.samples]
    judged = [sample for sample in samples if isinstance(sample.reward, (int, float))]
    metrics: Metrics = {
        "prompts": float(len(groups)),
        "samples": float(len(samples)),
        "infra_errors": float(len(samples) - len(judged)),
    }
    if judged:
        metrics |= sample_metrics(judged) | _by("role", judged) | _by("model", judged)
        metrics["reward/best"] = mean([max(rewards) for group in groups if (rewards := rewards_of(group.samples))])
    return metrics


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Rewards, their terms, lengths and how samples ended; at least one sample."""
    metrics: Metrics = {}
    rewards = rewards_of(samples)
    if raw := [float(s.metadata["raw_reward"]) for s in samples if "raw_reward" in s.metadata]:
        metrics["raw_reward/mean"] = mean(raw)
    if rewards:
        metrics |= spread("reward", rewards) | {"reward/std": std(rewards)}
    figures: dict[str, list[float]] = {}
    for sample in samples:
        for prefix, key in (("reward/", "reward_terms"), ("", "metrics")):
            values = sample.metadata.get(key)
            for name, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Real):  # a row's own metadata may be anything
                    figures.setdefault(f"{prefix}{name}/mean", []).append(float(value))
    metrics |= {name: mean(values) for name, values in sorted(figures.items())}
    metrics |= spread("response_len", [float(s.response_length) for s in samples])
    metrics |= spread("prompt_len", [float(s.prompt_length) for s in samples])
    metrics["truncated_ratio"] = mean([s.status is Status.TRUNCATED for s in samples])
    metrics["failed_ratio"] = mean([s.metadata.get("reward_kind") == "failed" for s in samples])
    if log_probs := list(chain.from_iterable(map(_trained_log_probs, samples))):
        metrics["rollout/log_probs"] = mean(log_probs)
    return metrics


def batch_metrics(batch: Batch, adapters: Sequence[str] = ()) -> Metrics:
    """Figures of a step's columns, over trained tokens: advantages, and how far trainer and engine stand apart.

    ``opd_reverse_kl`` is the mean of ``policy - teacher``, the student's reverse KL to its teacher a token;
    ``train_rollout_logprob_abs_diff`` is the mean of ``|policy - rollout_log_probs|`` where the batch has both.
    With several ``adapters`` those of each one's samples are ``ADAPTER/FIGURE``.
    """
    metrics = _columns_metrics(batch.columns, batch.loss_mask > 0)
    if len(adapters) > 1:
        model_of = np.array([model or adapters[0] for model in batch.models or [""] * len(batch)])
        for name in adapters:
            if (rows := (model_of == name)[batch.sample_of_token()]).any():
                columns = {key: values[rows] for key, values in batch.columns.items()}
                metrics |= _named(name, _columns_metrics(columns, batch.loss_mask[rows] > 0))
    return metrics


def _columns_metrics(columns: Columns, trained: NDArray[np.bool_]) -> Metrics:
    metrics: Metrics = {"train/masked_ratio": 1.0 - float(trained.mean()) if trained.size else 0.0}
    if not trained.any():
        return metrics
    if "advantages" in columns:
        values = np.asarray(columns["advantages"], dtype=np.float64)[trained]
        metrics |= {
            "advantages/mean": float(values.mean()),
            "advantages/abs_mean": float(np.abs(values).mean()),
            "advantages/min": float(values.min()),
            "advantages/max": float(values.max()),
        }
    if "policy" not in columns:
        return metrics
    policy = np.asarray(columns["policy"], dtype=np.float64)[trained]
    for teacher in {"teacher", "teacher_log_probs"} & set(columns):
        metrics["opd_reverse_kl"] = float((policy - np.asarray(columns[teacher], dtype=np.float64)[trained]).mean())
    if "rollout_log_probs" in columns and columns["rollout_log_probs"].any():  # replies of the data have zeros
        apart = np.abs(policy - np.asarray(columns["rollout_log_probs"], dtype=np.float64)[trained])
        metrics["train_rollout_logprob_abs_diff"] = float(apart.mean())
        metrics["train_rollout_logprob_abs_diff/max"] = float(apart.max())
    return metrics


def _by(field: str, samples: Sequence[Sample]) -> Metrics:
    """``FIELD/NAME/reward`` by task, role or model, where there are several of that field."""
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(getattr(sample, field), []).extend(rewards_of([sample]))
    means = {name: mean(rewards[name]) for name in sorted(rewards) if rewards[name] and len(rewards) > 1}
    return {f"{field}/{name}/reward": value for name, value in means.items()}


def _trained(sample: Sample) -> int:
    if sample.remove_sample:
        return 0
    return sample.response_length if sample.loss_mask is None else sum(sample.loss_mask)


def _trained_log_probs(sample: Sample) -> Iterable[float]:
    log_probs, mask = sample.rollout_log_probs, sample.loss_mask
    if log_probs is None:
        return ()
    return log_probs if mask is None else compress(log_probs, mask)
