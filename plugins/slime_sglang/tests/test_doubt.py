"""A connection that broke under a request: a retry where the server lives, a fence where it does not."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from engine_case import PATIENCE, request, serving, update
from faults import FaultProxy, reset

from slime_core.errors import EngineError

pytestmark = pytest.mark.unit


def run(work):
    asyncio.run(asyncio.wait_for(work, PATIENCE))


async def proxied(stack, tmp_path, **more):
    """An engine whose servers stand behind proxies; version 1 is loaded."""
    proxies = []

    async def before(fake):
        proxies.append(await stack.enter_async_context(FaultProxy(fake.port)))
        fake.url = proxies[-1].url

    engine, fakes = await stack.enter_async_context(serving(tmp_path, change=before, **more))
    await engine.load(update(tmp_path, 1))
    return engine, fakes, proxies


@pytest.mark.parametrize("count", [1, 2])
def test_one_broken_connection_is_a_retry_and_no_death(tmp_path, count):
    """A busy machine breaks connections; not even the abort of what was lost came through."""

    async def work():
        async with AsyncExitStack() as stack:
            engine, _, proxies = await proxied(stack, tmp_path, count=count, retries=0)
            for proxy in proxies:
                proxy.add(reset)
                proxy.add(reset, path="/abort_request")
            engine.requests._attempts = 4
            done = await engine.generate(request("a-0"))
            assert len(done.tokens) == 6
            assert len(engine.router.lanes) == count, "a server that lives was given up"
            assert engine.requests.requeued >= 1
            assert sum(proxy.count("/model_info") for proxy in proxies) > count  # it was asked whether it lives
            assert (await engine.score([1, 2, 3], 1)).shape == (2,)

    run(work())


def test_many_connections_that_break_together_ask_once(tmp_path):
    async def work():
        async with AsyncExitStack() as stack:
            engine, _, (proxy,) = await proxied(stack, tmp_path, count=1, retries=0)
            engine.requests._attempts = 4
            before = proxy.count("/model_info")
            gate = asyncio.Event()

            async def broken(exchange):
                if proxy.count("/generate") < 8:
                    await gate.wait()
                gate.set()
                await reset(exchange)

            proxy.add(*[broken] * 8)
            proxy.always(reset, path="/abort_request")
            await asyncio.gather(*(engine.generate(request(f"p{n}-0")) for n in range(8)))
            assert proxy.count("/model_info") == before + 1
            assert len(engine.router.lanes) == 1

    run(work())


def test_a_server_that_answers_nothing_any_more_is_given_up(tmp_path):
    """Every connection breaks, the question's too."""

    async def work():
        async with AsyncExitStack() as stack:
            engine, _, (sick, _) = await proxied(stack, tmp_path, count=2, retries=0)
            engine.requests._attempts = 4
            for path in ("/generate", "/abort_request", "/model_info"):
                sick.always(reset, path=path)
            done = await asyncio.gather(*(engine.generate(request(f"p{n}-0")) for n in range(4)))
            assert all(len(one.tokens) == 6 for one in done)
            assert [lane.number for lane in engine.router.lanes] == [1]

    run(work())


def test_a_request_whose_connections_always_break_ends_and_its_server_stays(tmp_path):
    async def work():
        async with AsyncExitStack() as stack:
            engine, _, (proxy,) = await proxied(stack, tmp_path, count=1, retries=1)
            proxy.always(reset)
            with pytest.raises(EngineError, match="ENG75"):
                await engine.generate(request("a-0"))
            assert len(engine.router.lanes) == 1

    run(work())


def test_progress_is_told_by_data_parallel_rank(tmp_path):
    """What the watch is told of a server whose ranks are told apart."""

    async def work():
        async with serving(tmp_path, 1, dp=2) as (engine, (fake,)):
            await engine.load(update(tmp_path, 1))
            fake.hold = True
            tasks = [asyncio.create_task(engine.generate(request(f"p{n}-0"))) for n in range(4)]
            await fake.until(lambda: len(fake.running) == 4)
            assert engine.fleet.progress(0) == [(2, 0), (2, 0)]
            fake.go.set()
            await asyncio.gather(*tasks)
            assert engine.fleet.progress(0) == [(0, 14), (0, 14)]  # six tokens and a reply, twice

    run(work())
