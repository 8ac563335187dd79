"""Scheduler over pages: prompts are computed in chunks beside decode steps, and the host reads draws one pass late.

    queue -> slot (hold pages that begin alike) -> chunks of its prompt, in passes of PASS_ROWS -> decode steps -> out
    pass n + 1 is launched, then the draws of pass n are read: a sequence that ended with them drew one token too many,
    which is dropped

Pages are taken as sequences grow. Where none is left, the youngest sequence gives up its own and is computed again
later from its tokens. Everything here runs on the torch thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.engines.local.pages import PAGE, PagePool, pages_of
from slime_core.engines.local.replay import Draws, PromptPart, Runner
from slime_core.engines.local.scheduler import Scheduler
from slime_core.engines.local.slots import free_memory, up
from slime_core.errors import EngineError
from slime_core.memory import is_out_of_memory
from slime_core.notices import notice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.media import JobMedia
    from slime_core.engines.local.served import ServedModel
    from slime_core.engines.local.slots import EngineJob

    Ints = NDArray[np.int64]

log = logging.getLogger(__name__)

PASS_ROWS = 8192
"""Tokens of one pass that computes prompts."""

GROUPS = 8
"""This part of all sequences is admitted at once, or after PATIENCE passes."""

PATIENCE = 8

WIDTH = 16
"""Tables grow by so many pages."""


@dataclass(slots=True, frozen=True)
class LaunchedPass:
    """A pass whose draws were not read yet: row i is of ``slots[i]``, then taken by sequence ``births[i]``."""

    slots: Ints
    births: Ints
    version: int
    draws: Draws


class PagedScheduler(Scheduler):
    """Owns slots, pages and passes. ``sequences`` is how many sequences run at once, at most."""

    def __init__(self, served: ServedModel, load_tokenizer: Callable[[], Any], sequences: int) -> None:
        super().__init__(served, load_tokenizer, sequences)
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self._fed = np.zeros(sequences, dtype=np.int64)  # positions whose pass was launched
        self._ahead = np.zeros(sequences, dtype=np.int64)  # draws that were not read
        self._birth = np.full(sequences, -1, dtype=np.int64)  # ascending: which sequence has the slot
        self._births = 0
        self._passes = 0  # since jobs were admitted
        self._launches: deque[LaunchedPass] = deque()
        self._decoding: Ints = np.empty(0, dtype=np.int64)  # of the next pass
        self._chunks: list[PromptPart] = []
        self._empty()

    def retract(self) -> None:
        """See `Scheduler.retract`; what was launched and not read is drawn again."""
        super().retract()
        self._launches.clear()

    def forget(self) -> None:
        """See `Scheduler.forget`."""
        self._pool.forget()
        self._slots.forget()
        self._most = max((len(job.prompt) + job.limit for job in self.jobs()), default=0)
        if self.served.moved():
            self._runner.void()

    def drop(self) -> None:
        """Release the cache, in which nothing runs."""
        self._launches.clear()
        self._empty()
        self.served.drop()

    @torch.inference_mode()
    def score(self, tokens: Ints, start: int, media: JobMedia | None = None, adapter: int = 0) -> NDArray[np.float32]:
        """Plain log-prob of each of ``tokens[start:]``, through pages of its own."""
        self._make_room(len(tokens))
        need = pages_of(len(tokens))
        while self._pool.available < need:
            self._retract_youngest()
        pages = [self._pool.take() for _ in range(need)]
        try:
            out = self._runner.score(tokens, start, pages, media, adapter)
        finally:
            self._pool.give(pages)
        if not np.isfinite(out).all():
            self.served.cache.clear(pages)
            raise self._not_finite("score")
        return out

    def _empty(self) -> None:
        self._pool, self._runner = PagePool(1), Runner(self.served, self._configured)
        self.tokens = 0  # that one sequence may have

    def _admit(self) -> list[EngineJob]:
        """Compose the next pass: sequences that decode, chunks of prompts, waiting jobs where there is room."""
        done: list[EngineJob] = []
        slots = self._slots
        waits = slots.budget > self._ahead
        self._secure(np.flatnonzero(slots.active & waits & (self._fed >= slots.start)))
        self._decoding = np.flatnonzero(slots.active & waits & (self._fed >= slots.start))
        self._chunks = []
        room = PASS_ROWS - len(self._decoding)
        prompts = np.flatnonzero(slots.active & (self._fed < slots.start))
        for slot in prompts[np.argsort(self._birth[prompts])]:
            room -= self._cut(int(slot), room)
        self._passes += 1
        if not self._due():
            return done
        while self._queue and room > 0 and not slots.active.all():
            job = self._queue[0]
            if job.limit <= len(job.completion.tokens):
                done.append(self._finish(self._queue.popleft(), "length"))
                continue
            try:
                slot = self._place(job)
            except EngineError as error:
                job.error = error
                done.append(self._queue.popleft())
                continue
            if slot is None:
                break
            self._queue.popleft()
            room -= self._cut(slot, room)
        return done

    def _due(self) -> bool:
        """Whether to admit now: a pass that computes prompts is not captured, so while others decode they come in
        groups."""
        free = len(self._slots.active) - int(self._slots.active.sum())
        ready = min(len(self._queue), free)
        many = ready >= max(1, len(self._slots.active) // GROUPS) or self._passes > PATIENCE
        if ready and (many or self._chunks or not len(self._decoding)):
            self._passes = 0
            return True
        return False

    def _place(self, job: EngineJob) -> int | None:  # type: ignore[override]
        """Give the job a slot and pages for its prompt; None where too few are there."""
        tokens = job.history()
        self._make_room(len(tokens) + 1)
        pages = self._pool.match(tokens[:-1], job.adapter)
        more = pages_of(len(tokens)) - len(pages)
        running = int(self._slots.active.sum())
        if more + running > self._pool.available:
            self._pool.give(pages)
            return None
        slot = int(np.flatnonzero(~self._slots.active)[0])
        self._slots.take(slot, job, tokens)
        self._fed[slot], self._ahead[slot] = len(pages) * PAGE, 0
        self._birth[slot], self._births = self._births, self._births + 1
        self._runner.enter(slot, int(tokens[-1]), len(tokens) - 1, job)
        self._pages[slot] = []
        for page in [*pages, *(self._pool.take() for _ in range(more))]:
            self._add(slot, page)
        return slot

    def _cut(self, slot: int, room: int) -> int:
        """The next chunk of a slot's prompt, of at most ``room`` tokens; its full pages are known from now on."""
        begin, goal = int(self._fed[slot]), int(self._slots.start[slot])
        end = min(goal, begin + room)
        if end > begin:
            self._chunks.append(PromptPart(slot, begin, end, end == goal))
            self._fed[slot] = end
            if not self._slots.mixed[slot]:
                self._pool.publish(self._slots.content[slot, :end], self._pages[slot], int(self._slots.adapter[slot]))
        return end - begin

    def _add(self, slot: int, page: int) -> None:
        self._runner.mark(slot, len(self._pages[slot]), page)
        self._pages[slot].append(page)

    def _secure(self, slots: Ints) -> None:
        """A page for every one of these slots whose next token begins one, the oldest sequence first."""
        begins = slots[self._fed[slots] % PAGE == 0]
        for slot in begins[np.argsort(self._birth[begins])]:
            if self._fed[slot] < PAGE * len(self._pages[slot]):
                continue
            while self._slots.active[slot] and not self._pool.available:
                self._retract_youngest()
            if self._slots.active[slot]:
                self._add(int(slot), self._pool.take())

    def _retract_youngest(self) -> None:
        """Put the sequence that came last, with its tokens, at the head of the queue."""
        active = np.flatnonzero(self._slots.active)
        self._queue.appendleft(self._vacate(int(active[self._birth[active].argmax()])))

    def _vacate(self, slot: int) -> EngineJob:
        slots = self._slots
        if not slots.mixed[slot] and slots.position[slot] >= slots.start[slot]:
            count = min(self._fed[slot], slots.position[slot] + 1)
            self._pool.publish(slots.content[slot, :count], self._pages[slot], int(slots.adapter[slot]))
        self._note_experts(slot, self._pages[slot], int(min(self._fed[slot], slots.position[slot])))
        self._leave(slot)
        return slots.give_up(slot)

    def _wipe(self, slot: int) -> None:
        loose = self._leave(slot)
        self._pool.lose(loose)
        self.served.cache.clear(loose)

    def _leave(self, slot: int) -> list[int]:
        """Give up a slot's pages, and what it drew and nobody read; the pages that nobody holds any more."""
        self._birth[slot] = -1
        pages, self._pages[slot] = self._pages[slot], []
        return self._pool.give(pages)

    def _step(self) -> list[EngineJob]:
        """LaunchedPass the pass that was composed, and read the one before it."""
        slots, chunks = self._decoding, self._chunks
        launched = None
        if chunks:
            launched = self._runner.mixed(slots, self._fed[slots], chunks, self._slots)
            last = np.array([chunk.slot for chunk in chunks if chunk.last], dtype=np.int64)
            self._fed[slots] += 1
            slots = np.concatenate([slots, last])
        elif len(slots):
            launched = self._runner.decode(slots)
            self._fed[slots] += 1
        if launched is not None:
            self._ahead[slots] += 1
            self._launches.append(LaunchedPass(slots, self._birth[slots], self.served.version, launched))
        done = []
        while len(self._launches) > (launched is not None):
            done += self._read(self._launches.popleft())
        return done

    def _read(self, launch: LaunchedPass) -> list[EngineJob]:
        same = (self._birth[launch.slots] == launch.births) & self._slots.active[launch.slots]
        if not same.any():
            return []
        columns = launch.draws.read(len(launch.slots))
        slots = launch.slots[same]
        self._ahead[slots] -= 1
        return self._settle(slots, *(column[same] for column in columns), launch.version)  # type: ignore[call-arg]

    def _make_room(self, need: int) -> None:
        """Pages for what requests may come to, as far as memory goes; for one sequence of ``need`` tokens at least."""
        most = up(max(need, self._most + 1), WIDTH * PAGE)
        if pages_of(need) < self._pool.count and most <= self.tokens:
            return
        size = self.served.position_bytes * PAGE
        memory = free_memory(self.served.device, self._pool.count * size)
        least = max(self._pool.count, pages_of(need) + 1)
        if least * size > memory:
            raise _too_long(need, least * size, memory)
        wish = max(least, min(self._configured * pages_of(most) + 1, int(self.served.share * memory) // size))
        while True:
            try:
                self._resize(wish, most)
                return
            except Exception as error:
                if not is_out_of_memory(error) or wish == least:
                    raise
            wish = max(least, wish // 2)
            notice(
                "fewer pages", f"memory ran out: keys and values of {wish * PAGE} tokens, fewer sequences run at once"
            )

    def _resize(self, pages: int, tokens: int) -> None:
        """A pool of so many pages, and room for so many tokens a sequence; again, where memory ran out halfway."""
        self._runner.void()  # even then what was captured reads tensors that have moved
        if self._pool.count == 1:
            self.served.allocate(pages, 0)
        elif pages > self._pool.count:
            self.served.cache.grow(pages)
        self._pool.grow(pages)
        if tokens > self.tokens:
            self.served.plan.reach(tokens)
            if tokens >= self._slots.length:  # a released cache leaves the slots as they are
                self._slots.grow(tokens + 1)
            self.tokens = tokens
        self._runner.widen(pages_of(self.tokens))


def _too_long(tokens: int, size: int, memory: int) -> EngineError:
    return EngineError(
        f"the KV cache of a sequence of {tokens} tokens needs {size / 2**30:.1f} GiB",
        code="ENG05",
        why=f"{memory / 2**30:.1f} GiB are free",
        fix="lower rollout.rollout_max_context_len or rollout.rollout_max_response_len, or take a smaller model",
    )
