"""One page of facts an algorithm: formula, source, how others differ, keys with their settled values.

card("gspo")              what `docs/algorithms/gspo.md` and `slime config show --card` are made of
option_rows(card, train)  (key, value, whether the algorithm set it, meaning), in the card's order
card_text(card, train)    the card as plain text

Nothing here imports numpy or torch; `tests/unit/cli/test_cards.py` compares the cards with the code.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_cli.part_cards import PART_CARDS
from slime_core.algorithms import Algorithm, algorithms
from slime_core.algorithms.shared.card import Card

if TYPE_CHECKING:
    from slime_core.config.schema import Config

WIDTH = 100


class OptionRow(NamedTuple):
    """One key of a card."""

    path: str  # "train.eps_clip"
    value: str  # as TOML, as a run with these settings uses it
    preset: bool  # whether it is the algorithm's own value, and not the core's default
    text: str


def cards() -> dict[str, Card]:
    """Every card by name: algorithms, then the parts that they share."""
    return {**algorithms(), **{part.name: part for part in PART_CARDS}}


def card(name: str) -> Card | None:
    """The card of an algorithm or part; None for a plugin's estimator without one."""
    return cards().get(name)


def option_rows(of: Card, config: Config | None = None) -> list[OptionRow]:
    """The card's keys with the value each has in ``config``, by default in a config that names only the algorithm."""
    from slime_core.config.fields import core_keys
    from slime_core.config.presets import settle
    from slime_core.config.schema import Config
    from slime_core.config.sections.train import TrainSection
    from slime_core.config.values import show

    presets, keys = of.presets if isinstance(of, Algorithm) else {}, core_keys()
    if config is None:
        train = TrainSection(advantage_estimator=of.name) if isinstance(of, Algorithm) else TrainSection()
        config = Config(train=train)
    sections: dict[str, Any] = {"train": settle(config.train)}
    rows = []
    for name in of.options:
        key = keys[name]
        value = getattr(sections.get(key.section) or getattr(config, key.section), name)
        preset = name in presets and value == presets[name]
        rows.append(OptionRow(key.path, show(value), preset, key.info.description or ""))
    return rows


def card_text(of: Card, config: Config | None = None) -> str:
    """The card as plain text of at most 100 columns, with the values of ``config``."""
    lines = [f"{of.name}: {of.title}", ""]
    lines += _block("  ", of.advice)
    lines += ["", "formula"]
    width = max(len(part) for part in of.formula)
    for part, text in of.formula.items():
        lines += _block(f"  {part:<{width}}  ", text)
    lines += ["", "source"]
    for text in of.source:
        lines += _block("  ", text)
    lines += ["", "elsewhere"]
    for name, text in of.differs.items():
        lines += _block(f"  {name:<5}  ", text)
    lines += ["", "keys (* the algorithm's own value)"]
    rows = option_rows(of, config)
    first = max(len(row.path) for row in rows)
    second = max(len(row.value) for row in rows)
    for row in rows:
        mark = "*" if row.preset else " "
        lines += _block(f"  {row.path:<{first}} {row.value:>{second}} {mark} ", row.text)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(lead: str, text: str) -> list[str]:
    """``text`` behind ``lead``, folded; the folded lines are indented to where it starts."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False
    ) or [lead.rstrip()]
