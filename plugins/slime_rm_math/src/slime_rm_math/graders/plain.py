r"""Plain numbers, compared exactly and at once; None where math-verify is to be asked.

math-verify compares two integers or two fractions as rationals, and decimals after rounding to six places
(``sympy_numeric_eq``, its ``float_rounding``). A decimal here has at most six places, and no more than twelve
digits, which a double holds: rounding changes nothing, so both come to the equality of rationals. Whatever could
round (a fraction beside a decimal), or is written in another way, is left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction

INTEGER = re.compile(r"-?[0-9]{1,15}")
GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(,[0-9]{3}){1,3}")
DECIMAL = re.compile(r"-?[0-9]{1,6}\.[0-9]{1,6}")
FRACTION = re.compile(r"(-?[0-9]{1,9})/([0-9]{1,9})|(-?)\\[dt]?frac\{(-?[0-9]{1,9})\}\{([0-9]{1,9})\}")
LONGEST = 64


def number(text: str) -> tuple[Fraction, str] | None:
    r"""The value of a plain number, and how it is written: ``integer``, ``decimal`` or ``fraction``.

    Example:
        number("-1,234")           # (Fraction(-1234), "integer")
        number(r"\frac{2}{4}")     # (Fraction(1, 2), "fraction")
        number("1e3")              # None
    """
    text = text.strip()
    if len(text) > LONGEST or not text.isascii():
        return None
    if INTEGER.fullmatch(text) or GROUPED.fullmatch(text):
        return Fraction(int(text.replace(",", ""))), "integer"
    if DECIMAL.fullmatch(text):
        return Fraction(text), "decimal"
    match = FRACTION.fullmatch(text)
    if match is None:
        return None
    above, below = match[1] or match[4], int(match[2] or match[5])
    if below == 0:
        return None
    value = Fraction(int(above), below)
    return (-value if match[3] else value), "fraction"


def compare(answer: str, label: str) -> bool | None:
    """Whether two plain numbers are equal; None where one is none, or where math-verify would round.

    Example:
        compare("0.50", "0.5"), compare("1/2", "0.5")    # (True, None)
    """
    reference = number(label)
    value = number(answer) if reference is not None else None
    if reference is None or value is None:
        return None
    if {reference[1], value[1]} == {"fraction", "decimal"}:
        return None
    if "decimal" in (reference[1], value[1]) and max(abs(reference[0]), abs(value[0])) >= 10**6:
        return None
    return reference[0] == value[0]
