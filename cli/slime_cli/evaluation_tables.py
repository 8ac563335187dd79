"""Figures of sets, or differences between two evaluations, as tables of text and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_cli.evaluation_differences import Difference

CATEGORY = "category/"
FIGURE = re.compile(r"(.+?)/((?:pass|maj)@\d+(?:/(?:low|high|questions))?|questions)", re.DOTALL)


@dataclass(slots=True, frozen=True, kw_only=True)
class TextTable:
    """Cells of text with a title."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def figure_tables(results: Mapping[str, Mapping[str, float]]) -> list[TextTable]:
    """A table with a column a set, then a table of categories for each set that has some.

    Example:
        figure_tables({"aime": {"pass@1": 0.5, "pass@1/low": 0.3, "pass@1/high": 0.7}})[0].rows
        # [["pass@1", "0.5 [0.3, 0.7]"]]
    """
    plain = [key for figures in results.values() for key in figures if not key.startswith(CATEGORY)]
    keys = [key for key in dict.fromkeys(plain) if not _is_end(key, plain)]
    rows = [[key, *(_figure(figures, key) for figures in results.values())] for key in keys]
    return [TextTable(title="evaluation", columns=["figure", *results], rows=rows), *_categories(results)]


def difference_tables(differences: Sequence[Difference]) -> list[TextTable]:
    """A row a set, then a table of categories for each set that has some."""
    columns = ["set", "questions", "A", "B", "B - A", "95 % interval", "p", "test", "only A", "only B", "left out"]
    rows = [
        [
            *(d.name, str(d.questions), _short(d.first), _short(d.second), f"{d.second - d.first:+.4g}"),
            *(f"[{d.low:+.4g}, {d.high:+.4g}]", f"{d.p:.3g}", d.test),
            *(str(d.first_only), str(d.second_only), str(d.left_out)),
        ]
        for d in differences
    ]
    tables = [TextTable(title="comparison (pass@1)", columns=columns, rows=rows)]
    for d in differences:
        parts = [[n, str(c), _short(a), _short(b), f"{b - a:+.4g}"] for n, (c, a, b) in d.categories.items()]
        if parts:
            names = ["category", "questions", "A", "B", "B - A"]
            tables.append(TextTable(title=f"categories of {d.name}", columns=names, rows=parts))
    return tables


def to_markdown(table: TextTable) -> str:
    """A heading and a pipe table; pipes in cells are escaped."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    shown = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
    return "\n".join([f"## {table.title}", "", *shown, ""])


def _categories(results: Mapping[str, Mapping[str, float]]) -> list[TextTable]:
    tables = []
    for name, figures in results.items():
        parts: dict[str, dict[str, float]] = {}
        for key, value in figures.items():
            if key.startswith(CATEGORY):
                category, figure = _split(key)
                parts.setdefault(category, {})[figure] = value
        keys = list(dict.fromkeys(key for part in parts.values() for key in part))
        keys = [key for key in keys if not _is_end(key, keys)]
        rows = [[category, *(_figure(part, key) for key in keys)] for category, part in parts.items()]
        if rows:
            tables.append(TextTable(title=f"categories of {name}", columns=["category", *keys], rows=rows))
    return tables


def _split(key: str) -> tuple[str, str]:
    """``category/number theory/pass@1/low`` taken apart; a category may hold slashes itself."""
    match = FIGURE.fullmatch(key.removeprefix(CATEGORY))
    assert match is not None, key
    return match[1], match[2]


def _is_end(key: str, keys: Sequence[str]) -> bool:
    base, _, end = key.rpartition("/")
    return end in ("low", "high") and base in keys


def _figure(figures: Mapping[str, float], key: str) -> str:
    if key not in figures:
        return "-"
    low, high = figures.get(f"{key}/low"), figures.get(f"{key}/high")
    interval = f" [{_short(low)}, {_short(high)}]" if low is not None and high is not None else ""
    return _short(figures[key]) + interval


def _short(value: float) -> str:
    return f"{value:.4g}"
