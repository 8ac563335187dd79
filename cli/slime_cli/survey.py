"""Survey of one data file or set, read row by row: its content and its errors.

Memory: 8 bytes a row for duplicates (of the first :data:`MAX_HASHED` rows), a counter of lengths, nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.data.prompts import Encoder, Keys, Parsed, empty, parse_of
from slime_core.data.rows import DataRows
from slime_core.data.supply import OVERLONG, SHOWN, Hashes, duplicate_ids, equal_pairs, hash_of, nothing_left
from slime_core.errors import DataError

if TYPE_CHECKING:
    from slime_core.types import Message

MAX_HASHED = 1 << 23  # 64 MiB, and as much again while they are sorted
MAX_KEYS = 1000
FIRST = 20  # bad rows listed one by one
LONG_NUMBER = re.compile(r"\d{4001,}")
TOWER = re.compile(r"\d\s*(?:\*\*|\^)\s*[{(]*\s*\d+\s*(?:\*\*|\^)")
NUMBERS_TOLD = {"number of more than 4000 digits": LONG_NUMBER, "power of a power": TOWER}
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was found; counts are of rows."""

    rows: int = 0
    prompts: int = 0  # rows that can be used
    unit: str = "characters"  # or tokens, where a tokenizer was given
    encoder: Encoder | None = None  # what bounds prompts
    keys: dict[str, Counter[str]] = field(default_factory=dict)  # key -> JSON type -> rows
    lengths: Counter[int] = field(default_factory=Counter)  # of prompts, overlong ones included
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows
    bad: Counter[str] = field(default_factory=Counter)  # code -> rows
    first_bad: list[DataError] = field(default_factory=list)
    repeated: int = 0  # rows whose prompt and label an earlier row has
    first_repeated: list[tuple[str, str]] = field(default_factory=list)  # places
    contradicting: int = 0  # rows whose prompt an earlier row has with another label
    first_contradicting: list[tuple[str, str]] = field(default_factory=list)
    repeated_ids: list[str] = field(default_factory=list)
    labels: Counter[str] = field(default_factory=Counter)  # labels that a grader may not parse -> rows
    first_labels: list[str] = field(default_factory=list)
    media: Counter[str] = field(default_factory=Counter)  # kind -> references
    hashed: int = 0  # rows that duplicates were looked for in

    def problem(self, where: str, tolerated: int) -> DataError | None:
        """The error that a run over these rows would end with; None where it would not.

        DAT17 and DAT27: nothing can be used. DAT22: an id twice. Else the first bad row's own code, where there are
        more than ``tolerated`` (`data.max_bad_rows`).
        """
        number = self.bad.total()
        if number > tolerated:
            first = self.first_bad[0]
            if number > 1:
                codes = ", ".join(f"{count} x {code}" for code, count in self.bad.most_common())
                first.why = "; ".join(
                    filter(None, [f"{number} of {self.rows} rows are unreadable ({codes})", first.why])
                )
            return first
        if self.repeated_ids:
            return duplicate_ids(self.repeated_ids, where)
        if self.prompts:
            return None
        if not self.dropped:
            return _none(where, self.rows, self.bad)
        assert self.encoder is not None  # without one nothing is too long
        error = nothing_left(
            "default", self.dropped, replace(self.encoder, dropped=(min(self.lengths), max(self.lengths)))
        )
        error.where = where
        return error

    @property
    def limit(self) -> int:
        """Longest prompt in tokens; 0 is none."""
        return self.encoder.limit if self.encoder else 0

    def quantiles(self) -> dict[str, int]:
        """Lengths of prompts: ``min p50 p90 p99 max``; empty without prompts."""
        if not self.lengths:
            return {}
        values = np.array(sorted(self.lengths), dtype=np.int64)
        ends = np.cumsum([self.lengths[int(value)] for value in values])
        ranks = [max(0, int(np.ceil(q * int(ends[-1]))) - 1) for q in QUANTILES]
        values_at = [int(values[int(np.searchsorted(ends, rank, side="right"))]) for rank in ranks]
        return dict(zip(("min", "p50", "p90", "p99", "max"), values_at, strict=True))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Lengths in powers of two: first, last, rows; empty steps between them included."""
        steps: Counter[int] = Counter()
        for length, count in self.lengths.items():
            steps[length.bit_length()] += count
        if not steps:
            return []
        return [(1 << i >> 1, (1 << i) - 1, steps[i]) for i in range(min(steps), max(steps) + 1)]


def survey(
    rows: DataRows, keys: Keys, encoder: Encoder | None = None, progress: Callable[[int], None] | None = None
) -> Survey:
    """Read every row once, in order.

    Args:
        rows: of a file or set.
        keys: the columns that a run would read.
        encoder: counts tokens and applies the length policy; without one, lengths are in characters.
        progress: called with the number of rows read so far, now and then.

    Raises:
        DataError: DAT37 the file changed meanwhile; DAT26 a prompt that is too long where that is an error.
    """
    result = Survey(rows=len(rows), unit="tokens" if encoder else "characters", encoder=encoder)
    result.hashed = min(len(rows), MAX_HASHED)
    hashes: dict[str, Hashes] = {name: np.zeros(result.hashed, dtype=np.uint64) for name in ("prompt", "row", "id")}
    for index in range(len(rows)):
        where = rows.where(index)
        parsed = _look(rows, index, where, keys, result, encoder)
        if index < result.hashed:
            _hash(hashes, index, parsed, where)
        if progress is not None and index % 1000 == 0:
            progress(index)
    _duplicates(result, hashes, rows, with_ids=bool(keys.id))
    return result


def _look(
    rows: DataRows, index: int, where: str, keys: Keys, result: Survey, encoder: Encoder | None
) -> Parsed | None:
    try:
        row = rows[index]
        _count_keys(row, result)
        parsed = parse_of(rows, index, keys, row)
        fits = _length(parsed, result, encoder)
    except DataError as error:
        if error.code in ("DAT26", "DAT37"):
            raise
        result.bad[error.code] += 1
        if len(result.first_bad) < FIRST:
            result.first_bad.append(error)
        return None
    result.prompts += fits
    for kind, items in parsed.media.items():
        result.media[kind] += len(items)
    _look_at_label(parsed, result)
    return parsed


def _length(parsed: Parsed, result: Survey, encoder: Encoder | None) -> bool:
    """Count a prompt's length; whether it can be used."""
    if encoder is None:
        if parsed.prompt == "":
            raise empty(parsed.where)
        result.lengths[_characters(parsed.prompt)] += 1
        return True
    tokens = encoder.tokens(parsed)
    fitted = encoder.fit(tokens, parsed.where, {})
    result.lengths[len(tokens)] += 1
    if fitted is None:
        result.dropped[OVERLONG] += 1
    return fitted is not None


def _characters(prompt: str | list[Message]) -> int:
    """Characters of a prompt's texts."""
    if isinstance(prompt, str):
        return len(prompt)
    contents = [message.get("content") or "" for message in prompt]
    parts = [part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content)]
    return sum(len(part["text"]) for part in parts if isinstance(part.get("text"), str))


def _count_keys(row: Mapping[str, Any], result: Survey) -> None:
    for name, value in row.items():
        if name in result.keys or len(result.keys) < MAX_KEYS:
            result.keys.setdefault(name, Counter())[_type(value)] += 1


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names: dict[type, str] = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _look_at_label(parsed: Parsed, result: Survey) -> None:
    """Note labels whose number no grader should work out: they are compared as text, and may cost time."""
    if isinstance(parsed.label, str) and len(parsed.label) > 4:
        for kind, pattern in NUMBERS_TOLD.items():
            if pattern.search(parsed.label):
                result.labels[kind] += 1
                if len(result.first_labels) < SHOWN:
                    result.first_labels.append(f"{parsed.where}: {kind}")
                return


def _hash(hashes: Mapping[str, Hashes], index: int, parsed: Parsed | None, where: str) -> None:
    prompt = f"\0{where}" if parsed is None else repr((parsed.prompt, parsed.tools, parsed.media))
    hashes["prompt"][index] = hash_of(prompt)
    hashes["row"][index] = hash_of(prompt if parsed is None else f"{prompt}\0{parsed.label!r}")
    hashes["id"][index] = hash_of(prompt if parsed is None else parsed.row_id)


def _duplicates(result: Survey, hashes: Mapping[str, Hashes], rows: DataRows, *, with_ids: bool) -> None:
    equal = equal_pairs(hashes["row"])
    same = {second for _, second in equal}
    other = [pair for pair in equal_pairs(hashes["prompt"]) if pair[1] not in same]
    result.repeated, result.contradicting = len(equal), len(other)
    result.first_repeated = [(rows.where(one), rows.where(two)) for one, two in equal[:SHOWN]]
    result.first_contradicting = [(rows.where(one), rows.where(two)) for one, two in other[:SHOWN]]
    if with_ids:
        pairs = equal_pairs(hashes["id"])
        result.repeated_ids = [f"{rows.where(one)} and {rows.where(two)}" for one, two in pairs]


def _none(where: str, rows: int, bad: Counter[str]) -> DataError:
    return DataError(
        f"none of {rows} rows can be used",
        code="DAT17",
        where=where,
        why=", ".join(f"{count} x {code}" for code, count in bad.most_common()),
        fix="fix the rows, or name another file",
    )
