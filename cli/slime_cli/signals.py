"""What a run does with SIGTERM, SIGINT, SIGHUP and SIGUSR1.

    nothing to keep yet   the signal ends the process (Terminated, KeyboardInterrupt)
    while a run runs      the first requests a stop: checkpoint, exit 75 (130 after Ctrl-C); the second ends it now

Handlers are Python's own, not the event loop's, so that the second signal is heard while the loop is busy. A signal
that was ignored when the process began stays ignored (nohup, background jobs of a shell). SIGUSR1 prints the stack of
every thread on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slime_cli.failure import Terminated
from slime_core.errors import END_NOW
from slime_core.heartbeat import HEARTBEAT

if TYPE_CHECKING:
    from slime_core.preemption import StopSignal

T = TypeVar("T")

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STDERR = 2
LAST_WORD = 1.0  # seconds that run.json may take when a run is ended at once


class Signals:
    """The handlers of a `slime run`, while its block lasts.

    Example:
        with Signals() as signals:
            settings = load_settings(words, session)                   # a signal raises here
            with signals.requesting(stop, on_leave=run_dir_says_so):       # and requests stops from here on
                asyncio.run(signals.drive(loop.run(..., stop=stop)))
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._stop: StopSignal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_leave: Callable[[str], Any] | None = None
        self.first = 0  # the signal that requested the stop

    def __enter__(self) -> Self:
        for number in HANDLED:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, self._handle)
                    self._before[number] = before
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def requesting(self, stop: StopSignal, on_leave: Callable[[str], Any] | None = None) -> Iterator[None]:
        """Signals request ``stop`` inside this block; ``on_leave(status)`` is called before an end at once."""
        self._stop, self._on_leave = stop, on_leave
        try:
            yield
        finally:
            self._stop = self._on_leave = None

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` where signals wake the event loop."""
        self._loop = asyncio.get_running_loop()
        HEARTBEAT.set_loop(self._loop)
        try:
            return await work
        finally:
            self._loop = None
            HEARTBEAT.set_loop(None)

    def _handle(self, number: int, frame: Any) -> None:
        HEARTBEAT.signal()
        if self._stop is None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Terminated
        if self.first:
            self._leave(number)
        self.first = number
        name = signal.Signals(number).name
        _tell(f"{name}: stopping in order, with a checkpoint; a second signal ends the run at once")
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.request, name)
        else:
            self._stop.request(name)

    def _leave(self, number: int) -> None:
        """End this process and everything it started, now."""
        _tell(f"{signal.Signals(number).name} again: ended at once; what was recorded can be resumed")
        kill_descendants()
        if self._on_leave is not None:
            status = "interrupted" if number == signal.SIGINT else "terminated"
            last = threading.Thread(target=self._on_leave, args=(status,), daemon=True)
            last.start()
            last.join(LAST_WORD)
        END_NOW(128 + number)


def _tell(text: str) -> None:
    """A line on stderr, past Python's buffer: a handler may have interrupted a write to it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and theirs; the nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    processes, at = [pid], 0
    while at < len(processes):
        processes += parents.get(processes[at], [])
        at += 1
    return processes[1:]


def kill_descendants() -> None:
    """End everything that this process started, now."""
    for child in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


async def drive(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; SIGTERM cancels it, so that every block of it is left in order.

    Raises:
        Terminated: after SIGTERM.
    """
    task = asyncio.ensure_future(work)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(signal.SIGTERM)
        task.cancel()

    loop = asyncio.get_running_loop()
    HEARTBEAT.set_loop(loop)
    handles = _can_handle(lambda: loop.add_signal_handler(signal.SIGTERM, stop))
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise Terminated from None
        raise
    finally:
        HEARTBEAT.set_loop(None)
        if handles:
            loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside this block (in the main thread)."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    handles = _can_handle(lambda: signal.signal(signal.SIGTERM, stop))
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)


def _can_handle(install: Callable[[], Any]) -> bool:
    try:
        install()
    except (ValueError, RuntimeError):  # not the main thread
        return False
    return True
