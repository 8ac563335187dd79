"""`slime.rollout.rm_hub.gpqa`, over slime-rm-math's grader of multiple choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_rm_math.graders import choices
from slime_rm_math.graders.answers import after_thought

DEFAULT_VALID_LETTERS = list(choices.LETTERS)


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 where the chosen letter is the label's, else 0; ``choices``, ``valid_letters``, ``correct_letter`` by row.

    Without a letter to compare, the label's text within the response is right.
    """
    if response is None:
        return 0.0
    verdict = choices.choice(response, label, metadata or {})
    if verdict.outcome in ("right", "wrong"):
        return float(verdict.outcome == "right")
    target = choices.plain_text(str(label))
    return float(bool(target) and target in choices.plain_text(after_thought(response)))


__all__ = ["DEFAULT_VALID_LETTERS", "compute_gpqa_reward"]
