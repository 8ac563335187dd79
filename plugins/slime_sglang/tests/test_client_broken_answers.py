"""The client before answers that are late, lost, cut, impossible or not its own."""

import asyncio
import json
from contextlib import suppress

import faults
import pytest
from client_case import ask, both, client_of, error_of, held, right
from faults import cut, in_meta, reset, rewrite

from slime_sglang import calls, client as client_module
from slime_sglang.client import ServerFault

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("short_pauses")]


async def vanish(_):
    """Close in order, before any answer."""


async def cut_chunk(exchange):
    """Half of a chunk."""
    _, body = await exchange.ask()
    await exchange.start()
    exchange.writer.write(f"{len(body):x}\r\n".encode() + body[: len(body) // 2])
    await exchange.writer.drain()


def log_prob(value, at=1):
    """Rewrite the log-prob of one new token."""

    def change(answer):
        answer["meta_info"]["output_token_logprobs"][at][0] = value

    return rewrite(change)


def one_more(answer):
    answer["output_ids"].append(5)
    answer["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])


def echo(answer):
    answer["output_ids"][:0] = [3, 4, 12]


BROKEN = {
    "reset": reset,
    "vanish": vanish,
    "cut_body": cut(0.5),
    "cut_chunk": cut_chunk,
    "half_json": cut(0.5, closed=True),
    "short_length": cut(more=-7),
    "long_length": cut(more=7),
    "gzip_garbage": cut(headers=["Content-Encoding: gzip"]),
}
"""Answers that are lost on the way."""

REJECTED = {
    "fewer log-probs": (in_meta(output_token_logprobs=lambda old: old[:-1]), "ENG79"),
    "no log-probs": (in_meta(output_token_logprobs=None), "ENG79"),
    "NaN": (log_prob(float("nan")), "ENG80"),
    "null": (log_prob(None), "ENG80"),
    "above zero": (log_prob(0.25), "ENG80"),
    "minus infinity": (log_prob(float("-inf")), "ENG80"),
    "more tokens": (rewrite(one_more), "ENG82"),
    "prompt echoed": (rewrite(echo), "ENG82"),
    "no version": (in_meta(weight_version=None, weight_versions=None), "ENG83"),
    "older": (in_meta(weight_version="3.6", weight_versions=None), "ENG83"),
    "newer": (in_meta(weight_version="3.8", weight_versions=None), "ENG83"),
    "of another epoch": (in_meta(weight_version="2.7", weight_versions=None), "ENG83"),
}
"""Answers that cannot be, to a request of tokens 3, 4, 12 for 8 tokens where version 7 of epoch 3 alone may serve."""


@pytest.mark.parametrize("spoiled", [faults.slow, faults.hang])
def test_the_deadline_is_of_the_whole_answer(spoiled):
    """Timeout mid-body; slow-loris: every read is quick, the answer never ends."""

    async def main():
        async with both(timeout=1.5) as (client, proxy, server):
            proxy.always(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert error.code == "ENG76"
            await server.until(lambda: server.aborts)  # nobody waits for it any more
            assert (proxy.count("/generate"), client.progress.in_flight) == (1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("spoiled", BROKEN.values(), ids=BROKEN)
def test_an_answer_that_was_lost_on_the_way_is_asked_for_again(spoiled):
    """Truncated JSON, chunked cut, wrong Content-Length, gzip garbage: transport errors."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(spoiled)
            assert right(await ask(client))
            assert proxy.paths == ["/generate", "/abort_request", "/generate"]
            assert len({body["rid"] for body in server.bodies}) == len(server.bodies)
            proxy.always(spoiled)
            assert (await error_of(ask(client), ServerFault)).code == "ENG77"

    asyncio.run(main())


def test_the_old_try_is_over_before_the_next_begins():
    """The connection breaks while the server computes: its request is aborted there, not left to run."""

    async def main():
        async with held() as (client, proxy, server):
            proxy.add(faults.begun(lambda: server.until(lambda: server.running)))
            task = asyncio.create_task(ask(client))
            _, body = await proxy.ended.get()
            assert json.loads(body)["meta_info"]["finish_reason"]["type"] == "abort"
            server.go.set()
            assert right(await task)
            assert server.most == 1

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"", b"null", b"{}", b"[]", b'{"output_ids": [], "meta_info": null}'])
def test_an_empty_answer_is_another_service(said):
    """200 with empty or null output."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faults.says(said))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate"), client.progress.rejected) == ("ENG71", 1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("case", REJECTED)
def test_an_impossible_answer_is_rejected_and_counted(case):
    """The answer is not asked for again here; the engine may go to another server."""
    spoiled, code = REJECTED[case]

    async def main():
        async with both() as (client, proxy, _):
            proxy.add(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert (error.code, client.progress.rejected, client.progress.replies) == (code, 1, 0)
            assert proxy.count("/generate") == 1
            assert right(await ask(client))

    asyncio.run(main())


def test_an_unknown_end_and_an_abort_nobody_asked_for_are_asked_again():
    """``finish_reason`` unknown, abort with 0 tokens: re-queued, attempt + 1."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faults.in_meta(finish_reason={"type": "tired"}), faults.emptied)
            assert right(await ask(client))
            assert len({body["rid"] for body in server.bodies}) == 3
            assert (client.progress.rejected, client.progress.retries) == (2, 2)
            proxy.always(faults.emptied)
            assert (await error_of(ask(client), ServerFault)).code == "ENG81"
            assert len(server.bodies) == 3 + 4

    asyncio.run(main())


def test_an_abort_nobody_asked_for_that_brings_tokens_is_a_piece():
    async def main():
        async with held() as (client, _, server):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            next(iter(server.running.values())).set()
            assert ((await task).finish, len((await task).tokens)) == ("abort", 2)

    asyncio.run(main())


def test_a_version_that_is_loaded_meanwhile_is_allowed():
    """``high`` is asked when the answer is there."""

    async def main():
        newest = [7]
        async with held() as (client, _, server):
            task = asyncio.create_task(ask(client, high=lambda: newest[0]))
            await server.until(lambda: server.running)
            newest[0], server.version = 8, "3.8"
            server.go.set()
            assert (await task).versions == [8] * 8

    asyncio.run(main())


def test_the_late_answer_of_an_earlier_try_is_ignored_and_counted():
    """Duplicate reply (retry raced): the first try's answer comes after the second try was sent."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faults.late, faults.kept)
            done = await ask(client)
            assert right(done)
            assert (client.progress.late, client.progress.strangers, client.progress.replies) == (1, 0, 1)
            assert client.progress.tokens == 8
            assert len({body["rid"] for body in server.bodies}) == 2  # the second try's own answer never came

    asyncio.run(main())


def test_an_answer_to_no_request_of_ours_is_ignored_and_counted():
    """Reply for unknown uid."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.add(faults.in_meta(id="somebody-else"))
            assert right(await ask(client))
            assert (client.progress.late, client.progress.strangers, client.progress.replies) == (0, 1, 1)
            proxy.always(faults.in_meta(id=None))
            assert (await error_of(ask(client), ServerFault)).code == "ENG88"

    asyncio.run(main())


async def endless(exchange):
    """Chunks without end."""
    with suppress(ConnectionError):
        await exchange.start()
        while True:
            await exchange.chunk(b" " * 65536)


@pytest.mark.parametrize("spoiled", [faults.huge, endless])
def test_a_huge_answer_is_not_read_to_its_end(spoiled, monkeypatch):
    """Huge reply (1 GB): stated, and without end."""
    monkeypatch.setattr(client_module, "REPLY_BYTES", 1 << 16)

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate")) == ("ENG91", 1)

    asyncio.run(main())


def test_every_code_that_breaks_a_rule_is_counted():
    assert {"ENG71", "ENG79", "ENG80", "ENG81", "ENG82", "ENG83", "ENG88", "ENG91", "TOK44"} == calls.REJECTED


async def forgetful(reader, writer):
    """A server that answers a connection's first request in full and closes it, unsaid, when the second comes."""
    for answers in (True, False):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        if answers:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
    writer.close()


def test_a_call_that_cannot_be_sent_twice_goes_over_a_connection_of_its_own():
    """A kept connection that the server has closed by now; what it was to carry is not known to have begun."""

    async def main():
        async with await asyncio.start_server(forgetful, "127.0.0.1", 0) as server:
            client = client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", retries=0)
            for retry in (True, False, False):
                assert await client.post("/pause_generation", {}, timeout=20, retry=retry) == {}
            error = await error_of(client.post("/pause_generation", {}, timeout=20, retry=True), ServerFault)
            assert error.code == "ENG77"  # it went over the kept one, and may be sent again
            await client.close()

    asyncio.run(main())
