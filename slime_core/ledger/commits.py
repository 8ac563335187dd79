"""Group commit: calls in, answers out, one durable transaction for all calls that wait together.

A call that finds the disk idle starts at once, so no timer ever delays a lone writer; what arrives while a commit is
on its way shares the next one. A transaction takes calls in the order in which they came: those that wait when it
begins, and those that come while it works, for ``SECONDS`` at most; never more than ``ROWS`` rows. Each call runs
behind a savepoint and fails alone. Payloads are made durable before the commit that names them, and no answer is given
before it, a reader's neither.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slime_core.errors import StorageError
from slime_core.failpoints import failpoint
from slime_core.ledger.owner import Owner
from slime_core.ledger.schema import connect, sqlite_error
from slime_core.ledger.segments import Segments

R = TypeVar("R")
ROWS = 256
SECONDS = 0.005


class Points(NamedTuple):
    """Failpoints of a call: before it, its payloads written, they are durable, it is committed."""

    before: str = ""
    written: str = ""
    synced: str = ""
    after: str = ""


@dataclass(slots=True)
class _Call:
    work: Callable[[], Any]
    rows: int
    points: Points
    done: Future[Any] = field(default_factory=Future)
    answer: Any = None
    error: Exception | None = None


class Commits:
    """The connection of the process that owns ``path``, on a thread of its own.

    ``forget`` is called there after a rollback.

    Example:
        commits = Commits(path, segments, forget=cache.clear)
        count = await commits.run(lambda: commits.db.execute("SELECT 1").fetchone())
    """

    def __init__(self, path: Path, segments: Segments, forget: Callable[[], None] = lambda: None) -> None:
        self.path, self.segments, self._forget = path, segments, forget
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._waiting: deque[_Call] = deque()
        self._woken = False
        self.made = 0  # transactions that were committed
        self.closed = False
        try:
            self.owner = Owner(path)
            try:
                self.db = self._thread.submit(connect, path, self.owner.marks).result()
            except BaseException:
                self.owner.release()
                raise
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Callable[[], R], *, rows: int = 1, points: Points = Points()) -> R:  # noqa: B008
        """The answer of ``work``, which runs inside a transaction; what it wrote is durable then.

        A task that is cancelled before its call has begun takes it back; later the call goes on without it.

        Raises:
            StorageError: the ledger is closed, the disk or SQLite failed. Whatever ``work`` raises.
        """
        if self.closed:
            raise StorageError("the ledger is closed", where=str(self.path))
        call = _Call(work, rows, points)
        self._waiting.append(call)
        if not self._woken:  # after the tasks that are ready now, so that they share the commit
            self._woken = True
            asyncio.get_running_loop().call_soon(self._wake)
        return await asyncio.wrap_future(call.done)  # type: ignore[no-any-return]

    async def close(self, last: Callable[[], None]) -> None:
        """Finish what waits, run ``last`` and close the connection. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        shut = self._thread.submit(self._shut, last)
        try:
            await asyncio.shield(asyncio.wrap_future(shut))  # whoever is cancelled here still lets the file go
        finally:
            self._thread.shutdown(wait=True)

    def _wake(self) -> None:
        self._woken = False
        if not self.closed:
            self._thread.submit(self._drain)

    def _shut(self, last: Callable[[], None]) -> None:
        self._drain()
        try:
            last()
        finally:
            self.db.close()
            self.owner.release()

    def _drain(self) -> None:
        while self._waiting:
            begun: list[_Call] = []
            try:
                self._transact(self._arriving(), begun)
            except Exception as error:
                self._undo()
                if len(begun) == 1:
                    begun[0].error = error
                    self._answer(begun)
                else:  # whose fault it was shows when each has a transaction of its own
                    for call in begun:
                        self._alone(call)

    def _alone(self, call: _Call) -> None:
        try:
            self._transact([call], [])
        except Exception as error:
            self._undo()
            call.error = error
            self._answer([call])

    def _arriving(self) -> Iterator[_Call]:
        """Calls for one transaction, in order; from here on they can no longer be taken back."""
        rows, waited, end = 0, len(self._waiting), time.monotonic() + SECONDS
        while self._waiting:
            call = self._waiting[0]
            if rows and (rows + call.rows > ROWS or (waited <= 0 and time.monotonic() > end)):
                return
            self._waiting.popleft()
            waited -= 1
            if call.done.set_running_or_notify_cancel():
                rows += max(call.rows, 1)
                yield call

    def _transact(self, calls: Iterable[_Call], begun: list[_Call]) -> None:
        losses = self.segments.losses
        for call in calls:
            begun.append(call)
            if len(begun) == 1:
                self.db.execute("BEGIN IMMEDIATE")
            self._apply(call)
        if not begun:
            return
        sound = [call for call in begun if call.error is None]
        for call in sound:
            _reach(call.points.written)
        self.segments.sync()
        if self.segments.losses != losses:
            raise StorageError("a segment file failed while it was written", code="STO121", where=str(self.path))
        for call in sound:
            _reach(call.points.synced)
        self.db.execute("COMMIT")
        self.made += 1
        self._note()
        self._answer(begun)

    def _note(self) -> None:
        with suppress(sqlite3.Error):  # it is committed, and the next transaction says what is wrong
            last = self.db.execute("SELECT (SELECT max(serial) FROM samples), (SELECT max(version) FROM steps)")
            serial, step = (mark or 0 for mark in last.fetchone())
            if (serial, step) != self.owner.marks:
                self.owner.note(serial, step)

    def _apply(self, call: _Call) -> None:
        call.error = None
        self.db.execute("SAVEPOINT call")
        try:
            _reach(call.points.before)
            call.answer = call.work()
        except Exception as error:
            if not self.db.in_transaction:
                raise  # SQLite gave up the whole transaction
            self.db.execute("ROLLBACK TO call")
            self._forget()
            call.error = error
        self.db.execute("RELEASE call")

    def _undo(self) -> None:
        with suppress(sqlite3.Error):  # the next transaction says what is wrong
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
        self._forget()

    def _answer(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            error = call.error
            if error is None:
                try:
                    _reach(call.points.after)
                except StorageError as asked:
                    error = asked
            if error is None:
                call.done.set_result(call.answer)
            else:
                call.done.set_exception(sqlite_error(error, self.path) if isinstance(error, sqlite3.Error) else error)


def _reach(name: str) -> None:
    if name:
        failpoint(name)
