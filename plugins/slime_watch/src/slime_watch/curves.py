"""Curves of braille dots: two columns and four rows of dots a character."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row from the top: the Unicode standard, block Braille Patterns."""

Points = Sequence[tuple[float, float]]


def curve(points: Points, width: int, height: int, span: tuple[float, float] | None = None) -> list[str]:
    """A line through points, as ``height`` texts of ``width`` characters.

    Points that fall on one column of dots are averaged. The lowest value is on the last row of dots and the highest on
    the first; a constant is in the middle. ``span`` is what the columns cover of x, by default all points.

    Example:
        curve([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], 2, 1) == ["⡠⠊"]
    """
    cells = [[0] * width for _ in range(height)]
    if points:
        left, right = span or (points[0][0], points[-1][0])
        columns = averages(points, left, right, 2 * width)
        low, high = min(columns.values()), max(columns.values())
        rows = {x: row_of(value, low, high, 4 * height) for x, value in columns.items()}
        for x, y in dots(sorted(rows.items())):
            cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return ["".join(chr(BRAILLE + cell) for cell in row) for row in cells]


def averages(points: Points, left: float, right: float, columns: int) -> dict[int, float]:
    """The mean of the points on each column of dots that has any."""
    sums: dict[int, list[float]] = {}
    for x, y in points:
        share = (x - left) / (right - left) if right > left else 1.0
        if 0 <= share <= 1:
            sums.setdefault(round(share * (columns - 1)), []).append(y)
    return {column: math.fsum(values) / len(values) for column, values in sums.items()}


def row_of(value: float, low: float, high: float, rows: int) -> int:
    """The row of dots of a value, 0 on top."""
    if high <= low:
        return rows // 2
    return round((high - value) / (high - low) * (rows - 1))


def dots(corners: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dots of a line through its corners."""
    lit = list(corners)
    for (x, y), (x_next, y_next) in pairwise(corners):
        length = max(x_next - x, abs(y_next - y))
        lit += [(x + round((x_next - x) * i / length), y + round((y_next - y) * i / length)) for i in range(1, length)]
    return lit
