r"""`slime.rollout.rm_hub.math_utils`, over the graders of slime-rm-math.

Two answers are equal where math-verify says so, in a worker with a deadline; the rule of DeepScaleR also compares
MATH's normal form.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from slime_rm_math.graders import deepscaler
from slime_rm_math.graders.answers import BOXES, label_text, tail
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.options import Options

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is a character like any other


@cache
def equivalence() -> Equivalence:
    """The workers of this process, with the limits that `[plugin.rm_math]` has by default."""
    limits = Options()
    return Equivalence(workers=limits.grader_workers, seconds=limits.grader_seconds, memory_mb=limits.grader_memory_mb)


def is_equal(answer: str, label: str) -> bool:
    """Whether an answer has a label's value.

    Raises:
        RuntimeError: nothing could be judged, by the label's fault or the machine's.
    """
    verdict = equivalence().verdict_now(answer, label)
    if verdict.outcome == "infra_error":
        raise RuntimeError(f"the answer {answer[:80]!r} could not be compared with {label[:80]!r}: {verdict.why}")
    return verdict.outcome == "right"


def extract_answer(passage: str) -> str | None:
    r"""The content of the last ``\boxed{}``; None without one, also where an ``\fbox`` or ``\boxed 5`` is."""
    text = tail(passage)
    return remove_boxed(balanced(text, text.rfind("\\boxed")))


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` (or ``\fbox``) with its braces; None without one, or one that is open."""
    return balanced(string, max(string.rfind(name + "{") for name in BOXES))


def balanced(string: str, start: int) -> str | None:
    """The text from ``start`` to the brace that closes its first one; None where none does, or start is below 0."""
    depth = 0
    for mark in BRACE.finditer(string, max(start, 0)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0 and mark[0] == "}":
            return string[start : mark.end()]
    return None


def remove_boxed(s: str | None) -> str | None:
    r"""The content of a text that is one ``\boxed{}``; None for any other text."""
    return s[7:-1] if s is not None and s.startswith("\\boxed{") and s.endswith("}") else None


def mathd_normalize_answer(answer: str | None) -> str | None:
    """An answer's normal form: without units, blanks and the variants of LaTeX; a half is ``1/2``, as in MATH's."""
    form = None if answer is None else deepscaler.normal_form(answer)
    return "1/2" if form == "0.5" else form


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether two answers have the same normal form."""
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are equal element by element, as DeepScaleR compares them; raises as :func:`is_equal`."""
    pairs = deepscaler.pairs(given_answer, ground_truth)
    return pairs is not None and all(is_equal(element, reference) for element, reference in pairs)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether a response's last ``\boxed{}`` is equal to the label; raises as :func:`is_equal`.

    Example:
        grade_answer_verl(r"so \boxed{\frac{1}{2}}", "0.5")    # True
    """
    answer, label = extract_answer(solution_str), label_text(ground_truth)
    return answer is not None and label is not None and is_equal(answer, label)


extract_boxed_answer = extract_answer
__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
]
