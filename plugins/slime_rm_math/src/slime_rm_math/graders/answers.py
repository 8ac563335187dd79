r"""Where an answer stands in a response: the last `\boxed{}`, what follows a chain of thought, a label.

Only the last 64 KiB of a response are looked at: the answer is the last thing that a model says.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

LOOKED_AT = 64 * 1024
"""Characters at the end of a response in which an answer is looked for."""
LONGEST_NUMBER = 13_000  # bits of a label that is a whole number: 3,900 digits
BOXES = ("\\boxed", "\\fbox")
THOUGHT_ENDS = "</think>"


def tail(text: str) -> str:
    """The end of a response, at most 64 KiB."""
    return text[-LOOKED_AT:]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` (or ``\fbox``), braces balanced; None without one, or one that is open.

    One pass over the text, whatever is in it. An escaped brace (``\{``) is a character like any other.

    Example:
        last_boxed(r"so \boxed{\frac{1}{2}}.")    # "\frac{1}{2}"
        last_boxed(r"\boxed 7")                    # "7"
    """
    at, name = max((text.rfind(name), name) for name in BOXES)
    if at < 0:
        return None
    start = at + len(name)
    rest = text[start:].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if text[start : start + 1] == " " and rest.split("$")[0].split() else None
    depth, escaped = 0, False
    for place, letter in enumerate(rest):
        if escaped or letter == "\\":
            escaped = not escaped
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return rest[1:place].strip()
    return None


def after_thought(text: str) -> str:
    """The text after the last ``</think>``, or all of it."""
    return text.rpartition(THOUGHT_ENDS)[2]


def label_text(label: Any) -> str | None:
    r"""A label as text, out of its ``\boxed{}`` where it has one; None where there is none that could be read.

    Example:
        label_text(r"\boxed{7}"), label_text(7), label_text("  ")    # ("7", "7", None)
    """
    if label is None or isinstance(label, (dict, list, tuple)):
        return None
    if isinstance(label, int) and label.bit_length() > LONGEST_NUMBER:
        return None
    text = str(label).strip()
    if "\\boxed" in text:
        text = last_boxed(text) or ""
    return text or None


VARIANTS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\varnothing", "\\emptyset"),
    ("\\geq", "\\ge"),
    ("\\leq", "\\le"),
)
SPACING = ("\\!", "\\,", "\\;", "\\:", "\\ ", "\\left", "\\right", "~", " ", "\n", "\t", "$")


def canonical(text: str) -> str:
    r"""A text without what LaTeX does not print or prints as space; equal canonical texts are the same answer.

    ``\left`` is dropped only as the command, never out of ``\leftarrow``.

    Example:
        canonical(r"\left( 1,\, 2 \right)") == canonical("(1,2)")    # True
    """
    text = text.strip().removesuffix(".").strip()
    for command in ("\\text", "\\mathrm", "\\textbf", "\\mathbf"):
        if text.startswith(command + "{") and text.endswith("}") and text.count("{") == 1:
            return " ".join(text[len(command) + 1 : -1].split())
    for variant, usual in VARIANTS:
        text = text.replace(variant, usual)
    for mark in SPACING:
        if mark in ("\\left", "\\right"):
            for bracket in ("(", ")", "[", "]", "\\{", "\\}", "|", "."):
                text = text.replace(mark + bracket, bracket)
        elif mark == " " and not _is_mathematics(text):
            text = " ".join(text.split())
        else:
            text = text.replace(mark, "")
    return text


def _is_mathematics(text: str) -> bool:
    """Whether blanks mean nothing: "1 , 2" and not "two apples", nor the mixed number "1 1/2"."""
    words = text.split()
    digits = any(a[-1:].isdigit() and b[:1].isdigit() for a, b in pairwise(words))
    return not digits and not any(len(word) > 1 and word.isalpha() for word in words)
