"""The samples of a run: a table of all of them, and pages with the texts and tokens of groups.

    ledger.sqlite -> a row a sample      segments/ -> prompt, response, tokens, the engine's log-probs
    report/       -> the trainer's log-probs and advantages, of a run with `--plugin report`

A group is all samples of one prompt; groups are numbered by the first row that the ledger has of them, so numbers stay
when a run goes on. A page is a record of the ledger's form (`slime_core.ledger.codec.pack`), deflated:

    header   samples: [id attempt fate step prompt response label status reward metadata loss_mask weight_versions ...]
             vocabulary: {ids, texts}, a character a byte
    arrays   tokens of all samples, end to end; log_probs of all response tokens, likewise policy, advantages and what
             else was recorded; NaN where a sample has none

Masks and versions are run lengths, [value, how often]; a field that has the default of `Sample` is left out, and so is
a prompt that is the one before it. A figure in metadata, label or reward that is not finite is null.
"""

from __future__ import annotations

import math
import mmap
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.ledger.codec import pack, unpack
from slime_core.ledger.schema import STATES
from slime_core.ledger.segments import RecordPlace, segment_name
from slime_core.media.references import flat
from slime_core.report.history import open_ledger
from slime_core.report.rundir import RunDir
from slime_report.data import config_of, figure
from slime_report.page import compressed, deflated
from slime_report.recorder import RECORDED, read_record, recorded_versions
from slime_report.thumbnails import Thumbnails
from slime_report.tokens import Vocabulary

ROWS = """
SELECT s.id, s.attempt, s.state, coalesce(r.name, ''), s.rollout, s.version, s.step, s.reward, s.tokens,
       s.response_length, s.segment, s.offset, s.length, s.crc32
FROM samples s LEFT JOIN reasons r ON r.id = s.reason ORDER BY s.serial
"""
NAMED = ("fate", "status", "task", "role", "model")
"""Columns of the table that hold places in a list of names."""
FIELDS = (
    *("prompt", "response", "response_length", "label", "metadata", "status", "task", "role", "model", "session_id"),
    *("loss_mask", "weight_versions", "temperature", "remove_sample", "train_metadata"),
)
"""Fields of a stored sample that a page has."""
NONE: NDArray[Any] = np.zeros(0, "<f4")
PAGE_BYTES = 384 << 10
"""Payloads of a page, about."""


@dataclass(slots=True, kw_only=True)
class BookRow:
    """A sample as the ledger's row has it."""

    id: str
    group: int
    attempt: int
    fate: str  # trained, pending, finished, or "dropped: REASON"
    rollout: int | None
    version: int | None  # lowest weights that made a token
    step: int | None  # version that its step makes
    reward: float | None
    tokens: int
    response_length: int
    place: RecordPlace | None  # of its payload


class SampleBook:
    """All samples of a run; :meth:`refresh` reads what has changed since.

    Example:
        book = SampleBook(RunDir.open(Path("runs/demo-0")))
        table, page = book.table(), book.page([0, 1])          # page: bytes, of the first two groups
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.rows: list[BookRow] = []
        self.groups: list[str] = []  # prompt ids, by number
        self.members: list[list[int]] = []  # places in rows, by group
        self.damage: dict[tuple[str, int], str] = {}  # what cannot be read, by id and attempt
        self.failure = ""  # of reading the ledger
        self._numbers: dict[str, int] = {}
        self._heads: dict[RecordPlace, tuple[Any, ...]] = {}  # of payloads
        self._mapped: dict[int, mmap.mmap] = {}
        self._record: tuple[int, dict[str, Any]] = (0, {})  # the last step's that was read
        self._vocabulary: Vocabulary | None = None
        self._thumbnails = Thumbnails(config_of(run_dir))
        self.recorded: set[int] = set()  # steps with the trainer's figures
        self.refresh()

    def refresh(self) -> None:
        """Read the rows again."""
        self.rows, self.members = [], [[] for _ in self.groups]
        self.damage, self.failure = {}, ""
        self._mapped.clear()  # a file that was pruned since is let go
        self.recorded = set(recorded_versions(self.run_dir.path))
        try:
            with closing(open_ledger(self.run_dir)) as database:
                for row in database.execute(ROWS):
                    self._add(*row)
        except sqlite3.Error as error:
            self.failure = str(error)

    def table(self) -> dict[str, Any]:
        """All samples as columns: ``columns``, ``names`` of those in :data:`NAMED`, and ``groups``, their prompt ids.

        ``log_prob`` is the mean of the engine's over the response; ``length`` and ``tokens`` are tokens.
        """
        heads = [self._head(row) for row in self.rows]
        texts = {
            "fate": [row.fate for row in self.rows],
            **{name: [head[place] for head in heads] for place, name in enumerate(NAMED[1:])},
        }
        names = {name: sorted(set(values)) for name, values in texts.items()}
        columns: dict[str, list[Any]] = {}
        for name, values in texts.items():
            places = {text: place for place, text in enumerate(names[name])}
            columns[name] = [places[text] for text in values]
        for name in ("id", "group", "step", "version", "rollout", "attempt", "tokens"):
            columns[name] = [getattr(row, name) for row in self.rows]
        columns["length"] = [row.response_length for row in self.rows]
        columns["reward"] = [figure(row.reward) for row in self.rows]
        columns["log_prob"] = [head[-1] for head in heads]
        return {"columns": columns, "names": names, "groups": self.groups}

    def page(self, groups: Iterable[int]) -> bytes:
        """Texts, tokens and figures of groups, as the module's docstring has it."""
        samples: list[dict[str, Any]] = []
        tokens: list[NDArray[Any]] = []
        figures: list[dict[str, NDArray[Any]]] = []
        prompt: Any = None
        pictures: dict[str, int] = {}  # thumbnail -> place
        for row in (self.rows[place] for group in groups for place in self.members[group]):
            fields, arrays = self._payload(row)
            sample = {
                "id": row.id,
                "attempt": row.attempt,
                "group": row.group,
                "fate": row.fate,
                "step": row.step,
                "reward": row.reward,
                "rollout": row.rollout,
            }
            sample |= {name: fields[name] for name in FIELDS if name in fields}
            if problem := self.damage.get((row.id, row.attempt)):
                sample["damage"] = problem
            if isinstance(fields.get("reward"), dict):
                sample["reward"] = fields["reward"]
            if media := fields.get("multimodal_inputs"):
                small = map(self._thumbnails.of, flat(media.get("images", []) + media.get("videos", [])))
                sample["pictures"] = [pictures.setdefault(one, len(pictures)) for one in small]
            before, prompt = prompt, fields.get("prompt", "")
            sample["prompt"] = prompt
            if prompt == before:
                del sample["prompt"]
            tokens.append(arrays.get("tokens", NONE).astype("<i4", copy=False))
            sample["tokens"], length = len(tokens[-1]), int(fields.get("response_length", 0))
            columns = {"log_probs": arrays.get("rollout_log_probs", NONE), **self._recorded(row)}
            if not columns["log_probs"].any():  # of replies that the data brought
                del columns["log_probs"]
            figures.append({name: values for name, values in columns.items() if len(values) == length})
            samples.append(finite(sample))
        names = [name for name in ("log_probs", *RECORDED) if any(name in columns for columns in figures)]
        joined = np.concatenate([NONE.astype("<i4"), *tokens])
        ids = np.unique(joined).tolist()
        vocabulary = {"ids": ids, "texts": self._texts(ids)}
        header = {"samples": samples, "vocabulary": vocabulary, "pictures": list(pictures)}
        parts = pack(header, [("tokens", joined), *((name, _joined(name, figures, samples)) for name in names)])
        return deflated(b"".join(parts))

    def bytes_of(self, group: int) -> int:
        """Bytes of a group's payloads; 0 where nothing of it is stored."""
        places = [self.rows[place].place for place in self.members[group]]
        return sum(place.length for place in places if place is not None)

    def notices(self) -> list[str]:
        """Sentences on what is missing."""
        sentences = []
        if self.failure:
            sentences.append(f"the ledger cannot be read ({self.failure}): samples are left out")
        if self.damage:
            sentences.append(
                f"the texts and tokens of {len(self.damage)} samples are damaged or gone: a sample says why"
            )
        if self.rows and not self.recorded:
            sentences.append(
                "the trainer's log-probs and the advantages of tokens were not recorded: "
                "slime run --plugin report records them"
            )
        return sentences

    def _add(self, name: str, attempt: int, state: int, reason: str, *rest: Any) -> None:
        rollout, version, step, reward, tokens, length, *place = rest
        prompt = name.rpartition("-")[0] or name
        group = self._numbers.setdefault(prompt, len(self.groups))
        if group == len(self.groups):
            self.groups.append(prompt)
            self.members.append([])
        self.members[group].append(len(self.rows))
        self.rows.append(
            BookRow(
                id=name,
                group=group,
                attempt=attempt,
                fate=f"dropped: {reason}" if STATES[state] == "dropped" else STATES[state],
                rollout=rollout,
                version=version,
                step=step,
                reward=reward,
                tokens=tokens or 0,
                response_length=length or 0,
                place=None if place[0] is None else RecordPlace(*place),
            )
        )

    def _head(self, row: BookRow) -> tuple[Any, ...]:
        """Status, task, role, model and mean log-prob; kept, since a payload never changes."""
        if row.place is None:
            return NO_HEAD
        if row.place not in self._heads:
            self._payload(row)
        return self._heads.get(row.place, NO_HEAD)

    def _payload(self, row: BookRow) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Fields and arrays of a stored sample; empty, and noted as damage, where they cannot be read."""
        if row.place is None:
            return {}, {}
        try:
            fields, arrays = unpack(self._body(row.place))
        except (OSError, ValueError) as error:
            self.damage[row.id, row.attempt] = str(error)
            return {}, {}
        log_probs = arrays.get("rollout_log_probs")
        mean = (
            figure(float(np.add.reduce(log_probs)) / log_probs.size)
            if log_probs is not None and log_probs.size
            else None
        )
        head = (*(fields.get(name, otherwise) for name, otherwise in DEFAULTS), mean)
        self._heads[row.place] = head
        return fields, arrays

    def _body(self, place: RecordPlace) -> memoryview:
        """The bytes of a record; segments are mapped, since a report reads nearly all of them.

        Raises:
            OSError, ValueError: the file is gone or cut short, or holds other bytes than were written.
        """
        end = place.offset + place.length
        mapped = self._mapped.get(place.segment)
        if mapped is None or len(mapped) < end:  # a segment of a running run grows
            with (self.run_dir.segments / segment_name(place.segment)).open("rb") as file:
                mapped = self._mapped[place.segment] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        body = memoryview(mapped)[place.offset : end]
        if zlib.crc32(body) != place.crc32 or len(body) != place.length:
            raise ValueError(f"{segment_name(place.segment)} holds other bytes than were written")
        return body

    def _recorded(self, row: BookRow) -> dict[str, NDArray[Any]]:
        """The trainer's figures of a sample's response tokens."""
        if row.step is None or row.step not in self.recorded:
            return {}
        if self._record[0] != row.step:
            self._record = (row.step, read_record(self.run_dir.path, row.step))
        columns: dict[str, NDArray[Any]] = self._record[1].get(row.id, {})
        return columns

    def _texts(self, ids: Sequence[int]) -> list[str]:
        if self._vocabulary is None:
            model = config_of(self.run_dir).get("rollout.hf_checkpoint", "")
            self._vocabulary = Vocabulary.of([model, self.run_dir.final])
        return self._vocabulary.texts(ids)


DEFAULTS = (("status", "pending"), ("task", "default"), ("role", "policy"), ("model", ""))
"""Of `Sample`, whose stored form leaves them out."""
NO_HEAD = (*("" for _ in DEFAULTS), None)


def finite(value: Any) -> Any:
    """A JSON value with None for each figure that is not finite: browsers read no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _joined(name: str, figures: Sequence[dict[str, NDArray[Any]]], samples: Sequence[dict[str, Any]]) -> NDArray[Any]:
    """One column of all samples, float32; NaN where a sample has none."""
    parts = [
        columns[name] if name in columns else np.full(sample.get("response_length", 0), math.nan)
        for columns, sample in zip(figures, samples, strict=True)
    ]
    return np.concatenate(parts).astype("<f4")


def choose_groups(book: SampleBook, limit: int) -> tuple[list[int], str]:
    """Groups whose texts and tokens go into a report, of ``limit`` bytes of payload at most, and that policy in words.

    All of them where they fit; else every k-th group, for the smallest k that fits.
    """
    sizes = [book.bytes_of(group) for group in range(len(book.groups))]
    stored = [group for group, size in enumerate(sizes) if size]
    stride = 1
    while sum(sizes[group] for group in stored[::stride]) > limit and stride < len(stored):
        stride += 1
    groups = stored[::stride]
    policy = f"texts and tokens are here of every {stride}th group, {len(groups)} of {len(stored)}; all have a row"
    return groups, policy if stride > 1 else ""


def pages_of(book: SampleBook, groups: Iterable[int]) -> Iterator[list[int]]:
    """Groups of a page each, of about :data:`PAGE_BYTES`."""
    page: list[int] = []
    size = 0
    for group in groups:
        page.append(group)
        size += book.bytes_of(group)
        if size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def sample_blocks(book: SampleBook, run: int, limit: int) -> Iterator[tuple[str, bytes]]:
    """The blocks of a run's samples in a report: its pages, then its table, which says what page a group is on.

    ``limit`` is what they may take in the file, in bytes, about: how far texts shrink is tried on some groups.
    """
    stored = [group for group in range(len(book.groups)) if book.bytes_of(group)]
    probe = stored[:: len(stored) // 64 + 1]
    share = len(book.page(probe)) * 4 / 3 / max(1, sum(map(book.bytes_of, probe)))
    groups, policy = choose_groups(book, int(limit / max(share, 0.01)))
    page_of = [-1] * len(book.groups)
    for number, page in enumerate(pages_of(book, groups)):
        for group in page:
            page_of[group] = number
        yield f"samples-{run}-{number}", book.page(page)
    yield f"samples-{run}", compressed({**book.table(), "pages": page_of, "policy": policy, "notices": book.notices()})
