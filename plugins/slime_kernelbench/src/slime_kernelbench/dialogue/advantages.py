"""Advantages of turns, each compared with the same turn of its group's other dialogues.

``turn_grpo``   (R - mean) / (std + 1e-6) over the rollouts of one (group, turn); without the division under
                `disable_grpo_std_normalization`. GRPO (Shao et al. 2024) a turn at a time.
``turn_rloo``   R - mean of the other rollouts of one (group, turn): leave one out (Ahmadian et al. 2024), a turn at a
                time, as Dr.Kernel's TRLOO (2026).

**Ragged turns.** Dialogues end at different turns. With ``ragged = reached`` a turn is compared with the dialogues
that reached it; the only one that did has nothing to be compared with, and advantage 0. With ``ragged = padded`` it is
compared with all dialogues of the group: those that ended before bring the return that they would have there, their
last reward repeated (`returns.padded`), so that who still works on what others have solved is told so.

Samples without a turn (of other tasks in the same step) are turn 0. Found by ids, never by position.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slime_core import Batch, Estimator
from slime_core.algorithms.shared.groups import Comparison, compare

KEY = "kernelbench"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def estimators() -> list[Estimator]:
    """``turn_grpo`` and ``turn_rloo``."""
    return [
        Estimator(name=name, fn=partial(_advantages, leave_one_out=leave))
        for name, leave in (("turn_grpo", False), ("turn_rloo", True))
    ]


def turn_advantages(
    total: Floats,
    group: Ints,
    rollout: Ints,
    turn: Ints,
    *,
    padded: dict[int, list[float]] | None = None,
    std: Literal["none", "group"] = "none",
    leave_one_out: bool = False,
) -> Floats:
    """One advantage a sample, float64 [S].

    Args:
        total: [S], returns
        group, rollout, turn: [S], ids; a rollout has a turn once
        padded: a rollout's returns of every turn, ended ones too; those of the rollouts that it holds are compared
            at all of them
        std: "group" divides by the deviation (ddof 1) of the turn's rollouts
        leave_one_out: the baseline leaves the own return out

    Example: returns 1, 0, 0.5 at turn 0 and 1 at turn 1 of the second rollout
        turn_advantages(...) == [0.5, -0.5, 0.0, 0.0]
    """
    values, groups, turns = list(total), list(group), list(turn)
    reached, prompted = set(zip(rollout, turn)), set(zip(group, turn))
    home = dict(zip(rollout, group))
    for name, whole in (padded or {}).items():  # those that ended before count as if they had gone on
        for number, value in enumerate(whole):
            if (name, number) not in reached and (home[name], number) in prompted:
                values.append(value)
                groups.append(home[name])
                turns.append(number)
    _, place = np.unique(np.stack([groups, turns]), axis=1, return_inverse=True)
    alone = np.arange(len(values))  # a turn of a rollout competes by itself
    comparison: Comparison = compare(np.array(values), place.ravel(), alone, std=std, leave_one_out=leave_one_out)
    return comparison.of(np.array(values, dtype=np.float64))[: len(total)]


def _advantages(batch: Batch, train: Any, *, leave_one_out: bool) -> dict[str, Any]:
    metadata = [dict(advantages.get(KEY, {})) for advantages in batch.train_metadata] or [{}] * len(batch)
    turn = np.array([int(advantages.get("turn", 0)) for advantages in metadata], dtype=np.int64)
    padded = {
        int(name): advantages["returns"]
        for name, advantages in zip(batch.rollout, metadata)
        if "returns" in advantages
    }
    divides = not (leave_one_out or train.disable_grpo_std_normalization)
    advantages = turn_advantages(
        batch.reward,
        batch.group,
        batch.rollout,
        turn,
        padded=padded,
        std="group" if divides else "none",
        leave_one_out=leave_one_out,
    )
    return {"advantages": advantages[batch.sample_of_token()]}
