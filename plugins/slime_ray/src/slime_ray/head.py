"""The cluster's head during a run: a run that loses it ends with a clear error, or restarts.

Ray itself waits a minute for its head (the GCS), and then ends this process without a word to the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slime_core.errors import ConfigError

OFTEN, MISSES = 5.0, 3  # seconds between looks, and how many must fail: less than Ray's minute
ANSWER = 5.0  # seconds in which it must take a connection


async def answers(address: str) -> bool:
    """Whether a server listens at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except OSError:  # a timeout is one
        return False
    return True


@asynccontextmanager
async def head_kept(address: str, *, often: float = OFTEN) -> AsyncIterator[None]:
    """A watch over the head at ``address`` while the block runs.

    Raises:
        ConfigError: CFG17 it is lost; this replaces the block's own exception.
    """
    task, ended = asyncio.current_task(), asyncio.Event()
    assert task is not None

    async def look() -> None:
        misses = 0
        while misses < MISSES:
            await asyncio.sleep(often)
            misses = 0 if await answers(address) else misses + 1
        ended.set()
        task.cancel("the head is gone")

    looking = asyncio.create_task(look(), name="slime-ray-head")
    try:
        yield
    except BaseException as error:
        if not ended.is_set():
            raise
        if isinstance(error, asyncio.CancelledError):
            task.uncancel()
        raise ConfigError(
            f"the head of the Ray cluster at {address} is gone",
            code="CFG17",
            where="cluster.ray_address",
            why="its GCS takes no connections: it was killed, or its machine was lost",
            fix="slime run --resume RUN_DIR   once there is a cluster",
            lost=True,
        ) from error
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
