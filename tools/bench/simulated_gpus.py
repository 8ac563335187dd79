"""Engines and a trainer that take the time of GPUs and compute nothing, for the benchmark of asynchronous runs.

    requests -> TimedEngine: a step of decoding takes STEP + EACH * (sequences in flight) -> tokens, versions
    batches  -> TimedTrainer: tokens / (rate * GPUs) seconds

Time is real, divided by ``faster``. A simulated token stands for ``grain`` of the model's: samples are as many as they
would be, and what the loop does with each of them is the product's own, on this machine's clock.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1]))

from durability.fake_trainer import FakeTrainer
from slime_core.testing.fakes import FakeEngine
from slime_core.types import Completion, GenerateRequest, WeightUpdate

if TYPE_CHECKING:
    from slime_core.types import Batch, WeightRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """A model of GPUs at work; all times in seconds of the model's."""

    step: float  # of decoding one token of one sequence: the weights are read
    each: float  # more for each further sequence in flight: its cache is read
    engine_gpus: int  # of one engine
    rate: float  # tokens a second that one GPU trains, scoring included
    turn: float  # memory changes hands and weights arrive, where engines and trainer share GPUs
    transfer: float  # weights arrive, where they do not
    grain: int  # tokens that a simulated one stands for
    faster: float  # seconds of the model's in one of ours

    def token(self, sequences: float) -> float:
        """Seconds until each of so many sequences has one more (real) token."""
        return self.step + self.each * sequences


@dataclass(frozen=True, slots=True)
class Done:
    """One response: the version that began it, its tokens (real ones), and how long it took (the model's seconds)."""

    version: int
    tokens: int
    seconds: float


class TimedEngine(FakeEngine):
    """Decodes all requests side by side, each to its ``max_new_tokens``; later tokens bear the version of a load."""

    def __init__(self, gpus: Gpus, done: list[Done]) -> None:
        super().__init__(stop_token=-1)
        self.abilities = frozenset({"per_sample_seed", "live_load"})
        self._gpus, self._done = gpus, done
        self._made = 0.0  # tokens that a request which was there from the start would have
        self._at = time.monotonic()  # when that was so
        self._flying: list[tuple[float, str, asyncio.Future[None]]] = []  # ends, in `_made`
        self._marks: list[tuple[float, int]] = []  # `_made` from which on a version draws
        self._changed = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        start, count, version = time.monotonic(), request.params.max_new_tokens, self.version
        self._advance()
        begun, end = self._made, asyncio.get_running_loop().create_future()
        heapq.heappush(self._flying, (begun + count, request.id, end))
        self._stir()
        await end
        seconds = (time.monotonic() - start) * self._gpus.faster
        self._done.append(Done(version, count * self._gpus.grain, seconds))
        return Completion(
            id=request.id,
            tokens=[1 + request.seed % 7] * count,
            log_probs=[-1.0] * count,
            plain_log_probs=[-1.0] * count,
            finish="length",
            versions=self._versions(begun, count),
            epoch=1,
        )

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`; requests go on."""
        self._advance()
        await super().load(update)
        self._marks.append((self._made, update.version))

    def _versions(self, begun: float, count: int) -> list[int]:
        """Of each token; marks that no running request can need are few, and stay."""
        found: list[int] = []
        place = bisect_right(self._marks, (begun, 1 << 60)) - 1
        while len(found) < count:
            last = place + 1 == len(self._marks)
            until = count if last else min(count, int(self._marks[place + 1][0] - begun) + 1)
            found += [self._marks[place][1]] * (until - len(found))
            place += 1
        return found

    def _advance(self) -> None:
        """Bring `_made` to this moment."""
        now = time.monotonic()
        if self._flying:
            self._made += (now - self._at) / self._pace()
        self._at = now

    def _pace(self) -> float:
        """Our seconds until every running request has one more simulated token."""
        return self._gpus.token(len(self._flying)) * self._gpus.grain / self._gpus.faster

    def _stir(self) -> None:
        self._changed.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._flying:
            self._changed.clear()
            wait = max(0.0, self._flying[0][0] - self._made) * self._pace()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(wait, 0.001))
            self._advance()
            while self._flying and self._flying[0][0] <= self._made + 1e-9:
                _, _, end = heapq.heappop(self._flying)
                if not end.done():
                    end.set_result(None)


class TimedTrainer(FakeTrainer):
    """Trains at a rate of tokens a second a GPU; ``publish`` takes ``sync`` seconds."""

    def __init__(self, gpus: Gpus, count: int, sync: float) -> None:
        super().__init__()
        self._gpus, self._count, self._sync = gpus, count, sync

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        seconds = len(batch.tokens) * self._gpus.grain / (self._gpus.rate * self._count)
        work = asyncio.create_task(asyncio.sleep(seconds / self._gpus.faster))  # ranks compute while we add up
        done = await super().step(batch)
        await work
        return done

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`."""
        await asyncio.sleep(self._sync / self._gpus.faster if version else 0.0)
        return await super().publish(version, route)


class Nobody:
    """A live line that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
