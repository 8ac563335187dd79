"""`slime.rollout.rm_hub.f1`, over slime-rm-math's F1 of words."""

from __future__ import annotations

from slime_rm_math.graders import choices


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and double blanks."""
    return choices.plain_text(s)


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of words; zeros where there is no prediction.

    Example:
        f1_score("the cat sat", "a cat sat down")    # (0.8, 1.0, 0.667)
    """
    return (0.0, 0.0, 0.0) if prediction is None else choices.f1(prediction, ground_truth)


__all__ = ["f1_score", "normalize_answer"]
