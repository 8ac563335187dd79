"""slime's engine over the real server: aborts, pauses, and weights that change under running requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from raw_server import RawServer
from served_engine import assert_holds, begin, computing, load, request, serving, update, whole

from slime_core.errors import EngineError
from slime_sglang.engine import SglangEngine

pytestmark = pytest.mark.system

LASTING, LONG = 600, 3500
"""Tokens of a request that goes on for some seconds, so that nothing overtakes it; of one that is not waited for."""

Work = Callable[[SglangEngine], Coroutine[Any, Any, None]]
With = Callable[..., list[str]]


@pytest.fixture
def with_engine(server: RawServer, served_model: Path, tmp_path: Path) -> With:
    """Do some work with an engine that serves version 1; the answer is what the engine said."""

    def run(work: Work, *flags: str) -> list[str]:
        notes: list[str] = []

        async def inside() -> None:
            async with serving(server.server, served_model, tmp_path, notes, *flags) as engine:
                await load(engine, served_model, 1)
                await work(engine)

        server.loop.run(inside(), 100)
        return notes

    return run


def test_an_abort_returns_the_tokens_that_were_made(with_engine: With, server: RawServer) -> None:
    async def work(engine: SglangEngine) -> None:
        running = begin(engine, ["first", "second"], LONG)
        await computing(server, 80, requests=2)
        ended = await engine.abort(["first"])
        first = await running["first"]
        assert first.finish == "abort"
        assert 0 < len(first.tokens) < LONG
        whole(first, len(first.tokens))
        assert [(done.id, done.tokens) for done in ended] == [("first", first.tokens)]
        assert not running["second"].done()
        await engine.abort(["second", "never asked"])
        assert (await running["second"]).finish == "abort"

    with_engine(work)


@pytest.mark.parametrize("mode", ["keep", pytest.param("retract", marks=pytest.mark.nightly)])
def test_a_pause_holds_requests_and_they_lose_nothing(with_engine: With, server: RawServer, mode: Any) -> None:
    async def work(engine: SglangEngine) -> None:
        running = begin(engine, ["held"], LASTING)
        await computing(server, 40)
        await engine.pause(mode)
        late = asyncio.create_task(engine.generate(request("late", 4)))
        done, _ = await asyncio.wait([late, *running.values()], timeout=0.5)
        assert not done
        await engine.resume()
        whole(await running["held"], LASTING)
        whole(await late, 4)

    with_engine(work)


def test_a_pause_with_abort_ends_requests_with_what_they_have(with_engine: With, server: RawServer) -> None:
    async def work(engine: SglangEngine) -> None:
        running = begin(engine, ["ended"], LONG)
        await computing(server, 40)
        await engine.pause("abort")
        done = await running["ended"]
        assert done.finish == "abort"
        assert 0 < len(done.tokens) < LONG
        await engine.resume()
        whole(await engine.generate(request("after", 4)), 4)

    with_engine(work)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mode", ["in_place", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("abort", "retract"))]
)
def test_weights_change_under_running_requests_and_every_token_says_which_made_it(
    with_engine: With, server: RawServer, other_model: Path, mode: str
) -> None:
    async def work(engine: SglangEngine) -> None:
        assert ("live_load" in engine.abilities) == (mode != "abort")
        running = begin(engine, [f"r{number}" for number in range(4)], LASTING)
        await computing(server, 80, requests=4)
        sent = await update(engine, other_model, 2)
        await engine.load(sent)
        assert engine.version == 2
        for task in running.values():
            done = await task
            whole(done, LASTING)
            assert set(done.versions) == {1, 2}
        whole(await engine.generate(request("after", 3)), 3)
        await assert_holds(engine, sent)

    with_engine(work, "--pause-generation-mode", mode)


def test_an_engine_on_a_cpu_gives_no_memory_back_and_says_so(with_engine: With) -> None:
    async def work(engine: SglangEngine) -> None:
        assert "release" not in engine.abilities
        with pytest.raises(EngineError) as caught:
            await engine.release({"kv"})
        assert caught.value.code == "ENG06"

    with_engine(work)
