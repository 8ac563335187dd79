"""A block of memory in which a process shows that its interpreter runs, and which hooks it is in.

Another process reads it, and so learns what no thread can tell while one call into C holds the interpreter:

    beats   counts on while Python code runs
    heard   signals that Python's handlers have seen
    turns   counts on while the event loop runs
    slots   hook calls at work: the id of the thread that runs or awaits one, its limit in seconds, who was asked what
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

TICK = 0.25  # seconds between two beats
COUNT = struct.Struct("<Q")
HEAD = 3 * COUNT.size  # beats, heard, turns
SLOT = struct.Struct("<QdH1000s")  # thread, limit, length of the text, the text
SLOTS = 1024
SIZE = HEAD + SLOTS * SLOT.size
TEXT = 1000  # bytes
NONE = -1


@dataclass(slots=True, frozen=True, kw_only=True)
class HookCall:
    """One hook call at work.

    Example: HookCall(limit=60.0, hook="geo.slime_reward", provider="geo (geo==1.0)", key="reward.reward_timeout",
                  home="/site/geo", about="prompt 'main/3'")
    """

    limit: float  # seconds
    hook: str
    provider: str
    key: str  # of the limit in the config
    home: str  # folder or file of its code
    about: str

    def packed(self) -> bytes:
        """Its text, cut where it is too long."""
        text = "\0".join((self.hook, self.provider, self.key, self.home, self.about))
        return text.encode(errors="replace")[:TEXT]

    @classmethod
    def unpacked(cls, limit: float, text: bytes) -> HookCall:
        """What :meth:`packed` gave."""
        parts = [*text.decode(errors="replace").split("\0"), "", "", "", ""]
        return cls(limit=limit, hook=parts[0], provider=parts[1], key=parts[2], home=parts[3], about=parts[4])


class Block:
    """The memory, of which each process has its own view.

    Example:
        block = Block(os.memfd_create("pulse"))
        block.beat()
        assert Block(block.descriptor).beats == 1
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        if os.fstat(descriptor).st_size < SIZE:
            os.ftruncate(descriptor, SIZE)
        self._memory = mmap.mmap(descriptor, SIZE)
        self._free = list(range(SLOTS))

    @property
    def beats(self) -> int:
        """How often the interpreter has shown that it runs."""
        return int(COUNT.unpack_from(self._memory)[0])

    @property
    def heard(self) -> int:
        """How many signals Python's handlers have seen."""
        return int(COUNT.unpack_from(self._memory, COUNT.size)[0])

    @property
    def turns(self) -> int:
        """How often the event loop has shown that it runs."""
        return int(COUNT.unpack_from(self._memory, 2 * COUNT.size)[0])

    def beat(self) -> None:
        """Show that the interpreter runs."""
        COUNT.pack_into(self._memory, 0, self.beats + 1)

    def hear(self) -> None:
        """Show that a signal came through."""
        COUNT.pack_into(self._memory, COUNT.size, self.heard + 1)

    def turn(self) -> None:
        """Show that the event loop runs."""
        COUNT.pack_into(self._memory, 2 * COUNT.size, self.turns + 1)

    def begin(self, limit: float, text: bytes) -> int:
        """Show that the calling thread is in a hook, or awaits one; the answer is for :meth:`end`."""
        try:
            slot = self._free.pop()
        except IndexError:
            return NONE
        SLOT.pack_into(self._memory, HEAD + slot * SLOT.size, threading.get_native_id(), limit, len(text), text)
        return slot

    def end(self, slot: int) -> None:
        """It has left it."""
        if slot != NONE:
            COUNT.pack_into(self._memory, HEAD + slot * SLOT.size, 0)
            self._free.append(slot)

    def works(self) -> dict[int, list[HookCall]]:
        """Thread id -> the hook calls that it is in or awaits, the shortest limit first."""
        works: dict[int, list[HookCall]] = {}
        for slot in range(SLOTS):
            thread, limit, length, text = SLOT.unpack_from(self._memory, HEAD + slot * SLOT.size)
            if thread:
                works.setdefault(thread, []).append(HookCall.unpacked(limit, text[:length]))
        return {thread: sorted(calls, key=lambda work: work.limit) for thread, calls in works.items()}


class Pulse:
    """The block of this process, while somebody watches it."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self.stop)

    @property
    def watched(self) -> bool:
        """Whether somebody does."""
        return self._block is not None

    def start(self, block: Block) -> None:
        """Show everything in ``block`` from now on."""
        self._block = block

    def follow(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Show from now on that this event loop runs; None for no loop."""
        self._loop = loop

    def beat(self) -> None:
        """Show that the interpreter runs, and the event loop as soon as it does."""
        block, loop = self._block, self._loop
        if block is not None:
            block.beat()
            with suppress(RuntimeError):  # it was closed meanwhile
                if loop is not None:
                    loop.call_soon_threadsafe(block.turn)

    def stop(self) -> None:
        """Nobody watches any more."""
        self._block = self._loop = None

    def hear(self) -> None:
        """See `Block.hear`."""
        if self._block is not None:
            self._block.hear()

    def begin(self, limit: float, text: bytes) -> int:
        """See `Block.begin`."""
        return self._block.begin(limit, text) if self._block is not None else NONE

    def end(self, slot: int) -> None:
        """See `Block.end`."""
        if self._block is not None:
            self._block.end(slot)


PULSE = Pulse()
"""Of this process, as what it shows is: hooks on its threads, signals of its main one, one watchdog beside it."""
