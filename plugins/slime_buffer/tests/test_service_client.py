"""The client waits where waiting helps, repeats what is safe to repeat, and says what stands in the way."""

import asyncio

import httpx
import pytest

from slime_buffer.client import BufferClient
from slime_buffer.service import models
from slime_buffer.service.tables import BufferLimits
from slime_core.errors import EngineError

pytestmark = pytest.mark.unit


class Road(httpx.AsyncBaseTransport):
    """A way to the service on which something happens first: an exception, an answer, or nothing (None)."""

    def __init__(self, inner, *happens):
        self.inner, self.happens, self.requests = inner, list(happens), []

    async def handle_async_request(self, request):
        self.requests.append(request)
        event = self.happens.pop(0) if self.happens else None
        if isinstance(event, httpx.Response):
            return event
        if event == "answer lost":
            await self.inner.handle_async_request(request)
            raise httpx.ReadError("the connection was cut")
        if event is not None:
            raise event
        return await self.inner.handle_async_request(request)


def road(world, *happens, deadline=5.0):
    way = Road(httpx.ASGITransport(world.app), *happens)
    return BufferClient("http://buffer.example", world.token, deadline=deadline, transport=way), way


def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_happens_twice(serving, row):
    """A cut answer is a transport error; the ids make the repeat harmless."""

    async def body():
        async with serving() as world:
            await world.ask("a", "b")
            client, way = road(world, *["answer lost"] * 4)
            async with client:
                written = await client.write("run", [row("a", 0), row("a", 1)])
                assert [j.state for j in written.trajectories] == ["known", "known"]
                assert len(way.requests) == 5
                way.happens = ["answer lost"]
                (work,) = await client.claim_work("g")
                way.happens = ["answer lost"]
                claimed = await client.claim_batch("t", "run")
                way.happens = ["answer lost"]
                assert await client.acknowledge(claimed.claim) == 1
            assert work.id == "b"
            assert (await world.client.stats()).samples == {"issued": 4, "read": 2, "pending": 2}

    asyncio.run(body())


def test_a_full_queue_is_waited_for_as_long_as_it_says(serving, row):
    """429 with Retry-After; nothing is lost, the writer waits."""

    async def body():
        async with serving(limits=BufferLimits(unread=1)) as world:
            await world.ask("a", "b")
            await world.write("a")
            client, way = road(world, deadline=30.0)
            async with client:
                writing = asyncio.create_task(client.write("run", [row("b", 0), row("b", 1)]))
                while not way.requests:
                    await asyncio.sleep(0)
                claimed = await world.client.claim_batch("t", "run")
                await world.client.acknowledge(claimed.claim)
                assert (await writing).finished == ["b"]
                assert 2 <= len(way.requests) <= 3

    asyncio.run(body())


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_failing_service_is_tried_again_until_the_deadline(serving, status):
    async def body():
        async with serving() as world:
            failing = [httpx.Response(status, content=_refusal()) for _ in range(99)]
            client, way = road(world, *failing[:2])
            async with client:
                assert (await client.health()).status == "ok"
            client, way = road(world, *[httpx.Response(status, content=_refusal()) for _ in range(99)], deadline=0.3)
            async with client:
                with pytest.raises(EngineError) as told:
                    await client.health()
            assert told.value.code == "ENG75"
            assert 2 <= len(way.requests) < 9

    asyncio.run(body())


def test_a_service_that_is_away_is_told_with_its_address(serving):
    async def body():
        async with serving() as world:
            gone = [httpx.ConnectError("refused") for _ in range(99)]
            client, _ = road(world, *gone, deadline=0.3)
            async with client:
                with pytest.raises(EngineError, match="does not answer") as told:
                    await client.stats()
            assert (told.value.code, told.value.where) == ("ENG69", "http://buffer.example")
            assert "--rollout-buffer-url" in told.value.fix

    asyncio.run(body())


def test_a_refused_token_and_a_refused_body_are_not_tried_again(serving):
    async def body():
        async with serving() as world:
            way = Road(httpx.ASGITransport(world.app))
            async with BufferClient("http://buffer.example", "another-token-of-mine", transport=way) as client:
                with pytest.raises(EngineError) as told:
                    await client.health()
            assert told.value.code == "ENG73"
            assert "SLIME_BUFFER_TOKEN" in told.value.fix
            assert len(way.requests) == 1
            client, way = road(world)
            async with client:
                with pytest.raises(EngineError) as told:
                    await client.peek(state="odd")
            assert told.value.code == "ENG78"
            assert "state" in told.value.why
            assert len(way.requests) == 1

    asyncio.run(body())


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, content=b"<html>hello</html>"),
        httpx.Response(404, content=b"no"),
        httpx.Response(200, content=b'{"status": "ok", "version": "9"}'),
        httpx.Response(302, headers={"location": "http://elsewhere.example"}),
        httpx.Response(200, content=b"null"),
    ],
    ids=["html", "404", "another version", "redirect", "null"],
)
def test_a_stranger_on_the_port_is_told_with_what_it_says(serving, answer):
    async def body():
        async with serving() as world:
            client, way = road(world, answer)
            async with client:
                with pytest.raises(EngineError) as told:
                    await client.health()
            assert told.value.code == "ENG71"
            assert len(way.requests) == 1

    asyncio.run(body())


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def body():
        server = await asyncio.start_server(_health, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, BufferClient(f"http://127.0.0.1:{port}", "x" * 20) as client:
            assert (await client.health()).status == "ok"

    asyncio.run(body())


def test_a_service_that_never_ends_its_answer_meets_the_deadline():
    """Slow bytes do not reset the deadline."""

    async def body():
        ended = asyncio.Event()

        async def drip(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            hung_up = asyncio.ensure_future(reader.read())
            while not hung_up.done():
                writer.write(b" ")
                await asyncio.wait({hung_up}, timeout=0.02)
            writer.transport.abort()
            ended.set()

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with BufferClient(f"http://127.0.0.1:{port}", "x" * 20, deadline=0.3) as client:
            with pytest.raises(EngineError) as told:
                await client.health()
        assert told.value.code == "ENG69"
        await ended.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(body())


async def _health(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    body = models.Health().model_dump_json().encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


def _refusal():
    return models.Refusal(error=models.Problem(code="SLM00", what="no")).model_dump_json().encode()
