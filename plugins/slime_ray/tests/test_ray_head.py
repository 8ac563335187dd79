"""The watch over a Ray cluster's head, with a listener in its place."""

import asyncio

import pytest

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_core.errors import ConfigError
from slime_ray.head import head_kept

pytestmark = pytest.mark.unit


async def listen():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    return server, f"{host}:{port}"


def test_a_head_that_is_gone_ends_the_block_with_our_error():
    async def run():
        server, address = await listen()
        async with head_kept(address, often=0.01):
            server.close()
            await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="CFG17") as caught:
        asyncio.run(run())
    assert "is gone" in caught.value.what
    assert caught.value.lost, "a restart may find another cluster"


def test_a_head_that_answers_leaves_the_block_and_its_errors_alone():
    async def run():
        server, address = await listen()
        async with server, head_kept(address, often=0.01):
            await asyncio.sleep(0.05)
            raise KeyError("of the run")

    with pytest.raises(KeyError, match="of the run"):
        asyncio.run(run())
