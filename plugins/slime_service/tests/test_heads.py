"""A request head has a deadline: half a head does not hold a connection."""

import asyncio

import pytest
import uvicorn

from slime_service.serving import timely

pytestmark = pytest.mark.unit

ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]},
    {"type": "http.response.body", "body": b"ok"},
]
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LATE = 0.1


def answers(*parts):
    """What is read of a connection after the last part, which follows the answer to the one before."""

    async def app(scope, receive, send):
        for message in ANSWER:
            await send(message)

    async def run():
        config = uvicorn.Config(app, http=timely(LATE), lifespan="off", log_level="critical", port=0, host="127.0.0.1")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts[:-1]:
            writer.write(part)
            await reader.readuntil(b"ok")
        writer.write(parts[-1])
        found = await reader.read()
        writer.close()
        await server.shutdown()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("raw", [b"", WHOLE[:-2]], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_ends_its_connection(raw):
    assert answers(raw) == b""


def test_half_of_a_second_head_ends_it_too_after_the_first_answer():
    assert answers(WHOLE, WHOLE[:-2]) == b""
