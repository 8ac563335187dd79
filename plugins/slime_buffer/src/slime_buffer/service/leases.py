"""Who has what, and for how long: open groups that generators work on, ended groups that readers have taken.

A lease is on disk, its end is not: after a start each has its whole length again, on a clock that only goes forward.
A dead claimer's groups are open again when its lease ends. A repeated request gets the same response.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime_buffer.service.tables import BATCH, FINISHED, GROUP, READ, WORK, Stored, Tables, stored

CLAIM_TOKENS = 4 << 20  # of one batch; a single group may have more
COLUMN = {WORK: "lease", BATCH: "claim"}


class Leases:
    """Leases of both kinds, by number. Every method that changes something is one durable transaction."""

    def __init__(self, tables: Tables, clock: Callable[[], float] = time.monotonic) -> None:
        self._tables, self._db, self._rows, self._clock = tables, tables.db, tables.rows, clock
        self._ends = {lease: clock() + seconds for lease, seconds in self._rows("SELECT id, seconds FROM leases")}
        with tables.transaction() as db:
            db.execute("UPDATE groups SET lease = NULL WHERE lease NOT IN (SELECT id FROM leases)")
            db.execute("UPDATE groups SET claim = NULL WHERE unread = 1 AND claim NOT IN (SELECT id FROM leases)")

    def sweep(self) -> int:
        """End the leases whose time is over; the answer is their number."""
        now = self._clock()
        over = [lease for lease, end in self._ends.items() if end <= now]
        if over:
            with self._tables.transaction():
                for lease in over:
                    self._end(lease)
            for lease in over:
                del self._ends[lease]
        return len(over)

    def next_end(self) -> float:
        """Seconds until the next lease ends."""
        return max(0.0, min(self._ends.values(), default=float("inf")) - self._clock())

    def claim_work(
        self, worker: str, request: str, *, run: str | None, task: str | None, count: int, seconds: float
    ) -> list[tuple[int, Stored]]:
        """Open groups, oldest first, each under its own lease."""
        before = self._repeated(WORK, worker, request)
        if before:
            return before
        where, values = ["state = 0", "lease IS NULL", "written < size"], []
        for column, value in (("run", run), ("task", task)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        query = f"SELECT {GROUP} FROM groups WHERE {' AND '.join(where)} ORDER BY serial LIMIT ?"
        groups = [stored(row) for row in self._rows(query, *values, count)]
        if not groups:
            return []
        claims = []
        with self._tables.transaction() as db:
            for group in groups:
                lease = self._insert(WORK, worker, request, seconds)
                db.execute("UPDATE groups SET lease = ? WHERE serial = ?", (lease, group.serial))
                claims.append((lease, group))
        self._begin([lease for lease, _ in claims], seconds)
        return claims

    def missing(self, group: Stored) -> list[int]:
        """Indices of the unwritten rollouts."""
        done = {place for (place,) in self._rows("SELECT place FROM staged WHERE serial = ?", group.serial)}
        return [place for place in range(len(group.names)) if place not in done]

    def engine(self, run: str) -> str:
        """The run's engine as last reported, JSON; empty for none."""
        return str(self._tables.one("SELECT engine FROM runs WHERE name = ?", run))

    def extend(self, leases: Sequence[int], seconds: float) -> list[int]:
        """Leases of work get this length from now; the answer is those that were held."""
        live = [lease for lease in leases if self._holds(WORK, lease)]
        if live:
            with self._tables.transaction() as db:
                db.executemany("UPDATE leases SET seconds = ? WHERE id = ?", [(seconds, lease) for lease in live])
            self._begin(live, seconds)
        return live

    def release(self, leases: Sequence[int]) -> list[int]:
        """Open groups can be claimed again; the answer is the leases that were held."""
        live = [lease for lease in leases if self._holds(WORK, lease)]
        if live:
            with self._tables.transaction():
                for lease in live:
                    self._end(lease)
            for lease in live:
                self._ends.pop(lease, None)
        return live

    def claim_batch(
        self, reader: str, request: str, *, run: str, count: int, seconds: float, restart: bool
    ) -> tuple[int | None, list[Stored]]:
        """Finished groups of a run that no reader has taken, oldest first, under one lease."""
        before = self._repeated(BATCH, reader, request)
        if before:
            return before[0][0], [group for _, group in before]
        if restart:
            self._restart(reader)
        where = "run = ? AND unread = 1 AND claim IS NULL AND coalesce(step, 0) <= 0"
        query = f"SELECT {GROUP}, tokens FROM groups WHERE {where} ORDER BY serial LIMIT ?"
        groups: list[Stored] = []
        total = 0
        for *row, tokens in self._rows(query, run, count):
            total += tokens
            if groups and total > CLAIM_TOKENS:
                break
            groups.append(stored(tuple(row)))
        if not groups:
            return None, []
        with self._tables.transaction() as db:
            lease = self._insert(BATCH, reader, request, seconds)
            db.executemany("UPDATE groups SET claim = ? WHERE serial = ?", [(lease, g.serial) for g in groups])
        self._begin([lease], seconds)
        return lease, groups

    def settle(
        self, lease: int, keys: Sequence[tuple[str, int]] | None, *, acknowledge: bool
    ) -> tuple[int, list[int]]:
        """Acknowledge groups of a claim, or give them back: how many, and the steps that the ledger must make.

        Groups that were acknowledged in this claim before count again, and change nothing.
        """
        query = "SELECT serial, id, attempt, state, unread, step, outcome FROM groups WHERE claim = ? ORDER BY serial"
        selected = None if keys is None else set(keys)
        rows = [row for row in self._rows(query, lease) if selected is None or (row[1], row[2]) in selected]
        step, steps = 0, set()
        with self._tables.transaction() as db:
            for serial, _, _, state, unread, known_step, outcome in rows:
                if not unread:
                    continue
                if (known_step or 0) > 0:  # the ledger's update had failed
                    steps.add(known_step)
                elif not acknowledge:
                    db.execute("UPDATE groups SET claim = NULL WHERE serial = ?", (serial,))
                elif state == FINISHED and known_step is None and any(parts for parts, _ in _outcome(outcome)):
                    step = step or self._next_step()
                    db.execute("UPDATE groups SET step = ? WHERE serial = ?", (step, serial))
                    steps.add(step)
                else:
                    moves = "state = iif(state = 1, 3, state), unread = 0, spec = '{}'"
                    db.execute(f"UPDATE groups SET {moves} WHERE serial = ?", (serial,))
            remaining_query = "SELECT 1 FROM groups WHERE claim = ? AND unread = 1 AND coalesce(step, 0) <= 0 LIMIT 1"
            if not self._rows(remaining_query, lease):
                db.execute("DELETE FROM leases WHERE id = ?", (lease,))
                self._ends.pop(lease, None)
        return len(rows), sorted(steps)

    def _next_step(self) -> int:
        highest, lowest = (self._tables.one(f"SELECT coalesce({f}(step), 0) FROM groups") for f in ("max", "min"))
        return 1 + max(int(highest), -int(lowest))

    def unfinished_steps(self) -> list[int]:
        """Acknowledgements that the ledger may not know."""
        query = "SELECT DISTINCT step FROM groups WHERE step > 0 AND state = ? AND unread = 1 ORDER BY step"
        return [step for (step,) in self._rows(query, FINISHED)]

    def of_step(self, step: int) -> list[Stored]:
        """The groups of an acknowledgement."""
        return [stored(row) for row in self._rows(f"SELECT {GROUP} FROM groups WHERE step = ? ORDER BY serial", step)]

    def read(self, step: int) -> None:
        """The ledger knows the acknowledgement."""
        query = "UPDATE groups SET state = ?, unread = 0, spec = '{}' WHERE step = ? AND state = ?"
        with self._tables.transaction() as db:
            db.execute(query, (READ, step, FINISHED))

    def _restart(self, reader: str) -> None:
        leases = [lease for (lease,) in self._rows("SELECT id FROM leases WHERE kind = 1 AND owner = ?", reader)]
        if leases:
            with self._tables.transaction():
                for lease in leases:
                    self._end(lease)
            for lease in leases:
                self._ends.pop(lease, None)

    def _repeated(self, kind: int, owner: str, request: str) -> list[tuple[int, Stored]]:
        """What this request still holds."""
        query = (
            f"SELECT leases.id, {', '.join('groups.' + name for name in GROUP.split(', '))} "
            f"FROM leases JOIN groups ON groups.{COLUMN[kind]} = leases.id "
            "WHERE kind = ? AND owner = ? AND request = ? ORDER BY leases.id, serial"
        )
        return [(lease, stored(tuple(row))) for lease, *row in self._rows(query, kind, owner, request)]

    def _holds(self, kind: int, lease: int) -> bool:
        query = f"SELECT 1 FROM leases JOIN groups ON groups.{COLUMN[kind]} = leases.id WHERE leases.id = ? LIMIT 1"
        return bool(self._rows(query, lease))

    def _insert(self, kind: int, owner: str, request: str, seconds: float) -> int:
        query = "INSERT INTO leases (kind, owner, request, seconds) VALUES (?, ?, ?, ?)"
        lease = self._db.execute(query, (kind, owner, request, seconds)).lastrowid
        assert lease is not None  # autoincremented
        return lease

    def _end(self, lease: int) -> None:
        self._db.execute("UPDATE groups SET lease = NULL WHERE lease = ?", (lease,))
        self._db.execute("UPDATE groups SET claim = NULL WHERE claim = ? AND unread = 1", (lease,))
        self._db.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def _begin(self, leases: Sequence[int], seconds: float) -> None:
        for lease in leases:
            self._ends[lease] = self._clock() + seconds


def _outcome(text: str) -> list[Any]:
    outcome: list[Any] = json.loads(text or "[]")
    return outcome
