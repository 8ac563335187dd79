"""`slime.observability.metric_utils`: numbers of rewards and texts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

COMPRESSORS = {
    "zlib": zlib.compress,
    "gzip": lambda data, level: gzip.compress(data, compresslevel=level),
    "bz2": lambda data, level: bz2.compress(data, compresslevel=level),
    "lzma": lambda data, level: lzma.compress(data, preset=level),
}


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same values under ``prefix`` and their names."""
    return {f"{prefix}{name}": value for name, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4, ... up to the group's size; empty for groups of one.

    1 - C(n - c, k) / C(n, k) for c rewards of 1 among n, averaged over groups (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: rewards that are not ``num_groups`` whole groups.
    """
    if group_size == 1:
        return {}
    groups = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != groups * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {groups} groups of {group_size}")
    correct = (np.asarray(flat_rewards).reshape(groups, group_size) == 1).sum(axis=1).tolist()
    ks = [2**power for power in range(group_size.bit_length())]
    total = {k: sum(1 - comb(group_size - count, k) / comb(group_size, k) for count in correct) for k in ks}
    return {f"pass@{k}": value / groups for k, value in total.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min."""
    array = np.asarray(values)
    return {name: float(getattr(np, name)(array)) for name in ("mean", "median", "max", "min")}


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Bytes over compressed bytes, and the percentage saved; (inf, 0) of nothing.

    Raises:
        ValueError: another algorithm than zlib, gzip, bz2 and lzma.
    """
    if algorithm not in COMPRESSORS:
        raise ValueError(f"algorithm {algorithm!r} is none of {', '.join(COMPRESSORS)}")
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    size = len(COMPRESSORS[algorithm](raw, level))
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text compress to less than a tenth."""
    return len(text) > 10000 and compression_ratio(text[-10000:])[0] > 10


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """The number that slime's trackers put a rollout at: its own, or that of optimizer steps."""
    if getattr(args, "wandb_always_use_train_step", False):
        return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return rollout_id


__all__ = [
    "compression_ratio",
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
