"""Threads that hooks run on: one after the other where they end, none that is held by one that hangs."""

import asyncio
import gc
import threading

import pytest

from slime_core.plugins import boundary
from slime_core.plugins.boundary import HookThreads, Late

pytestmark = pytest.mark.unit


def test_hooks_that_end_share_a_thread_and_each_has_the_context_of_its_call():
    async def run():
        threads, seen = HookThreads(), []
        for number in range(50):
            seen.append(await threads.run(lambda number=number: (threading.current_thread(), number)))
        return seen

    seen = asyncio.run(run())
    assert [number for _, number in seen] == list(range(50))
    assert len({thread for thread, _ in seen}) < 25  # one may still be on its way back when the next call comes
    assert all(thread.daemon for thread, _ in seen)


def test_many_at_once_have_a_thread_each_up_to_the_limit():
    barrier = threading.Barrier(4)

    async def run():
        threads = HookThreads(limit=4)
        return await asyncio.gather(*(threads.run(lambda: barrier.wait(20)) for _ in range(4)))

    assert sorted(asyncio.run(run())) == [0, 1, 2, 3]


def test_the_thread_of_a_hook_that_hangs_serves_no_other_until_it_has_ended():
    release, held = threading.Event(), []

    def hang():
        held.append(threading.current_thread())
        release.wait(60)

    async def run():
        threads = HookThreads()
        await threads.run(threading.current_thread)
        with pytest.raises(Late) as late:
            await threads.run(hang, 1.0)
        assert late.value.stuck
        others = [await threads.run(threading.current_thread) for _ in range(3)]
        release.set()
        return others

    others = asyncio.run(run())
    assert held
    assert held[0] not in others


def test_an_error_of_a_hook_whose_caller_has_gone_is_not_reported_as_unseen():
    """Another sample of the group failed in the same moment, and this one's caller was cancelled."""
    unseen, begun, release = [], threading.Event(), threading.Event()

    def fail():
        begun.set()
        release.wait(60)
        raise ValueError("late")

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        threads = HookThreads(limit=1)
        task = asyncio.create_task(threads.run(fail))
        while not begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        assert await threads.run(lambda: 1) == 1
        del task
        gc.collect()

    asyncio.run(run())
    assert unseen == []


def test_a_thread_without_work_ends(monkeypatch):
    monkeypatch.setattr(boundary, "IDLE", 0.01)

    async def run():
        return await HookThreads().run(threading.current_thread)

    thread = asyncio.run(run())
    thread.join(20)
    assert not thread.is_alive()
