"""`slime.utils.async_utils`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for the coroutine's result, on one event loop for all calls: tasks that it starts go on after it.

    A call from within that loop gets a loop of its own.
    """
    loop = _loop(os.getpid())
    if asyncio._get_running_loop() is not loop:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process, on a thread that ends with it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-async", daemon=True).start()
    return loop


__all__ = ["run"]
