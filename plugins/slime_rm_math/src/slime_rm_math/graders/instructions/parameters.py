"""A row's parameters of one instruction, as checked numbers and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Checker = Callable[[str, "Parameters"], bool]
"""Whether a response follows an instruction with these parameters."""
LARGEST = 1_000_000


class BadRow(ValueError):
    """The row's instructions cannot be checked; the response is not to blame."""


class Parameters:
    """Typed reading of a row's keyword arguments.

    Example:
        Parameters({"num_words": 20.0, "relation": "at least"}).number("num_words")    # 20

    Args:
        given: of one instruction, None for what it does not have.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str) -> int:
        """A whole number from 0 to a million; data sets write some as 20.0.

        Raises:
            BadRow: it is none.
        """
        value = self._values.get(name)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
        if not whole or not 0 <= value <= LARGEST or value != int(value):  # type: ignore[operator,arg-type]
            raise BadRow(f"{name} is {value!r}, not a whole number")
        return int(value)  # type: ignore[arg-type]

    def text(self, name: str) -> str:
        """A text that is not empty.

        Raises:
            BadRow: it is none.
        """
        value = self._values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BadRow(f"{name} is {value!r}, not a text")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts, at least one.

        Raises:
            BadRow: it is none.
        """
        value = self._values.get(name)
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, str) and one for one in value):
            raise BadRow(f"{name} is {value!r}, not a list of texts")
        return list(value)

    def holds(self, count: int, name: str, relation: str = "relation") -> bool:
        """Whether ``count`` is at least, or less than, the number of that name.

        Raises:
            BadRow: another relation.
        """
        threshold, how = self.number(name), self.text(relation)
        if how not in ("at least", "less than"):
            raise BadRow(f"{relation} is {how!r}, not 'at least' or 'less than'")
        return count >= threshold if how == "at least" else count < threshold
