"""Calls of plugin code in progress, and a thread that watches them where asyncio cannot: while a hook holds the loop.

    held for `lag` seconds in an async hook     a notice with plugin, hook and line: something in it blocks
    held for the hook's whole limit             the thread gets `Interrupted`, which ends Python code that loops
    held on, `GRACE` seconds later              the error is told with the stack, and the process ends

Time is counted in ticks of the watching thread, none longer than two: a process that was stopped (SIGSTOP) or starved
finds no call older than it was. Threads of torch are not watched.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType

from slime_core.errors import END_NOW
from slime_core.notices import notice
from slime_core.plugins.provider import Answer
from slime_core.pulse import NONE, PULSE, Work

TICK = 0.25  # seconds
LAG = 5.0
GRACE = 5.0
DEEPEST = 12  # lines of a stack that are shown
Frames = Sequence[traceback.FrameSummary]  # outermost first


class Interrupted(BaseException):
    """Raised inside plugin code whose time is over."""


@dataclass(eq=False)
class Call:
    """One hook at work."""

    answer: Answer
    about: str
    limit: float  # seconds that it may hold its thread
    error: Callable[[Frames], Exception]  # what to tell where it cannot be ended
    loop: asyncio.AbstractEventLoop | None = None  # of an async hook
    thread: int = 0  # that runs it now; 0 while it waits
    since: float = 0.0  # on the watch's clock
    interrupted: float | None = None
    key: str = ""  # of the limit in the config
    shown: int = NONE  # its slot in `pulse`, while it runs

    def show(self) -> None:
        """The calling thread runs it now, for who watches from outside."""
        self.shown = PULSE.begin(self.limit, self._text) if PULSE.watched else NONE

    def hide(self) -> None:
        """It waits, or has ended."""
        PULSE.end(self.shown)
        self.shown = NONE

    @cached_property
    def _text(self) -> bytes:
        provider = self.answer.provider
        hook, home = f"{provider.name}.{self.answer.hook}", str(provider.home or "")
        return Work(
            limit=self.limit, hook=hook, provider=str(provider), key=self.key, home=home, about=self.about
        ).packed()

    def __str__(self) -> str:
        return f"{self.answer.provider.name}.{self.answer.hook} ({self.about})"


class Watch:
    """The thread and what it looks at. It ends when nothing is in progress, and comes back."""

    def __init__(self, *, lag: float = LAG, grace: float = GRACE) -> None:
        self.lag, self.grace = lag, grace
        self.clock = 0.0
        self.last: Call | None = None  # that began
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._beats: dict[asyncio.AbstractEventLoop, tuple[int, float]] = {}  # loop -> its thread, when it last ran
        os.register_at_fork(after_in_child=self._forget)

    def enter(self, call: Call) -> None:
        """Watch ``call`` from now on."""
        with self._lock:
            self._calls.add(call)
            self.last = call
            if call.loop is not None:
                self._beats.setdefault(call.loop, (threading.get_ident(), self.clock))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="slime-hook-watch", daemon=True)
                self._thread.start()

    def leave(self, call: Call) -> None:
        """It has ended."""
        with self._lock:
            self._calls.discard(call)

    def in_progress(self) -> list[Call]:
        """Every call that has begun and not ended."""
        with self._lock:
            return list(self._calls)

    def hold(self, call: Call) -> None:
        """The calling thread runs this call now."""
        call.since, call.thread = self.clock, threading.get_ident()
        call.show()

    def release(self, call: Call) -> None:
        """It waits."""
        call.thread = 0
        call.hide()

    def _forget(self) -> None:
        self._lock, self._calls, self._thread, self._beats = threading.Lock(), set(), None, {}

    def _run(self) -> None:
        before, idle = time.monotonic(), 0
        while idle < 8:
            time.sleep(TICK)
            now = time.monotonic()
            self.clock += min(now - before, 2 * TICK)
            before = now
            with self._lock:
                calls = list(self._calls)
                idle = 0 if calls else idle + 1
                if idle == 8:
                    self._thread = None
            self._beat(calls)
            for call in calls:
                self._look(call)

    def _beat(self, calls: list[Call]) -> None:
        """Find loops that do not run although no call that is known to run holds them: a task of some hook does."""
        loops = {call.loop for call in calls if call.loop is not None}
        with self._lock:
            self._beats = {loop: beat for loop, beat in self._beats.items() if loop in loops and not loop.is_closed()}
            beats = dict(self._beats)
        held = {call.thread for call in calls}
        for loop, (thread, since) in beats.items():
            if self.clock - since >= self.lag and thread not in held:
                frames = stack_of(thread)
                call = next((c for c in calls if c.loop is loop and _owned(frames, c.answer.provider.home)), None)
                if call is not None:
                    self._tell(call, frames, self.clock - since, alone=False)
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._answered, loop)

    def _answered(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if loop in self._beats:
                self._beats[loop] = self._beats[loop][0], self.clock

    def _look(self, call: Call) -> None:
        thread, held = call.thread, self.clock - call.since
        if not thread:
            return
        if call.loop is not None and held >= self.lag:
            self._tell(call, stack_of(thread), held, alone=True)
        if held >= call.limit and call.interrupted is None:
            call.interrupted = self.clock
            with self._lock:  # who leaves holds it too: no other code is hit
                if call in self._calls and call.thread == thread:
                    interrupt(thread)
        elif call.interrupted is not None and self.clock - call.interrupted >= self.grace:
            _end_process(call.error(stack_of(thread)))

    def _tell(self, call: Call, frames: Frames, held: float, *, alone: bool) -> None:
        at = next(
            (f for f in reversed(frames) if _owned([f], call.answer.provider.home)), frames[-1] if frames else None
        )
        place = f"{at.filename}:{at.lineno} in {at.name}" if at else "an unknown place"
        who = str(call) if alone else f"{call.answer.provider.name}.{call.answer.hook}"
        notice(
            ("lag", call.answer.provider.name, call.answer.hook, place),
            f"{who} holds the event loop for {held:.0f} s at {place}: nothing else runs meanwhile; "
            "await there, or write the hook with def, which gives it a thread",
        )


def stack_of(thread: int) -> Frames:
    """Where a thread stands, outermost first; empty where it has ended."""
    frame: FrameType | None = sys._current_frames().get(thread)
    return traceback.extract_stack(frame) if frame is not None else []


def shown(frames: Frames) -> str:
    """The innermost lines of a stack as text."""
    return "".join(traceback.format_list(list(frames)[-DEEPEST:])).rstrip()


def interrupt(thread: int) -> None:
    """Raise :class:`Interrupted` in a thread at its next step of Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))


def spare(thread: int) -> None:
    """Take an interruption back that has not come through yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def _owned(frames: Frames, home: Path | None) -> bool:
    return home is not None and any(Path(frame.filename).is_relative_to(home) for frame in frames)


def _end_process(error: Exception) -> None:
    """Tell ``error`` and end: the thread that is stuck cannot be ended, and all that must last is on disk."""
    text = (
        error.render() if hasattr(error, "render") else str(error)
    )  # locks of a stuck thread do not matter to os.write
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
        faulthandler.dump_traceback(2)

    def last_words() -> None:
        notice(("end", text), text)
        sys.stdout.flush()

    talker = threading.Thread(target=last_words, daemon=True)
    talker.start()
    talker.join(2.0)
    END_NOW(getattr(error, "exit_code", 1))


WATCH = Watch()
"""Of this process."""
