"""`slime.rollout.rm_hub.ifbench`, over slime-rm-math's checks of instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_rm_math.graders import instructions


def compute_ifbench_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 where a response follows every instruction of its row, strictly; 0 else, and without instructions."""
    if response is None or not (metadata or {}).get("instruction_id_list"):
        return 0.0
    reward = instructions.follow(response, _by_instruction(metadata or {}), loose=False)
    if reward.kind == "infra_error":
        raise ValueError(reward.reason)
    return reward.value


def _by_instruction(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The row with ``kwargs`` as a list with an entry an instruction: one object is every instruction's."""
    names, kwargs = list(metadata["instruction_id_list"]), metadata.get("kwargs")
    if isinstance(kwargs, Mapping):
        kwargs = [kwargs] * len(names)
    return {"instruction_id_list": names, "kwargs": kwargs}


__all__ = ["compute_ifbench_reward"]
