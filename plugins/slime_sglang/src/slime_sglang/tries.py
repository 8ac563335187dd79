"""Retries: how often something is asked again, and the pause before it."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_sglang.http import ServerFault

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
LONGEST_RETRY_AFTER = 60.0


@dataclass(slots=True)
class Tries:
    """How often and until when something is asked again; pauses double and are drawn at random around that.

    Example:
        tries = Tries(left=3, end=time.monotonic() + 60)
        try: ...
        except ServerFault as error: await tries.again(error)
    """

    left: int  # after the first
    end: float  # time.monotonic()
    stop: asyncio.Event | None = None  # set: nobody waits any more, a pause ends at once
    pause: float = field(default=FIRST_PAUSE)

    async def again(self, error: ServerFault) -> None:
        """Wait until the next try is due, or raise ``error``."""
        pause = max(self.pause * random.uniform(0.5, 1.5), min(error.wait, LONGEST_RETRY_AFTER))
        if not error.again or self.left <= 0 or time.monotonic() + pause >= self.end:
            raise error
        self.left -= 1
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        if self.stop is None:
            await asyncio.sleep(pause)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self.stop.wait()
