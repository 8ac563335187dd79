"""The answer in a response."""

from __future__ import annotations

import re

from slime_core.evaluation.questions import final_answer

TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"(?:(?<![\w.])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def answer_in(response: str, where: str) -> str | None:
    """The answer by the option ``answer``; None where the response has none.

    Example:
        answer_in("So 3 + 4 is 7. <answer> 7 </answer>", "tag") == "7"
    """
    if where == "tag":
        answers = TAG.findall(response)
        return answers[-1].strip() if answers else None
    if where == "boxed":
        return final_answer(response)
    if where == "number":
        numbers = NUMBER.findall(response)
        return numbers[-1] if numbers else None
    if where == "last_line":
        response = response.strip().rpartition("\n")[2]
    return response.strip() or None
