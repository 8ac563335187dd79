"""Answers that no worker should see, and the reason why each is refused. Linear time.

A worker that takes too long is killed anyway; this keeps the usual bombs from costing a second each.
"""

from __future__ import annotations

import math
import re

LONGEST = 4096  # characters of one answer; the longest of MATH-500's labels has 159
DIGITS = re.compile(r"[0-9]{1001}")
EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(]{0,8}-?[0-9]{5}")
SCIENTIFIC = re.compile(r"[0-9][eE][+-]?[0-9]{5}")
FACTORIAL = re.compile(r"[0-9]{5}[\s})]{0,8}!|![\s})]{0,8}![\s})]{0,8}!")
POWER = re.compile(r"(?:\^|\*\*)[\s{(]{0,8}([0-9]{1,6})\s{0,8}(?:\^|\*\*)[\s{(]{0,8}([0-9]{1,6})")
OPENS, CLOSES = "([{", ")]}"
DEEPEST = 48
LARGEST_EXPONENT = 4.0  # decimal digits of the exponent of a power


def refusal(text: str) -> str | None:
    """Why an answer is not given to a worker, None where it is.

    Example:
        refusal("9**99999999")     # "an exponent of more than 4 digits"
        refusal("2^{3^2}")         # None
    """
    if len(text) > LONGEST:
        return f"longer than {LONGEST} characters"
    if DIGITS.search(text):
        return "a number of more than 1000 digits"
    if EXPONENT.search(text) or SCIENTIFIC.search(text):
        return "an exponent of more than 4 digits"
    if FACTORIAL.search(text):
        return "a factorial of more than 4 digits, or of factorials"
    for low, high in POWER.findall(text):
        if int(low) > 1 and int(high) * math.log10(int(low)) > LARGEST_EXPONENT:
            return "a tower of powers"
    if _depth(text) > DEEPEST:
        return f"brackets deeper than {DEEPEST}"
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        if letter in OPENS:
            depth += 1
            deepest = max(deepest, depth)
        elif letter in CLOSES:
            depth -= 1
    return deepest
