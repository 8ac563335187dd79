"""A group's way to the engine is short: a stack trace of a failed request fits on a screen."""

import asyncio

import pytest

from slime_core.rollout.collector import Collector
from slime_core.testing.fakes import FakeEngine

pytestmark = pytest.mark.unit


def await_chain(task):
    """Names of the coroutines that a task waits through, outermost first."""
    names, coroutine = [], task.get_coro()
    while hasattr(coroutine, "cr_code"):
        names.append(coroutine.cr_code.co_qualname)
        coroutine = coroutine.cr_await
    return names


def waiting_for(task):
    """The task that gathers this one, if any."""
    return next((t for t in asyncio.all_tasks() if task in getattr(t._fut_waiter, "_children", ())), None)


class TracedEngine(FakeEngine):
    """Keeps the coroutines from the collector's group to its first request."""

    chain: list[str] | None = None

    async def generate(self, request):
        task = asyncio.current_task()
        await asyncio.sleep(0)  # a task that gathers others waits for them by then
        if self.chain is None:
            self.chain = []
            asyncio.get_running_loop().call_soon(self.trace, task)
        return await super().generate(request)

    def trace(self, task):
        while task is not None:
            self.chain = await_chain(task) + self.chain
            task = waiting_for(task)


@pytest.mark.parametrize("flags", [(), ("--over-sampling-batch-size", 4)], ids=["plain", "over-sampling"])
def test_a_group_reaches_the_engine_in_at_most_eight_frames(collect, flags):
    engine = TracedEngine(vocab_size=16)
    collect(*flags, steps=1, engine=engine)
    begin = engine.chain.index(Collector._run.__qualname__)
    end = engine.chain.index(TracedEngine.generate.__qualname__)
    between = engine.chain[begin + 1 : end]
    assert {"Plugins.generate", "Core.slime_generate", "Context.generate"} <= set(between)
    assert len(between) <= 8, between
