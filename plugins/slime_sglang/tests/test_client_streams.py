"""The client's streams: growing pieces, an end by either side, and what is asked again."""

import asyncio
from contextlib import aclosing

import faults
import pytest
from client_case import both, error_of, held, request, right
from fake_sglang import FakeServer

from slime_core.errors import EngineError
from slime_sglang.client import ServerFault

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("short_pauses")]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_brings_growing_pieces_and_the_whole_at_its_end(incremental):
    async def main():
        async with both(FakeServer(incremental=incremental)) as (client, _, _):
            seen = [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert [len(piece.tokens) for piece in seen] == [3, 6, 8]
            assert [piece.finish for piece in seen] == ["abort", "abort", "length"]
            assert right(seen[-1])
            assert seen[-1].text == seen[0].text + seen[-1].text[3:]
            assert seen[1].versions == [7] * 6
            assert (client.progress.tokens, client.progress.replies, client.progress.in_flight) == (8, 1, 0)

    asyncio.run(main())


def test_closing_a_stream_ends_its_request_on_the_server():
    async def main():
        async with held(made=4) as (client, _, server):
            async with aclosing(client.stream(request(), low=7, high=lambda: 7)) as pieces:
                async for piece in pieces:
                    assert len(piece.tokens) == 3
                    break
            await server.until(lambda: server.aborts)
            assert server.aborts[0]["rid"] == server.bodies[0]["rid"]
            assert client.progress.in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("incremental", [False, True])
def test_an_aborted_stream_ends_with_what_it_has(incremental):
    async def main():
        async with held(made=4, incremental=incremental) as (client, _, _):
            seen = []
            async for piece in client.stream(request(), low=7, high=lambda: 7):
                seen.append(piece)
                if len(seen) == 1:
                    await client.abort(["grpo/17-0"])
            assert [(len(piece.tokens), piece.finish) for piece in seen] == [(3, "abort"), (4, "abort")]

    asyncio.run(main())


def test_a_stream_is_asked_again_only_while_nothing_has_come():
    async def cut_in_the_middle(exchange):
        _, body = await exchange.ask()
        await exchange.start()
        await exchange.chunk(body[: body.index(b"\n\n") + 2])
        exchange.writer.write(b"40\r\ndata: {")
        await exchange.writer.drain()

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faults.status(503), faults.reset)
            seen = [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert right(seen[-1])
            proxy.add(cut_in_the_middle)
            seen = []

            async def collect():
                async for piece in client.stream(request(), low=7, high=lambda: 7):
                    seen.append(piece)

            assert ((await error_of(collect(), ServerFault)).code, len(seen)) == ("ENG77", 1)
            assert len(server.bodies) == 2

    asyncio.run(main())


def test_a_stream_that_is_none_is_refused():
    async def main():
        async with both() as (client, proxy, _):
            proxy.add(faults.html)
            with pytest.raises(ServerFault) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG71"
            proxy.add(faults.says(b"<html>\n<body>\n", "text/event-stream"))
            with pytest.raises(ServerFault) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG71"
            said = (
                b'data: {"error": {"message": "The input (9 tokens) is longer than the model\'s context length"}}\n\n'
            )
            proxy.add(faults.says(said, "text/event-stream"))
            with pytest.raises(EngineError) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG72"

    asyncio.run(main())
