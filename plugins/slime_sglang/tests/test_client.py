"""The client before a server that answers right: requests, aborts, seats, scores and its end; the cases of what goes
wrong are in the modules beside this one, and meet the real server in served/test_client_faults.py."""

import asyncio
import itertools
import time

import fake_sglang
import faults
import numpy as np
import pytest
from client_case import ask, both, error_of, held, request, right
from fake_sglang import TOKEN

from slime_sglang import calls, concurrency, http, retries

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("short_pauses")]


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
            for asked, code in ((request(tokens=(fake_sglang.VOCAB,)), "ENG02"), (request(tokens=range(64)), "ENG72")):
                assert (await error_of(ask(client, asked))).code == code
            assert proxy.paths == []

    asyncio.run(main())


def test_a_stop_string_over_kept_tokens_is_found_with_a_tokenizer_and_refused_without_one():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(f"<{token}>" for token in ids)

    drawn = fake_sglang.draw(7, 3)
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
        async with held() as (client, _, server):
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
        async with held() as (client, _, server):
            task = asyncio.create_task(ask(client))
            await server.until(lambda: server.running)
            await client.abort(["grpo/17-0", "of nobody"])
            done = await task
            assert (done.finish, done.tokens, len(done.log_probs), done.versions) == (
                "abort",
                [row[1] for row in fake_sglang.rows(7, 3, 2)],
                2,
                [7, 7],
            )
            assert len(server.aborts) == 1

    asyncio.run(main())


def test_an_abort_that_was_asked_for_may_bring_no_token():
    async def main():
        async with held(made=0) as (client, _, server):
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
    monkeypatch.setattr(retries, "time", clock)

    async def main():
        async with held(concurrency=2, timeout=60.0) as (client, _, server):
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
        async with held(concurrency=1) as (client, _, server):
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
        line = concurrency.ConcurrencyLimit(1)
        assert await line.acquire(concurrency.InFlightRequest("a"))
        waiting = asyncio.create_task(line.acquire(concurrency.InFlightRequest("b")))
        await asyncio.sleep(0)
        line.release()  # it is b's now, who does not know yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(40):
            assert await line.acquire(concurrency.InFlightRequest("c"))

    asyncio.run(main())


def test_a_caller_that_is_cancelled_ends_the_request_on_the_server():
    async def main():
        async with held() as (client, _, server):
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
        async with held(concurrency=1) as (client, _, server):
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
            proxy.always(faults.status(503, headers=["Retry-After: 50"]))
            task = asyncio.create_task(ask(client))
            while not proxy.paths or any(entry.rid for entry in client._in_flight):
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
            proxy.add(faults.status(503), faults.cut(0.5))
            assert len(await client.score([3, 4, 12], 1)) == 2
            assert client.progress.retries == 2

    asyncio.run(main())
