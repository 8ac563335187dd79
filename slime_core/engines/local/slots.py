"""Host-side state of every slot, as arrays: one row a slot, so that a step costs no Python a sequence.

``content[slot, :filled[slot]]`` are the tokens whose keys and values the cache holds there; a slot keeps them after
its sequence has ended, so that a request that begins alike copies them (samples of a group, turns of a conversation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slime_core.engines.local.cache import up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.local.jobs import Job

NO_STOP = -1


class Slots:
    """Arrays over ``count`` slots and ``length`` positions."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length
        self.jobs: list[Job | None] = [None] * count
        self.active = np.zeros(count, dtype=bool)
        self.position = np.zeros(count, dtype=np.int64)  # of the token that the next step feeds
        self.token = np.zeros(count, dtype=np.int64)  # that token
        self.start = np.zeros(count, dtype=np.int64)  # position of the first new token since the slot was taken
        self.left = np.zeros(count, dtype=np.int64)  # new tokens still allowed
        self.seed = np.zeros(count, dtype=np.uint64)
        self.temperature = np.ones(count, dtype=np.float32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.stops = np.full((count, 4), NO_STOP, dtype=np.int64)
        self.texts = np.zeros(count, dtype=bool)  # has stop strings
        self.filled = np.zeros(count, dtype=np.int64)
        self.mixed = np.zeros(count, dtype=bool)  # its cache was made by several weights: never reused
        self.content = np.zeros((count, length), dtype=np.int64)
        self.log_probs = np.zeros((count, length), dtype=np.float32)  # by absolute position
        self.plain = np.zeros((count, length), dtype=np.float32)
        self.versions = np.zeros((count, length), dtype=np.int64)

    def grow(self, length: int) -> None:
        """Room for more positions a slot."""
        for name in ("content", "log_probs", "plain", "versions"):
            table = getattr(self, name)
            longer = np.zeros((self.count, length), dtype=table.dtype)
            longer[:, : self.length] = table
            setattr(self, name, longer)
        self.length = length

    def held(self) -> NDArray[np.int64]:
        """For every slot, how many positions of its cache are written."""
        return np.where(self.active, np.maximum(self.position, self.filled), self.filled)

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], version: int) -> None:
        """Note that each of these slots was fed and drew a token."""
        self.filled[rows] = np.where(self.mixed[rows], 0, self.position[rows] + 1)
        self.position[rows] += 1
        self.token[rows] = tokens
        self.left[rows] -= 1
        here = self.position[rows]
        self.content[rows, here] = tokens
        self.versions[rows, here] = version

    @property
    def rows(self) -> int:
        """One past the highest active slot."""
        return int(np.flatnonzero(self.active)[-1]) + 1 if self.active.any() else 0

    def free(self) -> NDArray[np.int64]:
        """Slots without a sequence, ascending."""
        return np.flatnonzero(~self.active)

    def take(self, slot: int, job: Job, tokens: NDArray[np.int64]) -> None:
        """Seat a job whose history is ``tokens``; the cache holds nothing for it yet."""
        params = job.request.params
        last = len(tokens) - 1
        self.jobs[slot] = job
        self.active[slot] = True
        self.position[slot], self.token[slot], self.start[slot] = last, tokens[last], last + 1
        self.left[slot] = job.limit - len(job.tokens)
        self.seed[slot] = job.seed
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = params.temperature, params.top_p, params.top_k
        if len(job.stop_ids) > self.stops.shape[1]:
            wider = np.full((self.count, up(len(job.stop_ids), 4)), NO_STOP, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_STOP
        self.stops[slot, : len(job.stop_ids)] = job.stop_ids
        self.texts[slot] = bool(params.stop)
        self.content[slot, : last + 1] = tokens
        self.filled[slot] = last
        self.mixed[slot] = False

    def give_up(self, slot: int) -> Job:
        """Unseat a job, moving what was drawn into it. The cache keeps what it holds."""
        job = self.jobs[slot]
        assert job is not None
        new = slice(int(self.start[slot]), int(self.position[slot]) + 1)
        job.tokens += self.content[slot, new].tolist()
        job.log_probs += self.log_probs[slot, new].tolist()
        job.plain_log_probs += self.plain[slot, new].tolist()
        job.versions += self.versions[slot, new].tolist()
        self.jobs[slot] = None
        self.active[slot] = False
        return job

    def new_tokens(self, slot: int, count: int) -> list[int]:
        """The last ``count`` tokens drawn in this seat."""
        end = int(self.position[slot]) + 1
        return self.content[slot, max(int(self.start[slot]), end - count) : end].tolist()  # type: ignore[no-any-return]

    def move(self, source: int, target: int) -> None:
        """Reseat a sequence in a free slot (the cache is moved by the caller)."""
        self.jobs[target], self.jobs[source] = self.jobs[source], None
        for array in (
            *(self.active, self.position, self.token, self.start, self.left, self.seed, self.temperature),
            *(self.top_p, self.top_k, self.stops, self.texts, self.filled, self.mixed),
        ):
            array[target] = array[source]
        end = int(self.position[source]) + 1
        for table in (self.content, self.log_probs, self.plain, self.versions):
            table[target, :end] = table[source, :end]
        self.active[source] = False

    def shared(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """For every slot, how many leading tokens its cache has in common with ``tokens``."""
        if not len(tokens):
            return np.zeros(self.count, dtype=np.int64)
        differs = self.content[:, : len(tokens)] != tokens
        first = np.where(differs.any(1), differs.argmax(1), len(tokens))
        return np.minimum(first, self.filled)

    def forget(self) -> None:
        """The cache holds nothing that may be reused."""
        self.filled[:] = 0
        self.mixed[:] = True
