"""What is said of an algorithm, or of a part that algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, kw_only=True)
class Card:
    """What a person should know about one algorithm, or about one part that algorithms share."""

    name: str
    title: str
    formula: Mapping[str, str]  # part to formula, as plain text: advantage, ratio, objective, aggregation, ...
    source: tuple[str, ...]  # authors, year, title, equation
    differs: Mapping[str, str]  # "slime", "verl", "TRL" to what they do
    options: tuple[str, ...]  # the keys it reads, names as in the schema
    advice: str
    functions: tuple[str, ...] = ()  # pure functions that compute it, below slime_core: "algo.losses.kl"
    related: tuple[str, ...] = field(default=())  # names of other cards
