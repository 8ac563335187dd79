"""One thread for all torch work of a process, so that asyncio stays awake and results do not depend on who called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from slime_core.crowding import Crowding

P = ParamSpec("P")
R = TypeVar("R")


class TorchThread:
    """Runs callables one after another on one thread whose torch uses ``cpu_threads`` threads.

    Example:
        thread = TorchThread(cpu_threads=2)
        logits = await thread.run(model, tokens)
    """

    def __init__(self, cpu_threads: int) -> None:
        if cpu_threads < 1:
            raise ValueError(f"cpu_threads must be at least 1, not {cpu_threads}")
        self.cpu_threads = cpu_threads
        self._crowding = Crowding(cpu_threads)
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="torch", initializer=_set_threads, initargs=(cpu_threads,)
        )

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``fn`` on the thread and wait for it without blocking the event loop."""
        return await self.submit(fn, *args, **kwargs)

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """As :meth:`run`, with the place in the queue taken before this returns."""
        return asyncio.wrap_future(self._pool.submit(fn, *args, **kwargs))

    def call(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``fn`` on the thread and block until it is done."""
        return self._pool.submit(fn, *args, **kwargs).result()

    def close(self) -> None:
        """Wait for what runs, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._crowding.close()


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
