"""Retries of a request: how many, until when, and the pause before each."""

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
class Retries:
    """Retries that remain, and their deadline; pauses double, with random jitter.

    Example:
        retries = Retries(remaining=3, end=time.monotonic() + 60)
        try: ...
        except ServerFault as error: await retries.again(error)
    """

    remaining: int  # after the first
    end: float  # time.monotonic()
    stop: asyncio.Event | None = None  # set: a pause ends at once
    pause: float = field(default=FIRST_PAUSE)

    async def again(self, error: ServerFault) -> None:
        """Wait until the next retry is due, or raise ``error``."""
        pause = max(self.pause * random.uniform(0.5, 1.5), min(error.wait, LONGEST_RETRY_AFTER))
        if not error.again or self.remaining <= 0 or time.monotonic() + pause >= self.end:
            raise error
        self.remaining -= 1
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        if self.stop is None:
            await asyncio.sleep(pause)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self.stop.wait()
