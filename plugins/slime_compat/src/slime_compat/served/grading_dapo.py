r"""`slime.rollout.rm_hub.math_dapo_utils`, over slime-rm-math's grader of DAPO."""

from __future__ import annotations

import re
from typing import Any

from slime_compat.served.grading_mathematics import balanced
from slime_rm_math.graders import dapo
from slime_rm_math.graders.answers import last_boxed

NO_ANSWER = "[INVALID]"
BOX_WITHIN = 100  # characters at the end of a response


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` with its braces; None without one, or one that is open."""
    return balanced(string, string.rfind("\\boxed{"))


def remove_boxed(s: str) -> str:
    r"""The content of a text that is one ``\boxed{}``.

    Raises:
        AssertionError: any other text.
    """
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise AssertionError(f"box error: {s}")
    return s[7:-1]


def normalize_final_answer(final_answer: str) -> str:
    """Minerva's normal form."""
    return dapo.normal_form(str(final_answer))


def is_correct_minerva(
    solution_str: str,
    gt: str,
    gt_need_extract: bool = False,
    answer_pattern: str = dapo.ANSWER.pattern,
) -> tuple[bool, str]:
    """Whether what follows the last "Answer:" is the label, and that answer's normal form."""
    answers = re.findall(answer_pattern, solution_str, re.IGNORECASE)
    answer = answers[-1] if answers else NO_ANSWER
    label = last_boxed(str(gt)) or "" if gt_need_extract else str(gt)
    return bool(answers) and dapo.is_right(answer, label), normalize_final_answer(answer)


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    r"""1 or -1: whether the last ``\boxed{}`` is the label, character for character; and its content.

    Args:
        pred: the response, whose last 100 characters are looked at.
        gt: the label.
        pause_tokens_index: four places in the response; its last one less 100 is where the look begins.
    """
    start = -BOX_WITHIN if pause_tokens_index is None else pause_tokens_index[-1] - BOX_WITHIN
    box = last_boxed_only_string(pred[start:])
    content = None if box is None else remove_boxed(box)
    return 1 if content == gt else -1, content


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Whether a response is right, and the answer that was read in it: by its box, or by Minerva's rule."""
    if strict_box_verify:
        score, content = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, content
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    r"""``score`` (1 or -1), ``acc`` and ``pred`` of a response, whose last 300 characters are looked at.

    Example:
        compute_score("Answer: 42", "42")    # {"score": 1.0, "acc": True, "pred": "42"}
    """
    right, answer = verify(solution_str[-dapo.LOOKED_AT :], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]
