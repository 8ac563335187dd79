"""Readers from elsewhere: finished groups are claimed, and acknowledged when they have trained.

    finished -> claimed by one reader -> acknowledged (the samples are trained)
        ^              `- given back, or the lease ran out: finished again

A claim and its rows change in one transaction, so a group is never with two readers. Leases are measured by the
monotonic clock of this process: after a restart all open claims count as run out, and are given to the next reader who
asks. An acknowledgement that comes late is still taken as long as nobody else got the groups.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slime_core.buffer.ledger import SqliteLedger
from slime_core.buffer.rows import OF_PROMPT, of_prompt
from slime_core.buffer.schema import FINISHED, PENDING, TRAINED
from slime_core.errors import StorageError
from slime_core.types import Sample

OPEN, ACKNOWLEDGED, GIVEN_BACK = range(3)
WAITING = f"SELECT id FROM samples WHERE state = {FINISHED} AND claim IS NULL AND step IS NULL ORDER BY serial"


@dataclass(slots=True, frozen=True, kw_only=True)
class Claim:
    """Groups in the order in which they were issued: prompt id to samples in the group's order."""

    id: int
    groups: dict[str, list[Sample]] = field(default_factory=dict)


class Claims:
    """The claims of a ledger that this process owns. ``clock`` is monotonic seconds.

    Example:
        claims = Claims(ledger)
        claim = await claims.claim("trainer-0", count=8, lease_seconds=600)
        ...
        await claims.ack(claim.id)
    """

    def __init__(self, ledger: SqliteLedger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger, self._clock = ledger, clock
        self._due: dict[int, float] = {}  # claim -> when its lease ends

    async def claim(self, reader: str, count: int, lease_seconds: float) -> Claim | None:
        """Up to ``count`` finished groups that nobody else has, oldest first; None where there is none."""
        return await self._ledger.commits.run(lambda: self._claim(reader, count, lease_seconds), rows=count)

    async def ack(self, claim: int) -> None:
        """The groups of a claim have trained. Saying so twice changes nothing.

        Raises:
            StorageError: the claim is unknown, or was given back; its groups may be with another reader.
        """
        await self._ledger.commits.run(lambda: self._end(claim, ACKNOWLEDGED))

    async def release(self, claim: int) -> None:
        """Give the groups of a claim back before its lease ends. Saying so twice changes nothing.

        Raises:
            StorageError: the claim is unknown, or acknowledged.
        """
        await self._ledger.commits.run(lambda: self._end(claim, GIVEN_BACK))

    async def renew(self, claim: int, lease_seconds: float) -> None:
        """Let a lease end ``lease_seconds`` from now.

        Raises:
            StorageError: the claim is not open.
        """
        await self._ledger.commits.run(lambda: self._renew(claim, lease_seconds))

    async def peek(self, count: int) -> dict[str, list[Sample]]:
        """What the next :meth:`claim` of ``count`` groups would give, without taking it."""
        return await self._ledger.commits.run(lambda: self._read(self._free(count)))

    @property
    def _db(self) -> sqlite3.Connection:
        return self._ledger.commits.db

    def _claim(self, reader: str, count: int, lease_seconds: float) -> Claim | None:
        self._expire()
        prompts = self._free(count)
        if not prompts:
            return None
        claim = self._db.execute("INSERT INTO claims (reader) VALUES (?)", (reader,)).lastrowid or 0
        for prompt in prompts:
            self._db.execute(
                f"UPDATE samples SET claim = ? WHERE {OF_PROMPT} AND state = {FINISHED}", (claim, *of_prompt(prompt))
            )
        self._due[claim] = self._clock() + lease_seconds
        return Claim(id=claim, groups=self._read(prompts))

    def _expire(self) -> None:
        now = self._clock()
        for (claim,) in self._db.execute(f"SELECT id FROM claims WHERE state = {OPEN}").fetchall():
            if self._due.get(claim, now) <= now:
                self._end(claim, GIVEN_BACK)

    def _end(self, claim: int, state: int) -> None:
        before = self._state(claim)
        if before == state:
            return
        if before != OPEN:
            raise _over(claim, before)
        self._db.execute("UPDATE claims SET state = ? WHERE id = ?", (state, claim))
        if state == ACKNOWLEDGED:
            self._db.execute(f"UPDATE samples SET state = {TRAINED} WHERE claim = ? AND state = {FINISHED}", (claim,))
        else:
            self._db.execute(f"UPDATE samples SET claim = NULL WHERE claim = ? AND state = {FINISHED}", (claim,))

    def _renew(self, claim: int, lease_seconds: float) -> None:
        if (state := self._state(claim)) != OPEN:
            raise _over(claim, state)
        self._due[claim] = self._clock() + lease_seconds

    def _state(self, claim: int) -> int:
        row = self._db.execute("SELECT state FROM claims WHERE id = ?", (claim,)).fetchone()
        if row is None:
            raise StorageError(f"there is no claim {claim}")
        return int(row[0])

    def _free(self, count: int) -> list[str]:
        found: dict[str, None] = {}
        for prompt in self._waiting():
            if len(found) == count:
                break
            if (
                prompt not in found
                and not self._db.execute(
                    f"SELECT 1 FROM samples WHERE {OF_PROMPT} AND state = {PENDING} LIMIT 1", of_prompt(prompt)
                ).fetchone()
            ):
                found[prompt] = None
        return list(found)

    def _waiting(self) -> Iterator[str]:
        """Prompts with a finished sample that nobody has, oldest first; each may come several times."""
        for (name,) in self._db.execute(WAITING):
            yield str(name).rpartition("-")[0]

    def _read(self, prompts: list[str]) -> dict[str, list[Sample]]:
        return {name: known.samples for name, known in self._ledger.reads.recall(prompts).items()}


def _over(claim: int, state: int) -> StorageError:
    ended = "is acknowledged" if state == ACKNOWLEDGED else "was given back, or its lease ran out"
    return StorageError(f"claim {claim} {ended}", why="a group is with one reader at a time", fix="claim again")
