"""The one connection to a ledger's database: its owner's lock, and a durable transaction for calls that wait together.

**Owner**: a locked file beside the database names the process that owns it, and how much the database held. The kernel
releases the lock when the process ends, so a leftover file never blocks, even if another process has its pid now. The
marks are written after each commit, without waiting for the disk: they never say more than was durable, and a database
that knows less has lost its write-ahead log, or was put back from an older copy.

**Group commit**: a call that finds the disk idle starts at once, so no timer ever delays a lone writer; what arrives
while a commit is on its way shares the next one. A transaction takes calls in the order in which they came: those that
wait when it begins, and those that come while it works, for ``SECONDS`` at most; never more than ``ROWS`` rows. Each
call runs behind a savepoint and fails alone. Payloads are made durable before the commit that names them, and nobody
is answered before it, a reader neither.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.failpoints import failpoint
from slime_core.ledger.schema import MARKS, connect, sqlite_error
from slime_core.ledger.segments import Segments

R = TypeVar("R")
LOCK = "ledger.lock"
ROOM = 512  # bytes of that file
ROWS = 256
SECONDS = 0.005


class Owner:
    """The lock of ``path``'s folder, held until :meth:`release`; ``marks`` are the last owner's notes.

    Example:
        owner = Owner(run_dir / "ledger.sqlite")
        owner.note(serial=80, step=5)

    Raises:
        StorageError: STO116 another process holds it, with its pid; STO110, STO120 the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(LOCK)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, self.path, "the ledger cannot be locked") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._read()
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise _lock_error(path, holder) from None
            raise storage_error(error, self.path, "the ledger cannot be locked") from error
        owner = self._read()
        self.marks = (_whole(owner.get("serial")), _whole(owner.get("step")))
        self._holder = {"pid": os.getpid(), "started": start_of(os.getpid()), "host": socket.gethostname()}
        self.note(*self.marks)

    def note(self, serial: int, step: int) -> None:
        """The last row and the last step that were committed."""
        self.marks = (serial, step)
        data = json.dumps({**self._holder, "serial": serial, "step": step}).encode().ljust(ROOM)
        with suppress(OSError):  # a disk that is full here loses nothing
            os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        """Let the next owner in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> dict[str, Any]:
        try:
            holder = json.loads(os.pread(self._fd, ROOM, 0))
        except (OSError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}


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
        self.committed = 0  # transactions that were committed
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
        """Run ``work`` in a transaction and return its result, once its writes are durable.

        Cancelling a task withdraws a call that has not begun; a call that has begun completes.

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
            await asyncio.shield(asyncio.wrap_future(shut))  # a cancelled caller still releases the file
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
            pending_calls: list[_Call] = []
            try:
                self._transact(self._arriving(), pending_calls)
            except Exception as error:
                self._undo()
                if len(pending_calls) == 1:
                    pending_calls[0].error = error
                    self._answer(pending_calls)
                else:  # run each in its own transaction to find the one at fault
                    for call in pending_calls:
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

    def _transact(self, calls: Iterable[_Call], pending_calls: list[_Call]) -> None:
        losses = self.segments.losses
        for call in calls:
            pending_calls.append(call)
            if len(pending_calls) == 1:
                self.db.execute("BEGIN IMMEDIATE")
            self._apply(call)
        if not pending_calls:
            return
        sound = [call for call in pending_calls if call.error is None]
        for call in sound:
            _reach(call.points.written)
        self.segments.sync()
        if self.segments.losses != losses:
            raise StorageError("a segment file failed while it was written", code="STO121", where=str(self.path))
        for call in sound:
            _reach(call.points.synced)
        self.db.execute("COMMIT")
        self.committed += 1
        self._note()
        self._answer(pending_calls)

    def _note(self) -> None:
        with suppress(sqlite3.Error):  # it is committed; the next transaction raises
            serial, step = self.db.execute(MARKS).fetchone()
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
        with suppress(sqlite3.Error):  # the next transaction raises
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
        self._forget()

    def _answer(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            error = call.error
            if error is None:
                try:
                    _reach(call.points.after)
                except StorageError as failure:
                    error = failure
            if error is None:
                call.done.set_result(call.answer)
            else:
                call.done.set_exception(sqlite_error(error, self.path) if isinstance(error, sqlite3.Error) else error)


def _reach(name: str) -> None:
    if name:
        failpoint(name)


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _lock_error(path: Path, holder: dict[str, Any]) -> StorageError:
    pid, local = holder.get("pid"), holder.get("host") in (None, socket.gethostname())
    alive = isinstance(pid, int) and start_of(pid) == holder.get("started") != 0
    if not isinstance(pid, int):
        subject, fix = "a process that has just started", "one run directory has one run: stop the other"
    elif alive or not local:
        subject, fix = f"process {pid} on {holder.get('host')}", f"one run directory has one run: stop process {pid}"
    else:  # its pid may belong to another process by now, which must not be stopped
        subject = f"a child of process {pid}, which has ended"
        fix = f"find the child with: fuser {path.with_name(LOCK)}"
    return StorageError(
        f"another process holds the ledger: {subject}", code="STO116", where=str(path), why="it is locked", fix=fix
    )
