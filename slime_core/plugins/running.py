"""Where hooks run: sync ones on threads of their own, async ones step by step, each until its deadline.

A deadline is measured in slices, so that time in which the whole process stood still does not count. A process that
is stopped (SIGSTOP, a suspended machine, a debugger) finds every deadline long past when it goes on. A slice that took
much longer than it was to last is such a pause, and counts with its own length only.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import queue
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from slime_core.memory import shortage
from slime_core.plugins.calls import WATCH, Call, Frames, Interrupted, interrupt, spare, stack_of
from slime_core.plugins.guard import end_if_forked

T = TypeVar("T")
HOOK_LOOP: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("slime_hook_loop")
"""On a hook's thread: the loop that waits for it."""

TO_END = 1.0
"""Seconds that a hook on a thread has to end after its deadline."""
IDLE = 5.0
"""Seconds that a thread waits for its next hook before it ends; starting one takes longer than most rewards do."""

SLICE = 1.0  # seconds
SLACK = 1.0  # a busy loop may wake so much later


class Late(Exception):
    """The deadline passed; ``frames`` is where the hook stood then."""

    def __init__(self, frames: Frames = (), *, stuck: bool = False) -> None:
        super().__init__()
        self.frames, self.stuck = frames, stuck  # whether it still runs


class Carried(Exception):
    """Carries an exception that would end the loop (SystemExit) or that a future refuses (StopIteration)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Deadline:
    """Cancels the task that entered it when its seconds are over; others may move it, or stop its clock.

    Example:
        async with Deadline(60.0) as deadline:
            await work()             # TimeoutError after 60 s, and deadline.expired is True
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asleep = (0.0, 0.0)  # since, for

    @property
    def expired(self) -> bool:
        """Whether the seconds were over inside the block."""
        return self._scope.expired()

    async def __aenter__(self) -> Deadline:
        await self._scope.__aenter__()
        self._sleep()
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._stop()
        await self._scope.__aexit__(*raised)  # type: ignore[arg-type]

    def when(self) -> float | None:
        """The loop's time at which the seconds are over; None while the clock stands."""
        if self._timer is None:
            return None
        return self._loop.time() + self.left - spent(self._loop.time() - self._asleep[0], self._asleep[1])

    def reschedule(self, when: float | None) -> None:
        """Move the end to ``when`` on the loop's clock; None stops the clock."""
        if self._scope.expired():
            raise RuntimeError("the deadline has passed")
        self._stop()
        if when is not None:
            self.left = when - self._loop.time()
            self._sleep()

    def _sleep(self) -> None:
        if self.left <= 0:
            self._scope.reschedule(self._loop.time())
            return
        self._asleep = self._loop.time(), min(self.left, SLICE)
        self._timer = self._loop.call_later(self._asleep[1], self._wake)

    def _wake(self) -> None:
        since, planned = self._asleep
        self.left -= spent(self._loop.time() - since, planned)
        self._timer = None
        self._sleep()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def wait_for_future(future: asyncio.Future[object], seconds: float | None) -> None:
    """Return when the future is done or its seconds are over; the future goes on."""
    if seconds is None:
        await asyncio.wait({future})
        return
    loop = asyncio.get_running_loop()
    while not future.done() and seconds > 0:
        planned, since = min(seconds, SLICE), loop.time()
        await asyncio.wait({future}, timeout=planned)
        seconds -= spent(loop.time() - since, planned)


def spent(took: float, planned: float) -> float:
    """Seconds of a slice that count: all of them, unless it took far longer than planned."""
    return took if took <= planned + SLACK else planned


DEADLINE: contextvars.ContextVar[Deadline] = contextvars.ContextVar("slime_hook_deadline")
"""Inside an async hook: its deadline, which whoever makes the hook wait may move."""


class HookThreads:
    """Threads for sync hooks: a bounded number, each a daemon, so that a hook that hangs cannot keep the process."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._idle = _Idle()

    async def run(self, fn: Callable[[], Any], deadline: float | None = None) -> Any:
        """Call ``fn`` on a thread; the deadline in seconds counts from its start. :class:`Carried` holds its error.

        Raises:
            Late: the deadline passed. The thread was interrupted; ``stuck`` says that it has not ended by that.
        """
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._limit))
        async with self._slots[1]:
            work = _Work(fn, loop)
            context = contextvars.copy_context()
            context.run(HOOK_LOOP.set, loop)
            thread = self._idle.start(context, work)
            await wait_for_future(work.future, deadline)
            if not work.future.done():
                frames = stack_of(thread.ident or 0)
                work.interrupt(thread)
                await wait_for_future(work.future, TO_END)
                raise Late(frames, stuck=not work.future.done())
            return work.future.result()


class _Idle:
    """Threads that wait for a hook; one whose hook hangs is none of them, and does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Thread] = []
        self._process = os.getpid()

    def start(self, context: contextvars.Context, work: _Work) -> threading.Thread:
        """The thread that begins with the work now."""
        with self._lock:
            if self._process != os.getpid():  # a fork has this object and none of its threads
                self._process, self._waiting = os.getpid(), []
            found = self._waiting.pop() if self._waiting else _Thread(self)
        found.next.put((context, work))
        if found.ident is None:
            try:
                found.start()
            except RuntimeError as error:  # the hook has not begun: nothing of it is at fault
                raise shortage(error) from error
        return found

    def wait(self, thread: _Thread) -> None:
        """Its hook has ended."""
        with self._lock:
            self._waiting.append(thread)

    def leave(self, thread: _Thread) -> bool:
        """Whether it may end: nobody has taken it."""
        with self._lock:
            if free := thread in self._waiting:
                self._waiting.remove(thread)
            return free


class _Thread(threading.Thread):
    """Hooks one after the other, each in the context of its call."""

    def __init__(self, idle: _Idle) -> None:
        super().__init__(name="slime-hook", daemon=True)
        self.next: queue.SimpleQueue[tuple[contextvars.Context, _Work]] = queue.SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        """See `threading.Thread`."""
        while True:
            try:
                context, work = self.next.get(timeout=IDLE)
            except queue.Empty:
                if self._idle.leave(self):
                    return
                continue  # its work is on the way
            context.run(work.run)
            del context, work  # what they hold is not kept until the next
            self._idle.wait(self)


class _Work:
    """One call on a thread, and the future of its answer."""

    def __init__(self, fn: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.fn, self.loop = fn, loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.future.add_done_callback(_retrieve)
        self._lock = threading.Lock()
        self._over = False

    def run(self) -> None:
        """On the thread."""
        value, failed, process = None, None, os.getpid()
        try:
            try:
                value = self.fn()
            except BaseException as error:
                failed = error
            end_if_forked(process)
            with self._lock:
                self._over = True
            spare(threading.get_ident())
        except Interrupted as late:  # it came through after the hook had ended
            self._over, failed = True, late
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(_settle, self.future, value, failed)

    def interrupt(self, thread: threading.Thread) -> None:
        """End the hook, where it runs Python code."""
        with self._lock:
            if not self._over and thread.ident is not None:
                interrupt(thread.ident)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at the exception of a hook whose caller was cancelled, so that asyncio does not report it as unseen."""
    if not future.cancelled():
        future.exception()


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error if type(error) is Late else Carried(error))


class Steps:
    """A coroutine of a plugin, step by step, so that it is known when it holds the loop and where it waits."""

    def __init__(self, work: Awaitable[Any], watched: Call) -> None:
        self._work: Any = work if inspect.iscoroutine(work) else _of(work)
        self._watched = watched
        self.stopped_at: Frames = ()  # where it waited when it was cancelled

    @types.coroutine
    def all(self) -> Generator[Any, Any, Any]:
        """Every step, to its answer."""
        process, sent, error = os.getpid(), None, None
        while True:
            WATCH.hold(self._watched)
            try:
                waits = self._work.send(sent) if error is None else self._work.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                WATCH.release(self._watched)
                end_if_forked(process)
            sent = error = None
            try:
                sent = yield waits
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as thrown:
                self.stopped_at = _waits_at(self._work)
                error = thrown


async def _of(work: Awaitable[T]) -> T:
    return await work


def _waits_at(work: Any) -> Frames:
    """Where a coroutine waits, outermost first."""
    frames: list[traceback.FrameSummary] = []
    while getattr(work, "cr_frame", None) is not None:
        frames += traceback.StackSummary.extract([(work.cr_frame, work.cr_frame.f_lineno)])
        work = work.cr_await
    return frames
