"""Dialogues that wait for the same verdict: one judgement serves all, and who gives up takes nobody along."""

import asyncio

import pytest
from dialogue_actors import INFRA, PROBLEM, RIGHT

from slime_kernelbench.judge import LocalJudge
from slime_kernelbench.judge.asked import RecentCache

pytestmark = pytest.mark.unit


class Slow(LocalJudge):
    """Judges when it is told to; everything before the sandbox is the real one's."""

    def __init__(self, verdicts):
        super().__init__()
        self.verdicts, self.go, self.begun = list(verdicts), asyncio.Event(), asyncio.Event()

    async def _judged(self, source, problem):
        self.evaluations += 1
        self.begun.set()
        await self.go.wait()
        return self.verdicts.pop(0)


def test_one_judgement_serves_all_who_wait():
    async def play():
        judge = Slow([RIGHT])
        waiting = [asyncio.create_task(judge.judge("x", PROBLEM)) for _ in range(3)]
        await judge.begun.wait()
        judge.go.set()
        return judge.evaluations, await asyncio.gather(*waiting)

    evaluations, found = asyncio.run(play())
    assert evaluations == 1
    assert [verdict.cached for verdict in found] == [False, True, True]
    assert all(verdict.correct for verdict in found)


def test_a_cancelled_caller_leaves_others_of_the_same_judgement_alone():
    async def play():
        judge = Slow([RIGHT])
        first, second = (asyncio.create_task(judge.judge("x", PROBLEM)) for _ in range(2))
        await judge.begun.wait()
        judge.begun.clear()
        first.cancel()
        await judge.begun.wait()  # the second judges in its stead
        judge.go.set()
        return (await second).status, first.cancelled(), judge.evaluations

    assert asyncio.run(play()) == ("correct", True, 2)


def test_a_waiter_that_is_cancelled_leaves_the_judgement_to_others():
    async def play():
        judge = Slow([RIGHT])
        first, second = (asyncio.create_task(judge.judge("x", PROBLEM)) for _ in range(2))
        await judge.begun.wait()
        second.cancel()
        await asyncio.wait([second])
        judge.go.set()
        return (await first).status, judge.evaluations

    assert asyncio.run(play()) == ("correct", 1)


def test_trouble_is_not_remembered():
    async def play():
        judge = Slow([INFRA, RIGHT])
        judge.go.set()
        return [(await judge.judge("x", PROBLEM)).status for _ in range(3)], judge.evaluations

    assert asyncio.run(play()) == (["infra", "correct", "correct"], 2)


@pytest.mark.parametrize(
    ("weigh", "asked", "made"),
    [
        (lambda _: 2, "abcab", "abcab"),  # of weight 2 each, two fit into 5
        (lambda _: 1, "abcab", "abc"),
        (len, "abca", "abca"),  # each too heavy: the last one is kept
        (len, "aab", "ab"),
    ],
)
def test_the_cache_keeps_the_latest_entries_up_to_its_weight(weigh, asked, made):
    kept, seen = RecentCache(5, weigh), []

    async def play():
        for key in asked:

            async def make(key=key):
                seen.append(key)
                return key * 9

            assert await kept.get(key, make) == key * 9

    asyncio.run(play())
    assert "".join(seen) == made
