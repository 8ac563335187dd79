"""Groups on disk and their transitions: requested, pushed, written, finished, dropped.

Every method is durable when it returns. Where the ledger has to be told of a group's state, ``told`` is 0 until it
was: `BufferService` then does so again after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from slime_buffer.service.tables import (
    DROPPED,
    FINISHED,
    OPEN,
    READ,
    BufferLimits,
    Change,
    Incoming,
    QueueFull,
    Tables,
)

RESTARTED = "restarted"


class Known(NamedTuple):
    """What is on disk of a group that a request names."""

    serial: int
    state: int = OPEN
    told: int = 0
    step: int | None = None

    @property
    def untold(self) -> list[int]:
        """Its serial, where the ledger may not know its state (a request that failed half-way is repeated)."""
        return [] if self.told else [self.serial]


class Store:
    """What happens to groups, one transaction a method; repeating it changes nothing."""

    def __init__(self, tables: Tables, limits: BufferLimits) -> None:
        self._tables, self._db, self._rows, self._limits = tables, tables.db, tables.rows, limits

    # -- groups come

    def ask(self, run: str, engine: str | None, specs: Sequence[dict[str, Any]]) -> Change:
        """Add open groups; known ones that have ended are unread again, and their earlier attempts are dropped.

        Raises:
            Full: too many open groups, or runs.
        """
        change = Change()
        with self._tables.transaction() as db:
            self._require_run(run)
            if engine is not None:
                db.execute("UPDATE runs SET engine = ? WHERE name = ?", (engine, run))
            (count,) = db.execute("SELECT count(*) FROM groups WHERE run = ? AND state = 0", (run,)).fetchone()
            for spec in specs:
                stored = self._find(run, spec["id"], spec["attempt"])
                if stored is None:
                    count += 1
                    names = [sample["id"] for sample in spec["samples"]]
                    change.untold.append(self._insert(run, spec, names))
                    change.untold += self._supersede(run, spec["id"], spec["attempt"])
                else:
                    change.untold += stored.untold
                    self._offer_again(stored, json.dumps(spec))
                state, reason = self._standing(run, spec["id"], spec["attempt"])
                change.standing.append((spec["id"], spec["attempt"], state, reason))
            if change.untold and count > self._limits.open:
                raise QueueFull("groups that are open", count)
        return change

    def push(self, run: str, groups: Sequence[tuple[dict[str, Any], Sequence[Incoming]]]) -> Change:
        """Add whole groups that no run requested; known ones are left unchanged.

        Raises:
            Full: too much is unread, or too many runs.
        """
        change = Change()
        with self._tables.transaction() as db:
            self._require_room(run)
            self._require_run(run)
            for spec, rollouts in groups:
                stored = self._find(run, spec["id"], spec["attempt"])
                if stored is None:
                    serial = self._insert(run, spec, [rollout.sample for rollout in rollouts])
                    for place, rollout in enumerate(rollouts):
                        self._stage(serial, place, rollout)
                    db.execute("UPDATE groups SET written = size WHERE serial = ?", (serial,))
                    stored = Known(serial)
                if stored.state == OPEN:
                    change.untold += stored.untold
                    change.complete += self._complete(stored.serial)
                state, reason = self._standing(run, spec["id"], spec["attempt"])
                change.standing.append((spec["id"], spec["attempt"], state, reason))
        return change

    def write(self, run: str, rollouts: Sequence[Incoming]) -> Change:
        """Rollouts of open groups; ``complete`` names the groups that now have all of theirs.

        Raises:
            Full: too much of the run is unread.
        """
        change = Change()
        complete: dict[int, None] = {}
        with self._tables.transaction():
            self._require_room(run)
            for rollout in rollouts:
                change.verdicts.append(self._write(run, rollout, complete))
        change.complete = list(complete)
        return change

    def finished(self, serial: int) -> None:
        """The ledger has all of an open group: it may be read."""
        with self._tables.transaction() as db:
            rows = db.execute(
                "SELECT place, count(body), sum(tokens), max(failed) FROM staged WHERE serial = ? "
                "GROUP BY place ORDER BY place",
                (serial,),
            ).fetchall()
            outcome = json.dumps([[parts, failed] for _, parts, _, failed in rows])
            moved = db.execute(
                "UPDATE groups SET state = 1, told = 1, unread = 1, lease = NULL, outcome = ?, tokens = ? "
                "WHERE serial = ? AND state = 0",
                (outcome, sum(row[2] for row in rows), serial),
            ).rowcount
            if moved:
                db.execute("DELETE FROM staged WHERE serial = ?", (serial,))

    def drop(self, run: str, keys: Sequence[tuple[str, int]], reason: str, tell: bool) -> Change:
        """Open and unread groups are dropped; others stay as they are."""
        change = Change()
        with self._tables.transaction() as db:
            for name, attempt in keys:
                stored = self._find(run, name, attempt)
                if stored is None:
                    continue
                if stored.state in (OPEN, FINISHED) and (stored.step or 0) <= 0:
                    self._set_dropped(stored.serial, reason, tell)
                    change.untold.append(stored.serial)
                elif stored.state == DROPPED:
                    change.untold += stored.untold
                    if not tell:
                        db.execute("UPDATE groups SET unread = 0, claim = NULL WHERE serial = ?", (stored.serial,))
                state, cause = self._standing(run, name, attempt)
                change.standing.append((name, attempt, state, cause))
        return change

    # -- the ledger is told

    def untold(self) -> list[int]:
        """Serials whose state the ledger may not know."""
        return [serial for (serial,) in self._rows("SELECT serial FROM groups WHERE told = 0 ORDER BY serial")]

    def all_complete(self) -> list[int]:
        """Serials of open groups that have all their rollouts."""
        query = "SELECT serial FROM groups WHERE state = 0 AND written = size ORDER BY serial"
        return [serial for (serial,) in self._rows(query)]

    def acknowledge(self, serials: Sequence[int]) -> None:
        """The ledger knows these groups' states."""
        with self._tables.transaction() as db:
            db.executemany("UPDATE groups SET told = 1 WHERE serial = ?", [(serial,) for serial in serials])

    def staged(self, serial: int) -> list[tuple[int, int, bytes | None, str]]:
        """``place, part, body, failed`` of the rollouts of a group that is not finished, in order."""
        return self._rows("SELECT place, part, body, failed FROM staged WHERE serial = ? ORDER BY 1, 2", serial)

    # -- inside a transaction

    def _insert(self, run: str, spec: dict[str, Any], names: list[str]) -> int:
        row = (run, spec["id"], spec["attempt"], spec["task"], json.dumps(spec), json.dumps(names), len(names))
        query = "INSERT INTO groups (run, id, attempt, task, spec, names, size) VALUES (?, ?, ?, ?, ?, ?, ?)"
        serial = self._db.execute(query, row).lastrowid  # autoincremented
        assert serial is not None
        return serial

    def _supersede(self, run: str, name: str, attempt: int) -> list[int]:
        """Drop open and unread earlier attempts."""
        query = (
            "SELECT serial FROM groups WHERE run = ? AND id = ? AND attempt < ? AND state IN (0, 1) "
            "AND coalesce(step, 0) <= 0"
        )
        serials = [serial for (serial,) in self._db.execute(query, (run, name, attempt))]
        for serial in serials:
            self._set_dropped(serial, RESTARTED, False)
        return serials

    def _set_dropped(self, serial: int, reason: str, tell: bool) -> None:
        """Mark a group as dropped; one that was read before stays read: the ledger has it as trained."""
        query = (
            "UPDATE groups SET state = iif(step IS NULL, 2, 3), told = step IS NOT NULL, unread = ?, reason = ?, "
            "lease = NULL, claim = NULL WHERE serial = ?"
        )
        self._db.execute(query, (int(tell), reason, serial))
        self._db.execute("DELETE FROM staged WHERE serial = ?", (serial,))

    def _offer_again(self, stored: Known, spec: str) -> None:
        """A group that is requested after its end counts as unread."""
        if stored.state == READ:
            query = (
                "UPDATE groups SET state = 1, unread = 1, claim = NULL, step = -abs(step), spec = ? WHERE serial = ?"
            )
            self._db.execute(query, (spec, stored.serial))
        elif stored.state == DROPPED:
            self._db.execute("UPDATE groups SET unread = 1, spec = ? WHERE serial = ?", (spec, stored.serial))

    def _write(self, run: str, rollout: Incoming, complete: dict[int, None]) -> tuple[str, str]:
        stored = self._find(run, rollout.group, rollout.attempt)
        if stored is None:
            return "refused", "this group was not requested"
        serial = stored.serial
        if stored.state == DROPPED:
            return "refused", "the group was dropped"
        if stored.state != OPEN:
            return "known", ""
        ((names,),) = self._rows("SELECT names FROM groups WHERE serial = ?", serial)
        if rollout.sample not in (samples := json.loads(names)):
            return "refused", "the group has no such sample"
        place = samples.index(rollout.sample)
        fresh = not self._rows("SELECT 1 FROM staged WHERE serial = ? AND place = ? LIMIT 1", serial, place)
        if fresh:
            self._stage(serial, place, rollout)
            self._db.execute("UPDATE groups SET written = written + 1 WHERE serial = ?", (serial,))
        complete.update(dict.fromkeys(self._complete(serial)))
        return "stored" if fresh else "known", ""

    def _stage(self, serial: int, place: int, rollout: Incoming) -> None:
        query = "INSERT INTO staged VALUES (?, ?, ?, ?, ?, ?)"
        for part, (body, tokens) in enumerate(zip(rollout.bodies, rollout.tokens, strict=True)):
            self._db.execute(query, (serial, place, part, body, tokens, ""))
        if rollout.failed:
            self._db.execute(query, (serial, place, 0, None, 0, rollout.failed))

    def _complete(self, serial: int) -> list[int]:
        return [s for (s,) in self._rows("SELECT serial FROM groups WHERE serial = ? AND written = size", serial)]

    def _find(self, run: str, name: str, attempt: int) -> Known | None:
        query = "SELECT serial, state, told, step FROM groups WHERE run = ? AND id = ? AND attempt = ?"
        rows = self._rows(query, run, name, attempt)
        return Known(*rows[0]) if rows else None

    def _standing(self, run: str, name: str, attempt: int) -> tuple[int, str]:
        query = "SELECT state, reason FROM groups WHERE run = ? AND id = ? AND attempt = ?"
        ((state, reason),) = self._rows(query, run, name, attempt)
        return state, reason

    def _require_run(self, run: str) -> None:
        if not self._rows("SELECT 1 FROM runs WHERE name = ?", run):
            ((count,),) = self._rows("SELECT count(*) FROM runs")
            if count >= self._limits.runs:
                raise QueueFull("runs", count)
            self._db.execute("INSERT INTO runs VALUES (?, '')", (run,))

    def _require_room(self, run: str) -> None:
        ((count,),) = self._rows("SELECT count(*) FROM groups WHERE run = ? AND unread = 1", run)
        if count >= self._limits.unread:
            raise QueueFull("unread groups", count)
