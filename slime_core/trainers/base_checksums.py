"""The base of a LoRA run never changes: checksums of its tensors from the start, compared at every checkpoint.

    begin: sums   save: the same again, else TRN116 -> trainer/base.json   restore: those of base.json, else TRN116

Sums are those of `fingerprint`, of values in float32, whatever a tensor is stored in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.errors import StorageError, TrainerError
from slime_core.trainers.fingerprint import all_sums

FILE = "base.json"
SAME_FOLDER = "resume from the last checkpoint, with the model folder that the run started from"
CHUNK = 1 << 24  # elements that are float32 at once
SHOWN = 3
Sums = dict[str, list[int]]
"""Both sums of each tensor, by name."""


@torch.no_grad()
def sums_of(runs: Mapping[str, tuple[torch.Tensor, int]], world: int) -> Sums:
    """Sums of tensors by name, of each of which this rank has rows, with the element that is their first.

    No rows stand for a tensor that counts on another rank. A collective, with the same answer on every rank.
    """
    names = sorted(runs)
    totals = torch.zeros(len(names), 2, dtype=torch.int64, device=next(iter(runs.values()))[0].device)
    waiting: list[tuple[int, torch.Tensor, int]] = []  # the tensor, some of its rows, their first element
    for number, name in enumerate(names):
        rows, start = runs[name]
        rows = rows if rows.ndim else rows.reshape(1)
        width = rows.shape[1:].numel()
        step = max(1, CHUNK // max(1, width))
        for first in range(0, len(rows), step):
            waiting.append((number, rows[first : first + step].float().contiguous(), start + first * width))
            if sum(part.numel() for _, part, _ in waiting) >= CHUNK:
                _add(totals, waiting)
    _add(totals, waiting)
    if world > 1:
        dist.all_reduce(totals)
    return dict(zip(names, totals.tolist(), strict=True))


def _add(totals: torch.Tensor, waiting: list[tuple[int, torch.Tensor, int]]) -> None:
    """Add the sums of what waits, and forget it."""
    if waiting:
        numbers = torch.tensor([number for number, _, _ in waiting], device=totals.device)
        sums = all_sums([(part, start) for _, part, start in waiting])
        totals.index_add_(0, numbers, sums.to(totals.device))
    waiting.clear()


class BaseChecksums:
    """The sums from the start of a run, where adapters have a base; ``measure`` gives them as they are now."""

    def __init__(self, measure: Callable[[], Sums]) -> None:
        self._measure = measure
        self._is_begun = False
        self.checked = False  # since the last step, or the start
        self.sums: Sums = {}

    def begin(self) -> None:
        """Take the sums, the first time; a collective."""
        if not self._is_begun:
            self.sums, self._is_begun, self.checked = self._measure(), True, True

    def check(self, where: str) -> None:
        """Refuse a base that changed; a collective.

        Raises:
            TrainerError: TRN116 with the first tensors that did.
        """
        if self.sums and not self.checked:
            compare(self.sums, self._measure(), where)
            self.checked = True


def compare_saved(path: Path, state: Mapping[str, Any], worker: Any, older: Mapping[str, list[int]] = {}) -> None:
    """Refuse a worker's base where it is not that of a checkpoint.

    Args:
        path: of the trainer's files
        state: that the trainer stored beside them; older ones do not say base_weights
        older: sums that are as good as those of the worker's base

    Raises:
        TrainerError: TRN116. StorageError: STO112.
    """
    values = {key: (state.get(key), getattr(worker.train, key)) for key in ("dtype", "base_weights")}
    changed = {key: pair for key, pair in values.items() if pair[0] not in (None, pair[1])}
    reason = "".join(f"{key} was {was} and is {now}; " for key, (was, now) in changed.items())
    fix = " ".join(f"--{key.replace('_', '-')} {was}" for key, (was, _) in changed.items())
    saved = read(path)
    now = worker.base.sums | {name: sums for name, sums in older.items() if saved.get(name) == sums}
    compare(saved, now, str(worker.folder.path), fix or SAME_FOLDER, reason)


def compare(was: Sums, now: Sums, where: str, fix: str = SAME_FOLDER, reason: str = "") -> None:
    """Refuse a base that is not what it was.

    Args:
        reason: what is known of it, before the names of tensors

    Raises:
        TrainerError: TRN116 with the first tensors that differ.
    """
    names = [name for name in dict.fromkeys((*was, *now)) if was.get(name) != now.get(name)]
    if names:
        raise TrainerError(
            f"{len(names)} of {len(was)} tensors of the base model are not what the run started with",
            code="TRN116",
            where=where,
            why=f"{reason}{', '.join(names[:SHOWN])}: "
            "adapters are of the base that they were trained on, which never changes",
            fix=fix,
        )


def text(sums: Sums) -> bytes:
    """The content of base.json."""
    return (json.dumps(sums, indent=1, sort_keys=True) + "\n").encode()


def read(folder: Path) -> Sums:
    """The sums in a checkpoint.

    Raises:
        StorageError: STO112.
    """
    try:
        sums: Sums = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{FILE} cannot be read", code="STO112", where=str(folder), why=str(error)) from error
    return sums
