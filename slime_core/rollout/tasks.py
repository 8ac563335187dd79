"""Background work of a collector: many tasks, one event that something happened, and the first error for who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")


class Tasks:
    """Tasks whose ends and errors wake whoever is in :meth:`wait`.

    Example:
        tasks = Tasks()
        tasks.spawn(work, group)
        await tasks.wait()          # until one ended, or `stir` was called; raises what went wrong
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the first
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing runs any more."""
        return all(task.done() for task in self._running)

    def stir(self) -> None:
        """Wake who waits."""
        self._changed.set()

    def spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        """Run ``work`` beside everything else."""
        task = asyncio.create_task(self._guarded(work, *args, **kwargs))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Until something happened; raises the first error of any task."""
        if self.error is not None:
            raise self.error
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """End everything."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _guarded(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await work(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._changed.set()
