"""Rules of the debug modes: dumping rollouts, training from a dump, rolling out alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SAVE, LOAD = "rollout.save_debug_rollout_data", "rollout.load_debug_rollout_data"
ROLLOUT, TRAIN = "rollout.debug_rollout_only", "rollout.debug_train_only"


def conflicts(config: Config) -> Iterator[Problem]:
    """Debug settings that cannot hold together."""
    rollout = config.rollout
    if rollout.debug_rollout_only and rollout.debug_train_only:
        yield conflict(
            "debug_rollout_only and debug_train_only are both set",
            [ROLLOUT, TRAIN],
            why="one leaves training out, the other rolling out; nothing would be left",
            fix="--no-debug-rollout-only   or   --no-debug-train-only",
        )
    elif rollout.debug_train_only and not rollout.load_debug_rollout_data:
        yield conflict(
            "debug_train_only has nothing to train on",
            [TRAIN, LOAD],
            why="without an engine, rollouts come from files",
            fix="name a dump: --load-debug-rollout-data DIR   (a run writes one with --save-debug-rollout-data DIR)",
        )
    if rollout.debug_rollout_only and rollout.load_debug_rollout_data:
        yield conflict(
            "debug_rollout_only with load_debug_rollout_data",
            [ROLLOUT, LOAD],
            why="nothing would be rolled out and nothing trained",
            fix="remove one of them",
        )
    if rollout.save_debug_rollout_data and rollout.load_debug_rollout_data:
        yield conflict(
            "save_debug_rollout_data with load_debug_rollout_data",
            [SAVE, LOAD],
            why="what would be written is what was read",
            fix="remove one of them",
        )
    if rollout.load_debug_rollout_data and rollout.rollout_buffer_url:
        yield conflict(
            "load_debug_rollout_data with rollout_buffer_url",
            [LOAD, "rollout.rollout_buffer_url"],
            why="each says where rollouts come from",
            fix="remove one of them",
        )
    for key, value in ((SAVE, rollout.save_debug_rollout_data), (LOAD, rollout.load_debug_rollout_data)):
        if "{" in value or value.endswith((".pt", ".pkl")):
            yield conflict(
                f"{key.split('.')[1]} = {value} is a file's name, not a folder",
                [key],
                code="CFG03",
                why="a dump is a folder with a file a step, step-000001.rollout, and never a pickle",
                fix=f"--{key.split('.')[1].replace('_', '-')} DIR",
            )


def notices(config: Config) -> list[str]:
    """Sentences about debug settings that are legal and seldom meant."""
    rollout, evaluation = config.rollout, config.eval
    if rollout.debug_train_only and (evaluation.eval_prompt_data or evaluation.eval_tasks):
        return ["debug_train_only has no engine: evaluation sets are left out"]
    if rollout.debug_rollout_only and not rollout.save_debug_rollout_data:
        return ["debug_rollout_only without save_debug_rollout_data: the ledger alone keeps the samples"]
    return []
