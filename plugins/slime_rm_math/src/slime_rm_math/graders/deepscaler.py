r"""DeepScaleR's rule: the last `\boxed{}` after a chain of thought equals the label; 1 right, 0 not.

Source: Luo et al. 2025, "DeepScaleR", and its reward (agentica-project/deepscaler, rewards/math_reward.py), which
asks for ``</think>`` (or ``###Response``), a box, and that MATH's normal form (Hendrycks et al. 2021) or PRM800K's
grader (Lightman et al. 2023) calls it equal. PRM800K's is strict in three ways, kept here: tuples are compared
element by element with the same brackets; an unreduced fraction is not the reduced one; where the label is a whole
number, so is the answer. What it leaves to ``sympy.simplify`` on text is here asked of math-verify, in a process that
can be killed.
"""

from __future__ import annotations

import re

from slime_rm_math.graders.answers import THOUGHT_ENDS
from slime_rm_math.graders.notation import folded

LONGEST = 4096  # characters of an answer
RESPONSE = "###Response"
PLAIN_FRACTION = re.compile(r"-?[0-9]+/0*[1-9][0-9]*")
LATEX_FRACTION = re.compile(r"(?<![0-9])(-?)\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
GROUPS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?:[^0-9]|$))")
FORMAT = re.compile(
    r"\\(?:displaystyle|textstyle|q?quad)(?![A-Za-z])|\\[,;: ]|\\(?:text)?color\{[A-Za-z]{1,20}\}"
    r"|\\(?:mathrm|mathbf|mathbb|textbf|textit|textrm|underline|bm|boldsymbol|overline(?=\{[A-Za-z]))(?=\s?\{)"
)
JOINED = re.compile(r"\\text\{ ?(?:or|and) ?\}| (?:or|and) ")
FLOAT = re.compile(r"-?(?:[0-9]{1,300}\.?[0-9]{0,15}|\.[0-9]{1,15})(?:[eE][+-]?[0-9]{1,2})?")
UNIT_NAMES = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
UNITS = re.compile(
    rf"(?:\\text\{{ [^}}]*\}}(?:\^\{{?[23]\}}?)?|\\[()]|\b(?:{UNIT_NAMES})(?:es|s)?\s*(?:\^[0-9]+)?"
    r"|\^\s*\{?\\circ\}?|\\?%|\\?\$|\\!)"
)
OPEN, CLOSE = "([", ")]"


def solution(response: str) -> str | None:
    """The part of a response that is graded, None where its chain of thought has no end."""
    if THOUGHT_ENDS in response:
        return response.rpartition(THOUGHT_ENDS)[2]
    return response.split(RESPONSE)[1] if RESPONSE in response else None


def normal_form(text: str) -> str:
    r"""A text without units, blanks and the variants of LaTeX: equal normal forms are equal answers.

    Example:
        normal_form(r"\dfrac{1}{2}"), normal_form("1,000 meters")    # ("1/2", "1000")
    """
    text = folded(text).strip().removesuffix(".").removeprefix("+").replace("\\left", "").replace("\\right", "")
    text = FORMAT.sub("", JOINED.sub(",", text.replace("{,}", ","))).strip()
    if text.startswith("\\text{") and text.endswith("}") and text.count("{") == 1:
        text = text[6:-1]
    if text.count("=") == 1 and len(text.partition("=")[0].strip()) <= 2:
        text = text.partition("=")[2]
    text = UNITS.sub("", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"([0-9]) *\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1+\2/\3", text)
    text = LATEX_FRACTION.sub(r"\1\2/\3", text.replace("--", ""))
    text = GROUPS.sub("", text.strip()).replace("\n", "")
    mixed = re.fullmatch(r"(-?[0-9]+) +([0-9]+/[0-9]+)", text)
    text = f"{mixed[1]}+{mixed[2]}" if mixed else text.replace(" ", "")
    text = text.replace("{", "").replace("}", "") if "\\" not in text else text
    if FLOAT.fullmatch(text) and not text.lstrip("-").isdigit() and float(text) == int(float(text)):
        text = str(int(float(text)))
    return ("0" + text if text.startswith(".") else text).lower()


def elements(text: str) -> list[str]:
    """The elements of a tuple or interval, or the text itself."""
    inner = text[1:-1]
    if len(text) > 2 and text[0] in OPEN and text[-1] in CLOSE and not any(mark in inner for mark in OPEN + CLOSE):
        return [part.strip() for part in inner.split(",")]
    return [text]


def pairs(answer: str, label: str) -> list[tuple[str, str]] | None:
    """What math-verify must call equal for the answer to be right; empty where it is right, None where it is wrong."""
    answer_form, label_form = normal_form(answer), normal_form(label)
    if answer_form == label_form:
        return []
    if not answer_form:
        return None
    answers, right = elements(answer_form), elements(label_form)
    if len(answers) != len(right) or (
        len(right) > 1 and (answer_form[0], answer_form[-1]) != (label_form[0], label_form[-1])
    ):
        return None
    pairs = []
    for element, reference_element in zip(answers, right, strict=True):
        if element == reference_element:
            continue
        fractions = PLAIN_FRACTION.fullmatch(element) and PLAIN_FRACTION.fullmatch(reference_element)
        if (
            fractions
            or _whole(element) != _whole(reference_element)
            or (_whole(element) and int(element) != int(reference_element))
        ):
            return None
        pairs.append((element, reference_element) if len(right) > 1 else (answer, label))
    return pairs


def _whole(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,300}", text) is not None
