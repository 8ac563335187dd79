r"""DAPO's rule: the text after the last "Answer:", in Minerva's normal form, equals the label. +1 right, -1 not.

Sources: Yu et al. 2025, "DAPO", arXiv 2503.14476, section 2.5 (the prompt asks for "Answer: $Answer"; rule-based
reward of 1 and -1) and verl's scorer of it, which looks at the last 300 characters; the normal form is that of
Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language Models", arXiv 2206.14858, appendix D.1.
Rederived from these; the labels of DAPO-17k are whole numbers, and such a label is compared as one (``7.0`` is
``7``).
"""

from __future__ import annotations

import re

LOOKED_AT = 300  # characters at the end of a response
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Minerva's tables, in their order, since one replacement makes way for the next.
REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}",
    "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;",
    ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
UNWRAPPED = tuple(re.compile(rf"\\{command}\{{([^}}]*)\}}") for command in ("text", "textbf", "overline"))
BOXED = re.compile(r"\\boxed\{(.*)\}")
SHORT_FRACTION, SHORT_ROOT = re.compile(r"frac([^{])(.)"), re.compile(r"sqrt([^{])")


def normal_form(text: str) -> str:
    r"""Minerva's normal form of a final answer.

    Example:
        normal_form("x = 1,000 dollars")    # "1000"
        normal_form(r"$\frac12$")            # "\frac{1}{2}"
    """
    text = text.rpartition("=")[2]
    for before, after in REPLACED:
        text = text.replace(before, after)
    for word in REMOVED:
        text = text.replace(word, "")
    if text.count("$") > 1:
        text = text.split("$")[1]
    for command in UNWRAPPED:
        text = command.sub(r"\1", text)
    text = BOXED.sub(r"\1", text)
    text = SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    bare = text.replace(",", "")
    return (bare if bare.isdigit() else text).strip()


def answer_of(response: str) -> str | None:
    """What follows the last "Answer:" in the last 300 characters, None where nothing does."""
    answers = ANSWER.findall(response[-LOOKED_AT:])
    return answers[-1] if answers else None


def is_right(answer: str, label: str) -> bool:
    """Whether an answer has the label's normal form; a whole number as label is compared as one."""
    target = normal_form(label)
    try:
        value = float(target)
        target = str(int(value)) if value == int(value) else target
    except (ValueError, OverflowError):
        pass
    return normal_form(answer) == target
