"""Frames to a child of a Ray host: what is told when the host dies, and to whom."""

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from ray.exceptions import ActorDiedError

from slime_core.clusters.channel import encode
from slime_ray.channel import RayChannel

pytestmark = pytest.mark.unit


def test_a_write_whose_caller_was_cancelled_ends_in_silence_when_the_host_dies():
    async def main():
        loop, said = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
        answers = [loop.create_future()]
        host = SimpleNamespace(write=SimpleNamespace(remote=lambda number, parts: answers[0]))
        channel = RayChannel(host, "node-1", 0, 1, Path("rank-0.log"))
        writes = asyncio.create_task(channel.write(encode({"number": 1})))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        writes.cancel()
        answers[0].set_exception(ActorDiedError())
        with pytest.raises(asyncio.CancelledError):
            await writes
        await asyncio.sleep(0)
        answers.clear()
        del writes
        gc.collect()
        await asyncio.sleep(0)
        return said, channel._lost

    said, lost = asyncio.run(main())
    assert said == []
    assert lost.startswith("was lost with its host on node-1: ")
