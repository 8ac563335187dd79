"""Folders of dumped rollouts, for `slime show` and `slime plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.errors import DataError, StorageError
from slime_core.rollout.dump import EVALUATION, STEP, SUFFIX, read_dump, read_dump_with_header
from slime_core.types import Prompt


def dumps_of(folder: Path) -> list[dict[str, Any]]:
    """One row a file, in order: ``file kind version stage groups samples tokens reward``; reward is the mean or None.

    Raises:
        StorageError: as :func:`read_dump`; STO111 the folder holds no dump.
    """
    files = sorted(p for p in folder.glob(f"*{SUFFIX}") if STEP.fullmatch(p.name) or EVALUATION.fullmatch(p.name))
    if not files:
        raise StorageError(
            "the folder holds no dump of rollouts",
            code="STO111",
            where=str(folder),
            why=f"its files are called step-000001{SUFFIX}",
            fix="a run writes them with --save-debug-rollout-data DIR",
        )
    rows = []
    for path in files:
        groups, about = read_dump_with_header(path)
        samples = [sample for group in groups for sample in group.samples]
        rewards = [float(s.reward) for s in samples if isinstance(s.reward, (int, float))]
        rows.append(
            {
                "file": path.name,
                "kind": f"eval {about.set}" if about.set else "step",
                "version": about.version,
                "stage": about.stage,
                "groups": len(groups),
                "samples": len(samples),
                "tokens": sum(len(sample.tokens) for sample in samples),
                "reward": sum(rewards) / len(rewards) if rewards else None,
            }
        )
    return sorted(rows, key=lambda row: (row["version"], row["kind"]))


def first_prompt(folder: Path) -> Prompt:
    """The first prompt of a dump's first step.

    Raises:
        DataError: DAT28, the folder holds no step, or an empty one.
        StorageError: as :func:`read_dump`.
    """
    steps = sorted(path for path in folder.glob(f"*{SUFFIX}") if STEP.fullmatch(path.name))
    groups = read_dump(steps[0]) if steps else []
    if not groups:
        raise DataError("the dump holds no step", code="DAT28", where=str(folder), fix="--load-debug-rollout-data DIR")
    return groups[0].prompt
