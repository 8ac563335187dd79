"""The client before a server that answers right and a proxy that does not; the same faults meet the real server in
tests/sglang/test_client_faults.py."""

import asyncio
import itertools
import json
import socket
import ssl
import subprocess
import time
from contextlib import aclosing, asynccontextmanager

import faulty
import numpy as np
import pytest
from faulty import BROKEN, REJECTED, TOKEN, Canned, FaultProxy

from slime_core.engines.sglang import calls, client as client_module, http, seats, tries
from slime_core.engines.sglang.address import Address
from slime_core.engines.sglang.client import Client, ServerFault
from slime_core.errors import EngineError
from slime_core.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.unit

FEATURES = frozenset({"version_spans"})


def request(name="grpo/17-0", tokens=(3, 4, 12), *, seed=7, kept=0, **params):
    """A request of a few tokens."""
    words = {"max_new_tokens": 8, **params}
    return GenerateRequest(id=name, tokens=list(tokens), params=SamplingParams(**words), seed=seed, kept=kept)


def client_of(url, **changes):
    """A client with small limits."""
    words = {
        "vocab_size": faulty.VOCAB,
        "context_len": 64,
        "features": FEATURES,
        "concurrency": 8,
        "timeout": 30.0,
        "retries": 3,
        "epoch": 3,
    }
    token = changes.pop("token", TOKEN)
    return Client(Address(url=url, token=token, ca=changes.pop("ca", "")), **(words | changes))


@asynccontextmanager
async def both(server=None, **changes):
    """(client, proxy, server), started; the client speaks to the proxy."""
    async with server or Canned() as server, FaultProxy(server.port) as proxy:
        client = client_of(proxy.url, **changes)
        try:
            yield client, proxy, server
        finally:
            await client.close()


async def ask(client, asked=None, **words):
    """Generate with version 7 alone allowed."""
    return await client.generate(asked or request(), **({"low": 7, "high": lambda: 7} | words))


def right(done):
    """Whether a completion is what the server means by the request."""
    return done.tokens == [row[1] for row in faulty.rows(7, 3, 8)] and done.finish == "length"


async def error_of(work, kind=EngineError):
    """The error that a coroutine ends with."""
    with pytest.raises(kind) as caught:
        await work
    return caught.value


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Tests do not wait for the pauses between tries."""
    monkeypatch.setattr(tries, "FIRST_PAUSE", 0.005)
    monkeypatch.setattr(tries.Tries, "__init__", _quick(tries.Tries.__init__))


def _quick(init):
    def wrapped(self, *args, **words):
        init(self, *args, **{"pause": 0.005, **words})

    return wrapped


# -- what is right


def test_a_request_comes_back_as_a_completion():
    async def main():
        async with both() as (client, _, server):
            done = await ask(client)
            assert right(done)
            assert (done.id, done.versions, done.epoch, len(done.log_probs)) == ("grpo/17-0", [7] * 8, 3, 8)
            assert server.bodies[0]["input_ids"] == [3, 4, 12]
            p = client.progress
            assert (p.tokens, p.replies, p.in_flight, p.waiting, p.rejected) == (8, 1, 0, 0, 0)

    asyncio.run(main())


def test_without_orjson_the_answers_are_the_same(monkeypatch):
    monkeypatch.setattr(http, "orjson", None)

    async def main():
        async with both() as (client, _, _):
            assert right(await ask(client))

    asyncio.run(main())


def test_nothing_is_sent_for_no_tokens_and_for_requests_that_cannot_be_served():
    async def main():
        async with both() as (client, proxy, _):
            assert (await ask(client, request(max_new_tokens=0))).finish == "length"
            for asked, code in ((request(tokens=(faulty.VOCAB,)), "ENG02"), (request(tokens=range(64)), "ENG72")):
                assert (await error_of(ask(client, asked))).code == code
            assert proxy.paths == []

    asyncio.run(main())


def test_a_stop_string_over_kept_tokens_is_found_with_a_tokenizer_and_refused_without_one():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(f"<{token}>" for token in ids)

    drawn = faulty.draw(7, 3)
    asked = request(kept=1, stop=(f"<12><{drawn}>",))

    async def main():
        async with both(tokenizer=Letters) as (client, _, _):
            done = await ask(client, asked)
            assert (done.tokens, done.finish, len(done.log_probs)) == ([drawn], "stop", 1)
        async with both() as (client, proxy, _):
            assert (await error_of(ask(client, asked))).code == "ENG03"
            assert proxy.paths == []

    asyncio.run(main())


def test_no_rid_is_a_prefix_of_another():
    """SGLang aborts by prefix: sample 1 must not end with sample 10."""

    async def main():
        server = Canned()
        server.hold = True
        async with both(server) as (client, _, _):
            names = ["grpo/1-1", "grpo/1-10", "grpo/1-1", "grpo/1"]
            tasks = [asyncio.create_task(ask(client, request(name))) for name in names]
            await server.until(lambda: len(server.running) == 4)
            await client.abort(["grpo/1"])
            assert (await tasks[3]).finish == "abort"
            assert len(server.running) == 3
            await client.abort(["grpo/1-10"])
            assert (await tasks[1]).finish == "abort"
            assert not tasks[0].done()
            await client.abort_all()
            assert [(await task).finish for task in tasks] == ["abort"] * 4
            server.go.set()
            await asyncio.gather(*(ask(client, request(name)) for name in ["grpo/1", "grpo/1-1"] * 12))
            rids = sorted(body["rid"] for body in server.bodies)
            assert not any(after.startswith(before) for before, after in itertools.pairwise(rids))

    asyncio.run(main())


def test_an_abort_returns_the_partial_tokens():
    async def main():
        server = Canned()
        server.hold = True
        async with both(server) as (client, _, _):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            await client.abort(["grpo/17-0", "of nobody"])
            done = await task
            assert (done.finish, done.tokens, len(done.log_probs), done.versions) == (
                "abort",
                [row[1] for row in faulty.rows(7, 3, 2)],
                2,
                [7, 7],
            )
            assert len(server.aborts) == 1

    asyncio.run(main())


def test_an_abort_that_was_asked_for_may_bring_no_token():
    async def main():
        server = Canned()
        server.hold, server.made = True, 0
        async with both(server) as (client, _, _):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            await client.abort(["grpo/17-0"])
            assert ((await task).finish, (await task).tokens) == ("abort", [])
            assert (client.progress.rejected, client.progress.retries) == (0, 0)

    asyncio.run(main())


class Clock:
    """time.monotonic() that can be set forward."""

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


def test_at_most_concurrency_requests_are_at_the_server_and_waiting_costs_no_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    monkeypatch.setattr(http, "time", clock)
    monkeypatch.setattr(tries, "time", clock)

    async def main():
        server = Canned()
        server.hold = True
        async with both(server, concurrency=2, timeout=60.0) as (client, _, _):
            tasks = [asyncio.create_task(ask(client, request(f"r-{i}"))) for i in range(6)]
            for served in (2, 4, 6):
                await server.until(lambda served=served: len(server.bodies) == served and len(server.running) == 2)
                assert (client.progress.in_flight, client.progress.waiting) == (2, 6 - served)
                clock.ahead += 1000.0  # longer than a deadline: of those that wait, for nobody's
                for event in server.running.values():
                    event.set()
                await asyncio.gather(*tasks[served - 2 : served])
            assert [task.result().finish for task in tasks] == ["abort"] * 6
            assert server.most == 2
            assert client.progress.waited >= 2 * 1000.0 + 2 * 2000.0

    asyncio.run(main())


def test_a_request_without_a_seat_is_aborted_at_once_and_leaves_no_seat_behind():
    async def main():
        server = Canned()
        server.hold = True
        async with both(server, concurrency=1) as (client, _, _):
            first = asyncio.create_task(ask(client, request("a")))
            await server.until(lambda: server.running)
            second, third = (asyncio.create_task(ask(client, request(name))) for name in "bc")
            while client.progress.waiting < 2:
                await asyncio.sleep(0)
            await client.abort(["b"])
            assert ((await second).finish, (await second).tokens) == ("abort", [])
            third.cancel()
            await asyncio.gather(third, return_exceptions=True)
            server.go.set()
            assert right(await first)
            assert right(await ask(client, request("d")))
            assert len(server.bodies) == 2

    asyncio.run(main())


def test_a_seat_given_to_a_caller_that_is_cancelled_at_that_moment_is_not_lost():
    async def main():
        line = seats.Seats(1)
        assert await line.take(seats.Flight("a"))
        waiting = asyncio.create_task(line.take(seats.Flight("b")))
        await asyncio.sleep(0)
        line.give()  # it is b's now, who does not know yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(40):
            assert await line.take(seats.Flight("c"))

    asyncio.run(main())


def test_a_caller_that_is_cancelled_ends_the_request_on_the_server():
    async def main():
        server = Canned()
        server.hold = True
        async with both(server) as (client, _, _):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            rid = next(iter(server.running))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.until(lambda: server.aborts)
            assert server.aborts[0]["rid"] == rid
            assert client.progress.in_flight == 0

    asyncio.run(main())


def test_closing_the_client_ends_what_waits_and_refuses_what_comes():
    async def main():
        server = Canned()
        server.hold = True
        async with both(server, concurrency=1) as (client, _, _):
            tasks = [asyncio.create_task(ask(client, request(name))) for name in "ab"]
            await server.until(lambda: server.running)
            while not client.progress.waiting:
                await asyncio.sleep(0)
            await client.close()
            for task in tasks:
                assert (await error_of(task)).code == "ENG84"
            assert (await error_of(ask(client))).code == "ENG84"
            assert (await error_of(client.model_info())).code == "ENG84"

    asyncio.run(main())


def test_closing_the_client_ends_a_pause_between_two_tries():
    async def main():
        async with both(timeout=100.0) as (client, proxy, _):
            proxy.always(faulty.status(503, headers=["Retry-After: 50"]))
            task = asyncio.create_task(ask(client))
            while not proxy.paths or any(flight.rid for flight in client._flights):
                await asyncio.sleep(0)
            await client.close()
            async with asyncio.timeout(40):
                assert (await error_of(task)).code == "ENG84"

    asyncio.run(main())


def test_connections_that_were_closed_are_not_opened_again():
    async def main():
        async with both() as (client, _, _):
            door = http.Transport(client.address.url, token=TOKEN)
            assert (await door.ask("GET", "/health", end=time.monotonic() + 30)).status
            await door.close()
            error = await error_of(door.ask("GET", "/health", end=time.monotonic() + 30))
            assert (error.code, error.where) == ("ENG84", client.address.url)

    asyncio.run(main())


def test_the_other_calls_reach_their_routes():
    async def main():
        async with both() as (client, _, server):
            await client.pause("retract")
            await client.resume()
            await client.flush()
            assert (await client.model_info())["weight_version"] == "3.7"
            assert (await client.server_info())["version"] == "0.5.23"
            assert await client.checksums() == [{"model.norm.weight": "00ff00ff00ff00ff"}]
            assert client.version_text(4) == "3.4"
            paths = [path for path, _ in server.calls]
            assert paths == [
                "/pause_generation",
                "/continue_generation",
                "/flush_cache",
                "/model_info",
                "/server_info",
                "/weights_checker",
            ]
            assert server.calls[0][1] == {"mode": "retract"}
            assert (await error_of(client.post("/update_weights", {}, timeout=5.0))).code == "ENG71"  # no such route

    asyncio.run(main())


def test_scores_come_as_an_array():
    async def main():
        async with both() as (client, proxy, _):
            found = await client.score([3, 4, 12, 9, 5], 2)
            np.testing.assert_array_equal(found, np.float32([-1.0, -1.5, -2.0]))
            assert (await client.score([3, 4], 2)).shape == (0,)
            for tokens, start, code in (
                ([3, 4], 0, "ENG03"),
                ([], 1, "ENG01"),
                ([3, -1], 1, "ENG02"),
                ([3] * 65, 1, "ENG72"),
            ):
                assert (await error_of(client.score(tokens, start))).code == code
            proxy.add(faulty.status(503), faulty.cut_body)
            assert len(await client.score([3, 4, 12], 1)) == 2
            assert client.progress.retries == 2

    asyncio.run(main())


# -- streams


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_brings_growing_pieces_and_the_whole_at_its_end(incremental):
    async def main():
        async with both(Canned(incremental=incremental)) as (client, _, _):
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
        server = Canned()
        server.hold, server.made = True, 4
        async with both(server) as (client, _, _):
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
        server = Canned(incremental=incremental)
        server.hold, server.made = True, 4
        async with both(server) as (client, _, _):
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
            proxy.add(faulty.status(503), faulty.reset)
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
            proxy.add(faulty.html)
            with pytest.raises(ServerFault) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG71"
            proxy.add(faulty.says(b"<html>\n<body>\n", "text/event-stream"))
            with pytest.raises(ServerFault) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG71"
            said = (
                b'data: {"error": {"message": "The input (9 tokens) is longer than the model\'s context length"}}\n\n'
            )
            proxy.add(faulty.says(said, "text/event-stream"))
            with pytest.raises(EngineError) as caught:
                [piece async for piece in client.stream(request(), low=7, high=lambda: 7)]
            assert caught.value.code == "ENG72"

    asyncio.run(main())


# -- the cases


def closed_port():
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_case_69_a_refused_connection_names_the_url_after_bounded_tries():
    """Case 69: connection refused at start."""

    async def main():
        url = f"http://127.0.0.1:{closed_port()}"
        client = client_of(url)
        error = await error_of(ask(client), ServerFault)
        assert error.code == "ENG69"
        assert url in error.where
        assert client.progress.retries == 3
        assert TOKEN not in str(error)
        await client.close()

    asyncio.run(main())


def test_case_69_a_server_that_comes_up_meanwhile_is_found():
    """Case 69: nothing was sent, so asking again is safe and costs no abort."""

    async def main():
        async with both(retries=1000) as (client, proxy, server):
            await proxy.down()
            task = asyncio.create_task(ask(client))
            while not client.progress.retries:
                await asyncio.sleep(0)
            await proxy.up()
            assert right(await task)
            assert len(server.bodies) == 1
            assert server.aborts == []

    asyncio.run(main())


def test_case_71_another_service_is_quoted():
    """Case 71: wrong service on the port (HTML 200)."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.always(faulty.html)
            error = await error_of(ask(client), ServerFault)
            assert error.code == "ENG71"
            assert "Printer" in error.why
            assert len(error.why) < 400
            assert (proxy.count("/generate"), server.bodies) == (1, [])
            proxy.always(faulty.html, "/model_info")
            assert (await error_of(client.model_info())).code == "ENG71"

    asyncio.run(main())


def test_case_72_a_prompt_that_the_server_finds_too_long_is_not_asked_again():
    """Case 72: HTTP 400 (prompt too long)."""
    said = b'{"error": {"message": "The input (70 tokens) is longer than the model\'s context length (64 tokens)."}}'

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faulty.status(400, body=said))
            error = await error_of(ask(client))
            assert error.code == "ENG72"
            assert "70 tokens" in error.what
            assert not isinstance(error, ServerFault)
            proxy.always(faulty.status(400))
            error = await error_of(ask(client))
            assert error.code == "ENG78"
            assert "made up: 400" in error.what
            assert proxy.paths == ["/generate"] * 2

    asyncio.run(main())


@pytest.mark.parametrize("code", [401, 403])
def test_case_73_a_refused_token_is_not_asked_again_and_not_shown(code):
    """Case 73: 401 and 403: a hint, no retry."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faulty.status(code))
            error = await error_of(ask(client))
            assert error.code == "ENG73"
            assert "rollout_engine_token_env" in error.fix
            assert not isinstance(error, ServerFault)
            assert TOKEN not in str(error)
            assert TOKEN not in repr(client.address)
            assert proxy.paths == ["/generate"]

    asyncio.run(main())


def test_case_73_a_wrong_token_is_refused():
    async def main():
        async with both(token="another") as (client, _, _):
            assert (await error_of(ask(client))).code == "ENG73"

    asyncio.run(main())


@pytest.mark.parametrize("code", [429, 503])
def test_case_74_a_busy_server_is_asked_again_a_bounded_number_of_times(code):
    """Case 74: 429 and 503: nothing was begun, so no abort is sent."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faulty.status(code), faulty.status(code))
            assert right(await ask(client))
            assert (client.progress.retries, server.aborts) == (2, [])
            proxy.always(faulty.status(code))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate")) == ("ENG74", 3 + 4)

    asyncio.run(main())


def test_case_74_retry_after_is_waited_for_within_the_deadline():
    """Case 74: Retry-After."""

    async def main():
        async with both(timeout=50.0) as (client, proxy, _):
            proxy.add(faulty.status(503, headers=["Retry-After: 1"]))
            begun = time.monotonic()
            assert right(await ask(client))
            assert time.monotonic() - begun > 0.9
            proxy.add(faulty.status(503, headers=["Retry-After: 60"]))
            assert (await error_of(ask(client), ServerFault)).code == "ENG74"  # that is past the deadline
            assert http.retry_after({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 0.0

    asyncio.run(main())


@pytest.mark.parametrize("code", [500, 502, 504])
def test_case_75_a_server_that_failed_once_is_asked_again_after_an_abort_of_the_old_rid(code):
    """Case 75: 500 once."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faulty.status(code))
            assert right(await ask(client))
            assert proxy.paths == ["/generate", "/abort_request", "/generate"]
            assert server.aborts[0]["rid"] != server.bodies[0]["rid"]

    asyncio.run(main())


def test_case_75_a_server_that_always_fails_is_given_up():
    """Case 75: 500 always: bounded tries, then an error that says the server is at fault."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faulty.status(500))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate"), client.progress.in_flight) == ("ENG75", 4, 0)
            proxy.always(faulty.status(501))
            assert (await error_of(ask(client), ServerFault)).code == "ENG75"
            assert proxy.count("/generate") == 5

    asyncio.run(main())


def test_case_75_nothing_is_asked_again_while_the_old_try_may_still_run():
    """Case 75: the abort of the old rid fails too."""

    async def main():
        async with both(retries=1) as (client, proxy, _):
            proxy.add(faulty.status(500))
            proxy.always(faulty.status(500), "/abort_request")
            assert (await error_of(ask(client), ServerFault)).code == "ENG75"
            assert proxy.count("/generate") == 1

    asyncio.run(main())


@pytest.mark.parametrize("spoiled", [faulty.slow, faulty.hang])
def test_case_76_the_deadline_is_of_the_whole_answer(spoiled):
    """Case 76: timeout mid-body; slow-loris: every read is quick, the answer never ends."""

    async def main():
        async with both(timeout=1.5) as (client, proxy, server):
            proxy.always(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert error.code == "ENG76"
            await server.until(lambda: server.aborts)  # nobody waits for it any more
            assert (proxy.count("/generate"), client.progress.in_flight) == (1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("spoiled", BROKEN, ids=lambda fault: fault.__name__)
def test_case_77_an_answer_that_was_lost_on_the_way_is_asked_for_again(spoiled):
    """Case 77: truncated JSON, chunked cut, wrong Content-Length, gzip garbage: transport errors."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(spoiled)
            assert right(await ask(client))
            assert proxy.paths == ["/generate", "/abort_request", "/generate"]
            assert len({body["rid"] for body in server.bodies}) == len(server.bodies)
            proxy.always(spoiled)
            assert (await error_of(ask(client), ServerFault)).code == "ENG77"

    asyncio.run(main())


def test_case_77_the_old_try_is_over_before_the_next_begins():
    """Case 77: the connection breaks while the server computes: its request is aborted there, not left to run."""

    async def main():
        server = Canned()
        server.hold = True
        async with both(server) as (client, proxy, _):
            proxy.add(faulty.begun(lambda: server.until(lambda: server.running)))
            task = asyncio.create_task(ask(client))
            _, body = await proxy.ended.get()
            assert json.loads(body)["meta_info"]["finish_reason"]["type"] == "abort"
            server.go.set()
            assert right(await task)
            assert server.most == 1

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"", b"null", b"{}", b"[]", b'{"output_ids": [], "meta_info": null}'])
def test_case_78_an_empty_answer_is_another_service(said):
    """Case 78: 200 with empty or null output."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faulty.says(said))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate"), client.progress.rejected) == ("ENG71", 1, 1)

    asyncio.run(main())


@pytest.mark.parametrize("case", REJECTED)
def test_cases_79_to_83_an_impossible_answer_is_rejected_and_counted(case):
    """Cases 79, 80, 82, 83: the answer is not asked for again here; the engine may go to another server."""
    spoiled, code = REJECTED[case]

    async def main():
        async with both() as (client, proxy, _):
            proxy.add(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert (error.code, client.progress.rejected, client.progress.replies) == (code, 1, 0)
            assert proxy.count("/generate") == 1
            assert right(await ask(client))

    asyncio.run(main())


def test_case_81_an_unknown_end_and_an_abort_nobody_asked_for_are_asked_again():
    """Case 81: finish_reason unknown, abort with 0 tokens: re-queued, attempt + 1."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faulty.in_meta(finish_reason={"type": "tired"}), faulty.rewrite(faulty.emptied))
            assert right(await ask(client))
            assert len({body["rid"] for body in server.bodies}) == 3
            assert (client.progress.rejected, client.progress.retries) == (2, 2)
            proxy.always(faulty.rewrite(faulty.emptied))
            assert (await error_of(ask(client), ServerFault)).code == "ENG81"
            assert len(server.bodies) == 3 + 4

    asyncio.run(main())


def test_case_81_an_abort_nobody_asked_for_that_brings_tokens_is_a_piece():
    async def main():
        server = Canned()
        server.hold = True
        async with both(server) as (client, _, _):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            next(iter(server.running.values())).set()
            assert ((await task).finish, len((await task).tokens)) == ("abort", 2)

    asyncio.run(main())


def test_case_83_a_version_that_is_loaded_meanwhile_is_allowed():
    """Case 83: ``high`` is asked when the answer is there."""

    async def main():
        server = Canned()
        server.hold = True
        newest = [7]
        async with both(server) as (client, _, _):
            task = asyncio.create_task(ask(client, high=lambda: newest[0]))
            await server.until(lambda: server.running)
            newest[0], server.version = 8, "3.8"
            server.go.set()
            assert (await task).versions == [8] * 8

    asyncio.run(main())


def test_case_87_the_late_answer_of_an_earlier_try_is_ignored_and_counted():
    """Case 87: duplicate reply (retry raced): the first try's answer comes after the second try was sent."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faulty.late, faulty.kept)
            done = await ask(client)
            assert right(done)
            assert (client.progress.late, client.progress.strangers, client.progress.replies) == (1, 0, 1)
            assert client.progress.tokens == 8
            assert len({body["rid"] for body in server.bodies}) == 2  # the second try's own answer never came

    asyncio.run(main())


def test_case_88_an_answer_to_no_request_of_ours_is_ignored_and_counted():
    """Case 88: reply for unknown uid."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.add(faulty.in_meta(id="somebody-else"))
            assert right(await ask(client))
            assert (client.progress.late, client.progress.strangers, client.progress.replies) == (0, 1, 1)
            proxy.always(faulty.in_meta(id=None))
            assert (await error_of(ask(client), ServerFault)).code == "ENG88"

    asyncio.run(main())


@pytest.mark.parametrize("spoiled", [faulty.huge, faulty.endless])
def test_case_91_a_huge_answer_is_not_read_to_its_end(spoiled, monkeypatch):
    """Case 91: huge reply (1 GB): stated, and without end."""
    monkeypatch.setattr(client_module, "REPLY_BYTES", 1 << 16)

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(spoiled)
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate")) == ("ENG91", 1)

    asyncio.run(main())


def test_case_92_an_unknown_name_is_named():
    """Case 92: DNS failure."""

    async def main():
        client = client_of("http://no-such-host.invalid:1", retries=0)
        error = await error_of(ask(client), ServerFault)
        assert error.code == "ENG69"
        assert "no-such-host.invalid" in str(error)
        await client.close()

    asyncio.run(main())


def test_case_92_proxies_of_the_environment_are_not_used(monkeypatch):
    """Case 92: proxy variables: a proxy would see the token."""

    async def main():
        async with FaultProxy(closed_port()) as trap:
            for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, trap.url)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with both() as (client, _, _):
                assert right(await ask(client))
            assert trap.paths == []

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*words, *more], check=True, capture_output=True)
    return folder


@asynccontextmanager
async def secured(server, folder):
    """The server behind TLS: its url."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def pump(source, target):
        while data := await source.read(65536):
            target.write(data)
        target.close()

    async def relay(reader, writer):
        other, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, back), pump(other, writer), return_exceptions=True)

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def test_case_93_a_self_signed_certificate_needs_its_authority_named(certificate):
    """Case 93: TLS/self-signed: an explicit file, and no switch that turns the check off."""

    async def main():
        async with Canned() as server, secured(server, certificate) as url:
            client = client_of(url)
            error = await error_of(ask(client))
            assert error.code == "ENG93"
            assert "rollout_engine_ca" in error.fix
            assert not isinstance(error, ServerFault)
            await client.close()
            client = client_of(url, ca=str(certificate / "cert.pem"))
            assert right(await ask(client))
            await client.close()
            client = client_of(url, ca=str(certificate / "none.pem"))
            assert (await error_of(ask(client))).code == "ENG93"
            await client.close()

    asyncio.run(main())


def test_case_93_a_server_without_tls_at_an_https_address_is_said_so():
    async def main():
        async with Canned() as server:
            client = client_of(server.url.replace("http://", "https://"))
            assert (await error_of(ask(client))).code == "ENG93"
            await client.close()

    asyncio.run(main())


def test_a_post_that_may_have_begun_is_not_repeated_unless_that_is_safe():
    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faulty.reset, "/update_weights_from_disk")
            assert (await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0))).code == "ENG77"
            assert proxy.count("/update_weights_from_disk") == 1
            error = await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0, retry=True))
            assert (error.code, proxy.count("/update_weights_from_disk")) == ("ENG77", 5)
            proxy.always(faulty.status(503), "/update_weights_from_disk")
            await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0))
            assert proxy.count("/update_weights_from_disk") == 9  # busy: nothing was begun
            proxy.always(faulty.hang, "/model_info")
            assert (await error_of(client.get("/model_info", timeout=0.2))).code == "ENG76"

    asyncio.run(main())


def test_every_code_that_breaks_a_rule_is_counted():
    assert {"ENG71", "ENG79", "ENG80", "ENG81", "ENG82", "ENG83", "ENG88", "ENG91", "TOK44"} == calls.REJECTED
