"""What clients of the loopback server do: ask at once, hang up, wait to be asked for a body, bear no token."""

import asyncio

import pytest

from slime_compat.loopback import LoopbackServer, require_token

pytestmark = pytest.mark.unit

OFFER = (b"connection: Upgrade, HTTP2-Settings", b"http2-settings: AAEAAEAAAAIAAAAB", b"upgrade: h2c")
"""What java.net.http and `curl --http2` say with a first request."""
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def talk_to(server, request):
    """All that a server says to these bytes until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    said = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await writer.wait_closed()
    return said


def with_server(handle, work):
    async def run():
        server = LoopbackServer({"POST /generate": handle}, asyncio.get_running_loop(), require_token("secret"))
        try:
            return await work(server)
        finally:
            await asyncio.to_thread(server.close)

    return asyncio.run(run())


def post_of(body, *heads):
    lines = [
        b"POST /generate HTTP/1.1",
        b"host: localhost",
        b"authorization: bearer secret",
        b"content-length: %d" % len(body),
        *heads,
    ]
    return b"\r\n".join([*lines, b"", body])


async def echo(asked):
    return asked.payload


@pytest.mark.parametrize("heads", [(), OFFER], ids=["plain", "h2c"])
def test_requests_that_come_at_once_are_answered_in_order(heads):
    requests = post_of(b'{"a": 1}', *heads) + post_of(b'{"a": 2}', b"connection: close")
    said = with_server(echo, lambda server: talk_to(server, requests))
    assert [part.rpartition(b"\r\n\r\n")[2] for part in said.split(b"HTTP/1.1 200 OK")[1:]] == [
        b'{"a": 1}',
        b'{"a": 2}',
    ]


def test_the_body_of_what_is_not_served_is_no_request():
    secret = b"authorization: Bearer secret\r\n"
    request = (
        b"POST /x HTTP/1.1\r\nhost: localhost\r\n"
        + secret
        + b"content-length: 5\r\n\r\nabcde"
        + HEALTH.replace(b"host", secret + b"host", 1)
    )
    said = with_server(echo, lambda server: talk_to(server, request))
    assert [part.split()[0] for part in said.split(b"HTTP/1.1 ")[1:]] == [b"404", b"200"]


@pytest.mark.parametrize("heads", [(), OFFER], ids=["plain", "h2c"])
def test_a_caller_who_waits_to_be_asked_for_the_body_is_asked(heads):
    async def work(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head, body = post_of(b'{"a": 1}', *heads, b"expect: 100-continue", b"connection: close")[:-8], b'{"a": 1}'
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        said = await reader.read()
        writer.close()
        return said

    assert with_server(echo, work).endswith(b'{"a": 1}')


def test_a_head_that_is_too_long_is_refused_and_a_long_body_is_not():
    long, close = b"x" * (64 << 10), b"connection: close"
    for request, status in (
        (post_of(b"{}", b"x-long: " + long, close), b"400"),
        (post_of(b'{"a": "%s"}' % long, close), b"200"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
    ):
        said = with_server(echo, lambda server, request=request: talk_to(server, request))
        assert said.startswith(b"HTTP/1.1 " + status)


def test_a_caller_who_hangs_up_cancels_what_was_begun():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(asked):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work(server):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post_of(b"{}"))
        await asyncio.wait_for(begun.wait(), 30)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(ended.wait(), 30)

    with_server(handle, work)


@pytest.mark.parametrize("given", [b"", b"Bearer other", b"Basic secret"])
def test_a_request_without_the_token_is_refused_before_its_body_is_parsed(given):
    request = post_of(b"no json", b"connection: close").replace(b"bearer secret", given)
    assert with_server(echo, lambda server: talk_to(server, request)).startswith(b"HTTP/1.1 401")


def test_many_who_connect_before_anyone_asks_are_all_served():
    async def work(server):
        pairs = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(300)]
        for _, writer in pairs:
            writer.write(post_of(b'{"a": 1}', b"connection: close"))
        answers = [await asyncio.wait_for(reader.read(), 30) for reader, _ in pairs]
        for _, writer in pairs:
            writer.close()
        return answers

    assert all(answer.endswith(b'{"a": 1}') for answer in with_server(echo, work))


def test_callers_who_wait_for_an_answer_are_not_among_those_that_are_too_many(monkeypatch):
    monkeypatch.setattr("slime_compat.loopback.MOST_OPEN", 5)
    begun, answer = asyncio.Semaphore(0), asyncio.Event()

    async def handle(asked):
        begun.release()
        await answer.wait()
        return asked.payload

    async def work(server):
        pairs = []
        for _ in range(15):
            pairs.append(await asyncio.open_connection("127.0.0.1", server.port))
            pairs[-1][1].write(post_of(b'{"a": 1}', b"connection: close"))
            await asyncio.wait_for(begun.acquire(), 30)
        answer.set()
        answers = [await asyncio.wait_for(reader.read(), 30) for reader, _ in pairs]
        for _, writer in pairs:
            writer.close()
        return answers

    assert all(said.endswith(b'{"a": 1}') for said in with_server(handle, work))
