"""Heartbeat of a process in shared memory: that its interpreter and event loop run, and which hooks it is in.

A watchdog process reads it, because no thread can report while one call into C holds the interpreter:

    beats        counts up while Python code runs
    loop_beats   counts up while the event loop runs
    signals      how many signals Python's handlers have seen
    calls        running hook calls: id of the thread that runs or awaits one, its limit in seconds, its text
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

INTERVAL = 0.25  # seconds between two beats
HEAD = 3 * 8  # bytes of beats, signals, loop_beats
SLOT = struct.Struct("<QdH1000s")  # thread, limit, length of the text, the text
SLOTS = 1024
SIZE = HEAD + SLOTS * SLOT.size
TEXT = 1000  # bytes
NONE = -1


@dataclass(slots=True, frozen=True)
class HookCall:
    """One running hook call.

    Example: HookCall(limit=60.0, hook="geo.slime_reward", provider="geo (geo==1.0)", key="reward.reward_timeout",
                  source="/site/geo", subject="prompt 'main/3'")
    """

    limit: float  # seconds
    hook: str
    provider: str
    key: str  # of the limit in the config
    source: str  # folder or file of its code
    subject: str  # prompt, sample or batch that it is called for

    def packed(self) -> bytes:
        """Encode all but the limit, cut to the slot's size."""
        text = "\0".join((self.hook, self.provider, self.key, self.source, self.subject))
        return text.encode(errors="replace")[:TEXT]

    @classmethod
    def unpacked(cls, limit: float, text: bytes) -> HookCall:
        """Decode :meth:`packed`."""
        return cls(limit, *[*text.decode(errors="replace").split("\0"), "", "", "", ""][:5])


class HeartbeatMemory:
    """The shared memory, of which each process has its own view.

    Example:
        memory = HeartbeatMemory(os.memfd_create("heartbeat"))
        memory.beat()
        assert HeartbeatMemory(memory.descriptor).beats == 1
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        if os.fstat(descriptor).st_size < SIZE:
            os.ftruncate(descriptor, SIZE)
        self._memory = mmap.mmap(descriptor, SIZE)
        self._counts = memoryview(self._memory)[:HEAD].cast("Q")
        self._free = list(range(SLOTS))

    @property
    def beats(self) -> int:
        """How often the interpreter has shown that it runs."""
        return self._counts[0]

    @property
    def signals(self) -> int:
        """How many signals Python's handlers have seen."""
        return self._counts[1]

    @property
    def loop_beats(self) -> int:
        """How often the event loop has shown that it runs."""
        return self._counts[2]

    def beat(self) -> None:
        """Show that the interpreter runs."""
        self._counts[0] += 1

    def signal(self) -> None:
        """Show that a signal came through."""
        self._counts[1] += 1

    def loop_beat(self) -> None:
        """Show that the event loop runs."""
        self._counts[2] += 1

    def begin_call(self, call: HookCall) -> int:
        """Show that the calling thread runs or awaits a hook; returns the slot for :meth:`end_call`."""
        try:
            slot = self._free.pop()
        except IndexError:
            return NONE
        thread, text = threading.get_native_id(), call.packed()
        SLOT.pack_into(self._memory, HEAD + slot * SLOT.size, thread, call.limit, len(text), text)
        return slot

    def end_call(self, slot: int) -> None:
        """Show that the hook has ended."""
        if slot != NONE:
            SLOT.pack_into(self._memory, HEAD + slot * SLOT.size, 0, 0.0, 0, b"")
            self._free.append(slot)

    def calls(self) -> dict[int, list[HookCall]]:
        """Thread id -> the hook calls that it runs or awaits, the shortest limit first."""
        calls: dict[int, list[HookCall]] = {}
        for slot in range(SLOTS):
            thread, limit, length, text = SLOT.unpack_from(self._memory, HEAD + slot * SLOT.size)
            if thread:
                calls.setdefault(thread, []).append(HookCall.unpacked(limit, text[:length]))
        return {thread: sorted(of_thread, key=lambda call: call.limit) for thread, of_thread in calls.items()}


class Heartbeat:
    """The heartbeat of this process, while a watchdog reads it."""

    def __init__(self) -> None:
        self._memory: HeartbeatMemory | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self.stop)

    @property
    def watched(self) -> bool:
        """Whether a watchdog reads it."""
        return self._memory is not None

    def start(self, memory: HeartbeatMemory) -> None:
        """Write to ``memory`` from now on."""
        self._memory = memory

    def stop(self) -> None:
        """Write nothing any more."""
        self._memory = self._loop = None

    def set_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Show from now on that this event loop runs; None for no loop."""
        self._loop = loop

    def beat(self) -> None:
        """Show that the interpreter runs, and the event loop as soon as it does."""
        memory, loop = self._memory, self._loop
        if memory is not None:
            memory.beat()
            with suppress(RuntimeError):  # it was closed meanwhile
                if loop is not None:
                    loop.call_soon_threadsafe(memory.loop_beat)

    def signal(self) -> None:
        """See `HeartbeatMemory.signal`."""
        if self._memory is not None:
            self._memory.signal()

    def begin_call(self, call: HookCall) -> int:
        """See `HeartbeatMemory.begin_call`."""
        return self._memory.begin_call(call) if self._memory is not None else NONE

    def end_call(self, slot: int) -> None:
        """See `HeartbeatMemory.end_call`."""
        if self._memory is not None:
            self._memory.end_call(slot)


HEARTBEAT = Heartbeat()
"""One a process, as what it shows is: hooks on its threads, signals of its main one, one watchdog beside it."""
