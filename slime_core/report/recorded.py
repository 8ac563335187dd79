"""What a run recorded: its ledger opened to read, step by step. Nothing is written and no lock is taken.

    ledger.sqlite (mode=ro) -> steps, members of a step -> samples from segments/, where they were not pruned

The run may still be running; later commits are not seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from slime_core.errors import StorageError
from slime_core.ledger.codec import decode
from slime_core.ledger.schema import sqlite_error
from slime_core.ledger.segments import RecordPlace, Segments
from slime_core.report.history import ledger_of, read_only
from slime_core.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from slime_core.report.rundir import RunDir

STEPS = "SELECT version, stage, samples, trained, fingerprint FROM steps ORDER BY version"
MEMBERS = """
SELECT s.id, s.attempt, s.position, s.rollout, s.reward, s.response_length, s.segment, s.offset, s.length, s.crc32
FROM members m JOIN samples s ON s.serial = m.serial WHERE m.version = ? ORDER BY m.place
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class Step:
    """A journaled step."""

    version: int  # that it made
    stage: str
    samples: int
    trained: bool  # False where the run ended, or is, between the journal and the optimizer step
    fingerprint: str  # of the weights that it made; empty where none was taken


@dataclass(slots=True, frozen=True, kw_only=True)
class StepSample:
    """A sample of a step, as the ledger's row has it."""

    id: str
    attempt: int
    position: int
    rollout: int | None
    reward: float | None
    response_length: int
    place: RecordPlace | None  # of its payload; None where it was pruned


class Recorded:
    """The ledger of a run to read; enter it with ``with``.

    Example:
        with open_recorded(run_dir) as recorded:
            members = recorded.members(7)
            samples = recorded.samples(members)
    """

    def __init__(self, run_dir: RunDir, ledger: Path) -> None:
        self.path = ledger
        self._folder = run_dir.segments
        self._segments: Segments | None = None
        if not ledger.is_file():
            raise StorageError("the run has no ledger", code="STO111", where=str(ledger))
        try:
            self._db = read_only(run_dir, ledger)
            self._db.execute("SELECT 1 FROM steps LIMIT 1").fetchall()
        except sqlite3.Error as error:
            raise sqlite_error(error, ledger) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._db.close()
        if self._segments is not None:
            self._segments.close()

    def steps(self) -> dict[int, Step]:
        """Every journaled step by the version that it made.

        Raises:
            StorageError: the ledger is damaged or of another format.
        """
        try:
            rows = self._db.execute(STEPS).fetchall()
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error
        return {
            version: Step(version=version, stage=stage, samples=samples, trained=bool(trained), fingerprint=mark)
            for version, stage, samples, trained, mark in rows
        }

    def members(self, version: int) -> list[StepSample]:
        """The samples of a step, in the order in which it trained on them; none where it was not journaled.

        Raises:
            StorageError: as :meth:`steps`.
        """
        try:
            rows = self._db.execute(MEMBERS, (version,)).fetchall()
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error
        members = []
        for name, attempt, position, rollout, reward, length, segment, offset, size, crc in rows:
            place = None if segment is None else RecordPlace(segment=segment, offset=offset, length=size, crc32=crc)
            members.append(
                StepSample(
                    id=name,
                    attempt=attempt,
                    position=position if position is not None else -1,
                    rollout=rollout,
                    reward=reward,
                    response_length=length or 0,
                    place=place,
                )
            )
        return members

    def samples(self, members: Sequence[StepSample]) -> list[Sample]:
        """The samples of rows.

        Raises:
            StorageError: STO111 a payload was pruned or its file is missing, STO112 it is damaged.
        """
        if not members:
            return []
        lost_ids = [member.id for member in members if member.place is None]
        if lost_ids or not self._folder.is_dir():
            raise StorageError(
                f"{len(lost_ids) or len(members)} of the step's {len(members)} samples have no payload any more",
                code="STO111",
                where=str(self.path),
                why="report.ledger_keep_steps pruned them" if lost_ids else f"{self._folder} is gone",
            )
        if self._segments is None:
            self._segments = Segments(self._folder)
        return [decode(self._segments.read(m.place)) for m in members if m.place is not None]


def open_recorded(run_dir: RunDir) -> Recorded:
    """The ledger of a run directory, to read; where it lies elsewhere and that is not here, its newest copy.

    Raises:
        StorageError: STO111 no ledger, STO117 it is damaged.
    """
    return Recorded(run_dir, ledger_of(run_dir))


def groups_of(members: Sequence[StepSample], samples: Sequence[Sample]) -> list[Group]:
    """Samples of a step as the groups that trained, in order; a prompt as far as its samples record it."""
    by_position: dict[int, list[Sample]] = {}
    for member, sample in zip(members, samples, strict=True):
        by_position.setdefault(member.position, []).append(sample)
    groups = []
    for position, own_samples in by_position.items():
        first = own_samples[0]
        prompt = Prompt(
            id=first.id.rpartition("-")[0],
            task=first.task,
            position=position,
            prompt=first.prompt,
            tokens=first.tokens[: first.prompt_length],
            label=first.label,
        )
        rollouts: dict[int, list[int]] = {}
        for place, sample in enumerate(own_samples):
            rollouts.setdefault(sample.rollout_id if sample.rollout_id is not None else place, []).append(place)
        groups.append(Group(prompt=prompt, samples=own_samples, rollouts=rollouts))
    return groups
