"""One task's rows in, its prompts out in order, epoch after epoch: of a file or set, or of a plugin.

What cannot be read is a bad row: counted, copied to rejected.jsonl and passed over up to `data.max_bad_rows`. What is
too long is dropped and counted. Every place that was looked at is a prompt, a drop or a bad row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slime_core.data.order import Permutation
from slime_core.data.prompts import Encoder, Keys, Parsed
from slime_core.data.rows import Rows
from slime_core.data.same import Hashes, check_columns, duplicate_ids, equal_pairs, hash_of, parse_of
from slime_core.errors import DataError, PluginError, SlimeError
from slime_core.notices import notice
from slime_core.protocols import PromptSource
from slime_core.types import Prompt

SCAN_ROWS = 20_000  # a set of up to so many rows is checked whole before the start, of a larger one its beginning
ENDLESS_SKIPS = 100_000  # prompts that an endless source may bring in vain, one after another
TEXT_ROWS = 64  # looked at for a few tokens of text
OVERLONG = "overlong"
BAD = "bad_row"


class BadRows:
    """Unreadable rows of a run: each counted once, copied out, and an error beyond ``limit``."""

    def __init__(self, limit: int, file: Path | None) -> None:
        self._limit, self._file = limit, file
        self.where: dict[str, str] = {}  # place -> code

    def reject(self, error: DataError, raw: bytes) -> None:
        """Note a bad row; raise ``error`` where none, or no more, are tolerated."""
        place = error.where
        if place in self.where:
            return
        if len(self.where) >= self._limit:
            if self._limit:
                error.why = f"{len(self.where) + 1} unreadable rows, data.max_bad_rows is {self._limit}; {error.why}"
            raise error
        self.where[place] = error.code
        if self._file is not None and place not in self._written():
            line = raw.decode("utf-8", "backslashreplace")
            entry = {"where": place, "code": error.code, "what": error.what, "line": line}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _written(self) -> set[str]:
        """Places that an earlier start of the same run copied out."""
        if self._file is None or not self._file.is_file():
            return set()
        return {json.loads(line)["where"] for line in self._file.read_text(encoding="utf-8").splitlines()}


class Supply(Protocol):
    """Where a stream's prompts come from, by index."""

    encoder: Encoder

    def count(self) -> int | None:
        """How many there are; None for an endless source."""

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """The prompt of an index, or the reason why there is none; IndexError past an endless source's end."""

    def fingerprint(self) -> str:
        """Equal only for the same prompts."""

    def mark(self) -> dict[str, Any] | None:
        """``bytes rows sha256`` of the file that was opened; None where there is no one file."""

    def shorten(self, mark: Mapping[str, Any]) -> None:
        """Read a file only as far as it reached when it had this mark; other rows than then stay as they are."""


class FileSupply:
    """Rows of a file or set, checked before the start."""

    def __init__(
        self,
        rows: Rows,
        task: str,
        keys: Keys,
        encoder: Encoder,
        bad: BadRows,
        reopen: Callable[[Mapping[str, Any]], Rows] | None = None,
    ) -> None:
        self._rows, self._task, self._keys, self.encoder, self._bad = rows, task, keys, encoder, bad
        self._reopen = reopen  # the same rows of a file with this mark
        check_columns(rows, keys)
        self._scan()

    def count(self) -> int:
        """See `Supply`."""
        return len(self._rows)

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """See `Supply`."""
        parsed = self._parse(index)
        if parsed is None:
            return BAD
        try:
            made = self.encoder.prompt(parsed, id=id, task=self._task, position=position)
        except DataError as error:
            if error.code == "DAT26":
                raise
            self._bad.reject(error, self._rows.raw(index))
            return BAD
        return OVERLONG if made is None else made

    def fingerprint(self) -> str:
        """See `Supply`."""
        return self._rows.fingerprint()

    def mark(self) -> dict[str, Any] | None:
        """See `Supply`."""
        return self._rows.mark()

    def shorten(self, mark: Mapping[str, Any]) -> None:
        """See `Supply`."""
        mine = self.mark()
        if mine is None or self._reopen is None or mine["bytes"] <= mark["bytes"]:
            return
        rows = self._reopen(mark)
        if (rows.mark() or {}).get("sha256") != mark["sha256"]:
            rows.close()
            return
        self._rows.close()
        self._rows = rows
        say_grown(rows.where(0), mark, mine["bytes"])

    def _parse(self, index: int) -> Parsed | None:
        try:
            return parse_of(self._rows, index, self._keys)
        except DataError as error:
            if error.code == "DAT37":
                raise
            self._bad.reject(error, self._rows.raw(index))
            return None

    def _scan(self) -> None:
        whole = bool(self._keys.id) or len(self._rows) <= SCAN_ROWS
        count = len(self._rows) if whole else SCAN_ROWS
        hashes = np.zeros(count if self._keys.id else 0, dtype=np.uint64)
        good = 0
        for index in range(count):
            parsed = self._parse(index)
            good += parsed is not None
            if self._keys.id:
                hashes[index] = hash_of(parsed.row_id if parsed else f"\0{index}")
        if not good:
            found = Counter(self._bad.where.values())
            raise DataError(
                f"none of {count} rows can be used",
                code="DAT17",
                where=self._rows.where(0),
                why=", ".join(f"{number} x {code}" for code, number in found.most_common()),
                fix="see rejected.jsonl in the run directory",
            )
        if self._keys.id:
            self._refuse_duplicates(hashes)

    def _refuse_duplicates(self, hashes: Hashes) -> None:
        pairs = []
        for first, second in equal_pairs(hashes):
            one, two = self._parse(first), self._parse(second)
            if one and two and one.row_id == two.row_id:
                pairs.append(f"{one.row_id!r} at {one.where} and {two.where}")
        if pairs:
            raise duplicate_ids(pairs, self._rows.where(0))


class PluginSupply:
    """Prompts of a plugin's `slime_prompts`."""

    def __init__(self, source: PromptSource, task: str, encoder: Encoder, bad: BadRows) -> None:
        self._source, self._task, self.encoder, self._bad = source, task, encoder, bad
        try:
            self._count: int | None = len(source)
        except TypeError:
            self._count = None
        if self._count == 0:
            raise DataError(
                f"the plugin's source of task {task!r} has no rows",
                code="DAT17",
                where=f"task {task!r}",
                fix="check the plugin's options",
            )

    def count(self) -> int | None:
        """See `Supply`."""
        return self._count

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """See `Supply`."""
        where = f"{self._task}[{index}]"
        found = self._call(lambda: self._source.at(index), where)
        if not isinstance(found, Prompt):
            raise PluginError(
                f"slime_prompts of task {self._task!r} gave a {type(found).__name__} at {index}, not a Prompt",
                code="PLG57",
                where=where,
                fix="return slime_core.Prompt(id='', prompt=..., label=...) from at(position)",
            )
        task = found.task if found.task != "default" else self._task
        try:
            made = self.encoder.of_plugin(found, id=id, task=task, position=position, where=where)
        except DataError as error:
            if error.code == "DAT26":
                raise
            self._bad.reject(error, b"")
            return BAD
        return OVERLONG if made is None else made

    def fingerprint(self) -> str:
        """See `Supply`."""
        state = self._call(self._source.state, f"task {self._task!r}")
        return "plugin:" + json.dumps(state, sort_keys=True, default=str)

    def mark(self) -> dict[str, Any] | None:
        """See `Supply`."""
        return None

    def shorten(self, mark: Mapping[str, Any]) -> None:
        """See `Supply`."""

    def _call(self, fn: Callable[[], Any], where: str) -> Any:
        try:
            return fn()
        except SlimeError:
            raise
        except IndexError:
            if self._count is None:
                raise
            raise PluginError(
                f"slime_prompts of task {self._task!r} has {self._count} rows, but not this one",
                code="PLG56",
                where=where,
                fix="__len__ must say how many rows at(position) knows",
            ) from None
        except Exception as error:
            raise PluginError(
                f"slime_prompts of task {self._task!r} raised {type(error).__name__}: {error}",
                code="PLG56",
                where=where,
                fix="mend the plugin's prompt source",
            ) from error


class Stream:
    """A task's prompts in order: ``cursor`` counts places looked at, over all epochs."""

    def __init__(self, name: str, weight: float, supply: Supply, shuffle: Callable[[int], int] | None) -> None:
        self.name, self.weight, self.supply = name, weight, supply
        self._key_of_epoch = shuffle  # epoch -> key of its permutation; None keeps the rows' order
        self._order: tuple[int, Permutation] | None = None
        self.cursor = 0
        self.prompts = 0
        self.dropped: Counter[str] = Counter()
        self.ended = False

    def next(self, *, id: str, position: int) -> Prompt | None:
        """The next prompt; None once an endless source has ended.

        Raises:
            DataError: DAT27, a whole epoch went by without one.
        """
        count = self.supply.count()
        patience = count if count is not None else ENDLESS_SKIPS
        skipped: Counter[str] = Counter()
        while skipped.total() < patience:
            if count is not None and self.cursor % count == 0:
                skipped.clear()  # an epoch is told whole, each row once
            index = self.cursor if count is None else self._index(*divmod(self.cursor, count), count)
            try:
                made = self.supply.make(index, id=id, position=position)
            except IndexError:
                self.ended = True
                return None
            self.cursor += 1
            if isinstance(made, Prompt):
                self.prompts += 1
                return made
            skipped[made] += 1
            self.dropped[made] += 1
        raise nothing_left(self.name, skipped, self.supply.encoder)

    def text(self, count: int) -> list[int]:
        """Return up to ``count`` tokens of the first rows' prompts, in the rows' order, whatever was drawn."""
        rows, tokens, index = self.supply.count(), list[int](), 0
        while len(tokens) < count and index < min(TEXT_ROWS, rows or TEXT_ROWS):
            try:
                row = self.supply.make(index, id="text", position=index)
            except IndexError:  # the end of an endless source
                break
            tokens += row.tokens if isinstance(row, Prompt) else []
            index += 1
        return tokens[:count]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, and what must be equal to go on from there."""
        return {
            "cursor": self.cursor,
            "prompts": self.prompts,
            "dropped": dict(self.dropped),
            "ended": self.ended,
            "fingerprint": self.supply.fingerprint(),
            "file": self.supply.mark(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`. Rows that were appended to a file since then are left out.

        Raises:
            DataError: DAT29, the rows are not those of the saved run.
        """
        if state["fingerprint"] != self.supply.fingerprint() and state.get("file"):
            self.supply.shorten(state["file"])
        here = self.supply.fingerprint()
        if state["fingerprint"] != here:
            raise changed(self.name, f"saved {state['fingerprint']}, found {here}")
        self.cursor, self.prompts = int(state["cursor"]), int(state["prompts"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.ended = bool(state["ended"])

    def _index(self, epoch: int, place: int, count: int) -> int:
        if self._key_of_epoch is None:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(count, self._key_of_epoch(epoch))
        return self._order[1].at(place)


def changed(task: str, why: str) -> DataError:
    """DAT29: the rows are not those of the saved run."""
    return DataError(
        f"the data of task {task!r} changed since the run was saved",
        code="DAT29",
        where=f"task {task!r}",
        why=why,
        fix="put the data back as it was, or start another run",
    )


def say_grown(where: str, mark: Mapping[str, Any], size: int) -> None:
    """Tell that a file has more bytes than when the run was saved."""
    notice(
        ("grown", where),
        f"{where}: the file grew from {mark['bytes']} to {size} bytes since the run was saved; "
        f"the {mark['rows']} rows that it had then are used",
    )


def nothing_left(task: str, reasons: Counter[str], encoder: Encoder) -> DataError:
    """DAT27 with the histogram of reasons, and what ``encoder`` found too long."""
    shown = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    if OVERLONG not in reasons:
        fix = "see rejected.jsonl in the run directory"
    else:
        shortest, longest = encoder.dropped
        shown += f"; overlong prompts have {shortest} to {longest} tokens, at most {encoder.limit} fit"
        fix = f"{encoder.wider}\nor set data.overlong_prompt=truncate"
    return DataError(
        f"every row of task {task!r} was dropped", code="DAT27", where=f"task {task!r}", why=shown, fix=fix
    )
