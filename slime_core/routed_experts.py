"""Experts that an engine chose for the tokens of a sequence: [n, layers, k], those of its first n tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def routed_dtype(experts: int) -> type[np.integer[Any]]:
    """The smallest dtype that holds the number of an expert."""
    return np.uint8 if experts <= 1 << 8 else np.int16


def routed_rows(numbers: NDArray[Any]) -> NDArray[np.integer[Any]]:
    """Experts in the smallest dtype that holds them; one below 0 stays what it is."""
    return numbers.astype(np.int16 if numbers.min(initial=0) < 0 else routed_dtype(int(numbers.max(initial=0)) + 1))


def longer_rows(rows: Any, more: NDArray[Any] | None) -> Any:
    """``rows`` of a sequence's first positions, then those of ``more``, from its beginning too, that come after."""
    if rows is None or more is None:
        return more if rows is None else rows
    return np.concatenate([rows, more[len(rows) :]])
