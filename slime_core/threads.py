"""One thread for all torch work of a process, so that asyncio stays awake and results do not depend on who called."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PERIOD = 0.5  # seconds between two looks
SLACK = 0.25  # cores that other processes may use while all threads run
CALM = 6  # looks in a row without a crowd after which waits are long again
ASKED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which the user has set the number already."""
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: columns of /proc/stat


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


class Crowding:
    """Shortens the waits of libgomp's threads while other programs want the cores of this process's ``threads``.

    A thread of libgomp that waits for the others spins for milliseconds. That is fast on a machine of its own; beside
    a busy program the scheduler may put two on one core, where each spins while the other should run: ten times
    slower. libgomp spins shortly where it has more threads than there are cores, so while others want the cores it
    gets some more, which sleep. Numbers do not depend on it.

    Example:
        crowding = Crowding(threads=2)
        ...
        crowding.close()
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._over = threads, threading.Event()
        self._watch: threading.Thread | None = None
        if threads > 1 and not any(name in os.environ for name in ASKED):
            self._watch = threading.Thread(target=self._run, name="slime-crowding", daemon=True)
            self._watch.start()

    def close(self) -> None:
        """End the thread; waits are long again."""
        self._over.set()
        if self._watch is not None:
            self._watch.join()

    def _run(self) -> None:
        cores = os.sched_getaffinity(0)
        while not self._over.is_set():
            if self._crowded(cores):
                with crowd(max(2, len(cores) - self._threads + 2)):  # with ours one more than cores
                    calm = 0
                    while calm < CALM and not self._over.is_set():
                        calm = 0 if self._crowded(cores) else calm + 1

    def _crowded(self, cores: set[int]) -> bool:
        began, busy, process_seconds = time.monotonic(), busy_seconds(cores), time.process_time()
        self._over.wait(PERIOD)
        passed = time.monotonic() - began
        others = (busy_seconds(cores) - busy - (time.process_time() - process_seconds)) / passed
        return others + self._threads > len(cores) + SLACK


def busy_seconds(cores: set[int]) -> float:
    """Busy seconds of these cores since the machine started; 0 where the system has no figure."""
    ticks = 0
    with suppress(OSError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                ticks += sum(int(fields[column]) for column in BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def crowd(count: int) -> Iterator[None]:
    """Have libgomp own ``count`` more threads, which sleep, inside this block; nothing where it is not loaded."""
    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            if (library := libgomp()) is not None:
                does_nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
                library.GOMP_parallel(does_nothing, None, count, 0)
        finally:
            ready.set()
        over.wait()  # they end with the thread that has started them

    thread = threading.Thread(target=hold, name="slime-crowd", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def libgomp() -> ctypes.CDLL | None:
    """The one that torch has loaded."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(f"/{line.partition('/')[2]}")
            if path.name.startswith("libgomp") and "torch" in path.as_posix():
                return ctypes.CDLL(str(path))
    return None
