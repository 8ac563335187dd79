"""Where a task's prompts come from, by index: the rows of a file or set, checked before the start, or a plugin.

What cannot be read is a bad row: counted, copied to rejected.jsonl and passed over up to `data.max_bad_rows`. What is
too long is dropped and counted. Equal ids are found by 64-bit hashes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slime_core.data.prompts import Encoder, Keys, Parsed, check_columns, parse_of
from slime_core.data.rows import DataRows
from slime_core.errors import DataError, PluginError, SlimeError
from slime_core.notices import notice
from slime_core.protocols import PromptSource
from slime_core.types import Prompt

SCAN_ROWS = 20_000  # a set of up to so many rows is checked whole before the start, of a larger one its beginning
SHOWN = 5  # pairs of equal ids
OVERLONG = "overlong"
BAD = "bad_row"
Hashes = NDArray[np.uint64]


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
    prepares: bool = False  # whether :meth:`prepare` makes rows

    async def prepare(self, indices: Sequence[int]) -> None:
        """Make the rows of these indices, for :meth:`make` to find, without blocking the event loop."""
        return

    def count(self) -> int | None:
        """How many there are; None for an endless source."""

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """The prompt of an index, or the reason for having none; IndexError past an endless source's end."""

    def fingerprint(self) -> str:
        """Equal only for the same prompts."""

    def mark(self) -> dict[str, Any] | None:
        """``bytes rows sha256`` of the file that was opened; None where there is no one file."""
        return None

    def shorten(self, mark: Mapping[str, Any]) -> None:
        """Read a file only as far as it reached when it had this mark; other rows than then stay as they are."""
        return


class FileSupply(Supply):
    """Rows of a file or set, checked before the start."""

    def __init__(
        self,
        rows: DataRows,
        task: str,
        keys: Keys,
        encoder: Encoder,
        bad: BadRows,
        reopen: Callable[[Mapping[str, Any]], DataRows] | None = None,
    ) -> None:
        self._rows, self._task, self._keys, self.encoder, self._bad = rows, task, keys, encoder, bad
        self._reopen = reopen  # the same rows of a file with this mark
        self.prepares = encoder.media is not None
        check_columns(rows, keys)
        self._scan()

    def count(self) -> int:
        """See `Supply`."""
        return len(self._rows)

    async def prepare(self, indices: Sequence[int]) -> None:
        """Decode the rows' pictures once; :meth:`make` meets what is broken again, and then knows the sizes."""
        await asyncio.to_thread(self._open, indices)

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """See `Supply`."""
        parsed = self._parse(index)
        if parsed is None:
            return BAD
        try:
            prompt = self.encoder.prompt(parsed, id=id, task=self._task, position=position)
        except DataError as error:
            if error.code == "DAT26":
                raise
            self._bad.reject(error, self._rows.raw(index))
            return BAD
        return OVERLONG if prompt is None else prompt

    def fingerprint(self) -> str:
        """See `Supply`."""
        return self._rows.fingerprint()

    def mark(self) -> dict[str, Any] | None:
        """See `Supply`."""
        return self._rows.mark()

    def shorten(self, mark: Mapping[str, Any]) -> None:
        """See `Supply`."""
        current = self.mark()
        if current is None or self._reopen is None or current["bytes"] <= mark["bytes"]:
            return
        rows = self._reopen(mark)
        if (rows.mark() or {}).get("sha256") != mark["sha256"]:
            rows.close()
            return
        self._rows.close()
        self._rows = rows
        say_grown(rows.where(0), mark, current["bytes"])

    def _open(self, indices: Sequence[int]) -> None:
        for index in indices:
            with suppress(DataError):
                self.encoder.open(parse_of(self._rows, index, self._keys))

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
            reasons = Counter(self._bad.where.values())
            raise DataError(
                f"none of {count} rows can be used",
                code="DAT17",
                where=self._rows.where(0),
                why=", ".join(f"{number} x {code}" for code, number in reasons.most_common()),
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


class PluginSupply(Supply):
    """Prompts of a plugin's `slime_prompts`."""

    def __init__(self, source: PromptSource, task: str, encoder: Encoder, bad: BadRows) -> None:
        self._source, self._task, self.encoder, self._bad = source, task, encoder, bad
        self.prepares = hasattr(source, "prepare")
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

    async def prepare(self, indices: Sequence[int]) -> None:
        """See `Supply`."""
        try:
            await self._source.prepare(indices)  # type: ignore[attr-defined]
        except SlimeError:
            raise
        except Exception as error:
            raise self._raised(error, f"{self._task}{list(indices)}") from error

    def make(self, index: int, *, id: str, position: int) -> Prompt | str:
        """See `Supply`."""
        where = f"{self._task}[{index}]"
        prompt = self._call(lambda: self._source.at(index), where)
        if not isinstance(prompt, Prompt):
            raise PluginError(
                f"slime_prompts of task {self._task!r} gave a {type(prompt).__name__} at {index}, not a Prompt",
                code="PLG57",
                where=where,
                fix="return slime_core.Prompt(id='', prompt=..., label=...) from at(position)",
            )
        task = prompt.task if prompt.task != "default" else self._task
        try:
            encoded = self.encoder.of_plugin(prompt, id=id, task=task, position=position, where=where)
        except DataError as error:
            if error.code == "DAT26":
                raise
            self._bad.reject(error, b"")
            return BAD
        return OVERLONG if encoded is None else encoded

    def fingerprint(self) -> str:
        """See `Supply`."""
        state = self._call(self._source.state, f"task {self._task!r}")
        return "plugin:" + json.dumps(state, sort_keys=True, default=str)

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
            raise self._raised(error, where) from error

    def _raised(self, error: Exception, where: str) -> PluginError:
        return PluginError(
            f"slime_prompts of task {self._task!r} raised {type(error).__name__}: {error}",
            code="PLG56",
            where=where,
            fix="fix the plugin's prompt source",
        )


def hash_of(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def equal_pairs(hashes: Hashes) -> list[tuple[int, int]]:
    """Each place whose hash stood at an earlier place, with the last of those, in order of the earlier ones.

    Example:
        equal_pairs(np.array([5, 7, 5, 5], dtype=np.uint64)) == [(0, 2), (2, 3)]
    """
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    return sorted((int(order[i]), int(order[i + 1])) for i in same)


def duplicate_ids(pairs: Sequence[str], where: str) -> DataError:
    """DAT22, with the first pairs."""
    return DataError(
        f"{len(pairs)} ids occur more than once: {'; '.join(pairs[:SHOWN])}",
        code="DAT22",
        where=where,
        fix="give every row its own id, or unset data.id_key: rows are then known by file and line",
    )


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
