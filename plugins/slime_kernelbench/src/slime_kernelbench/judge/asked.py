"""What the reference's process is asked for: heard with care, made once however many want it, and kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from slime_kernelbench.judge.wire import Tree, unpack
from slime_kernelbench.types import KernelProblem
from slime_sandbox import Outcome

K = TypeVar("K")
V = TypeVar("V")


class Unjudgeable(Exception):
    """No case of this problem can be had; the fault is not a candidate's."""


@contextmanager
def require_answer(outcome: Outcome, problem: KernelProblem, action: str, where: str = "") -> Iterator[Tree]:
    """What the reference's process answered, read in the block; ``action`` cannot be done where it says an error.

    Raises:
        Unjudgeable: it ended badly or says that it cannot, or the block finds nonsense in the answer.
    """
    if outcome.status != "ok":
        raise Unjudgeable(f"the reference's process{where} {outcome.reason or outcome.status}")
    try:
        answer = unpack(outcome.result)
        if "error" in answer:
            raise Unjudgeable(f"the reference of {problem.id} cannot be {action}: {answer['error']}")
        yield answer
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unjudgeable(f"the reference's process answered with nonsense: {error}") from None


class RecentCache(Generic[K, V]):
    """The last that were asked for, by key, as many as ``most`` allows: their number, or their weights' sum.

    Belongs to one event loop. The one that was asked for last is kept, whatever it weighs.

    Example:
        kept = Kept[str, int](most=2)
        found = await kept.get("a", make)       # others who ask for "a" meanwhile wait for the same
    """

    def __init__(self, most: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self._most, self._weigh = most, weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, asyncio.Lock] = {}

    async def get(self, key: K, make: Callable[[], Awaitable[V]], worn: Callable[[V], bool] | None = None) -> V:
        """The one of ``key``; made where there is none, or where it is ``worn``. Raises what ``make`` does."""
        async with self._making.setdefault(key, asyncio.Lock()):
            value = self._entries.get(key)
            if value is None or (worn is not None and worn(value)):
                value = self._entries[key] = await make()
            self._entries.move_to_end(key)
        weight = sum(map(self._weigh, self._entries.values()))
        while weight > self._most and len(self._entries) > 1:
            old, dropped = self._entries.popitem(last=False)
            self._making.pop(old, None)
            weight -= self._weigh(dropped)
        return value
