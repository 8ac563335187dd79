"""The run's prompts, one position after another: the order of tasks, epochs and rows, and where a run resumes.

    task draw at a position -> its stream -> permutation of the epoch -> row -> Prompt "STAGE/POSITION"

The order is a function of (seed, stage, task, epoch, position). A set smaller than a step begins its next epoch inside
the step. State is a handful of numbers, whatever the data's size. Every place that was looked at is a prompt, a drop
or a bad row.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from slime_core.data.supply import Supply, changed, nothing_left
from slime_core.errors import DataError
from slime_core.seeds import seed_of
from slime_core.types import Prompt

ENDLESS_SKIPS = 1000  # prompts that an endless source may bring in vain, one after another
TEXT_ROWS = 64  # looked at for a few tokens of text
ROUNDS = 8
SMALL = 1 << 12  # up to here a permutation is drawn whole, and every one is equally likely
MASK = (1 << 64) - 1


class DataSource:
    """The prompts of a stage, over all its tasks.

    Example:
        source = open_source(config, plugins, tokenizer, ctx)
        prompts = source.next(32)
        saved = source.state()
    """

    def __init__(self, streams: list[Stream], *, stage: str, seed: int) -> None:
        self._streams, self._stage, self._seed = streams, stage, seed
        self._position = 0

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, as many epochs as it takes; fewer only where endless sources have ended.

        Raises:
            DataError: a row that cannot be read (beyond `data.max_bad_rows`), DAT26, DAT27 nothing usable is left.
            PluginError: a plugin's source raised.
        """
        prompts: list[Prompt] = []
        while len(prompts) < count:
            open_streams = [s for s in self._streams if not s.ended]
            if not open_streams:
                break
            stream = open_streams[pick([s.weight for s in open_streams], self._seed, self._position)]
            prompt = stream.next(id=f"{self._stage}/{self._position}", position=self._position)
            if prompt is not None:
                prompts.append(prompt)
                self._position += 1
        return prompts

    async def prepare(self, count: int) -> None:
        """Let plugins make the rows of the next ``count`` prompts, without blocking the event loop.

        Raises:
            PluginError: a plugin's source raised.
        """
        streams = [stream for stream in self._streams if not stream.ended]
        if not any(stream.supply.prepares for stream in streams):
            return
        weights, positions = [stream.weight for stream in streams], range(self._position, self._position + count)
        rows = Counter(pick(weights, self._seed, position) for position in positions)
        await asyncio.gather(*(streams[number].prepare(rows[number]) for number in rows))

    def text(self, count: int) -> list[int]:
        """Return up to ``count`` tokens of the first rows' prompts, task after task; nothing is drawn or counted."""
        tokens: list[int] = []
        for number, stream in enumerate(self._streams):
            tokens += stream.text((count - len(tokens)) // (len(self._streams) - number))
        return tokens

    def counts(self) -> dict[str, int]:
        """``read``, ``prompts`` and ``dropped/REASON``; read = prompts + dropped."""
        dropped = sum((s.dropped for s in self._streams), Counter[str]())
        prompts = sum(s.prompts for s in self._streams)
        return {
            "read": prompts + dropped.total(),
            "prompts": prompts,
            **{f"dropped/{reason}": count for reason, count in sorted(dropped.items())},
        }

    def state(self) -> dict[str, Any]:
        """JSON-ready: the next position, and each task's place and fingerprint."""
        return {
            "stage": self._stage,
            "seed": self._seed,
            "position": self._position,
            "tasks": {stream.name: stream.state() for stream in self._streams},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the source that gave ``state`` would have.

        Raises:
            DataError: DAT29, other tasks, another seed or other rows.
        """
        current = {"stage": self._stage, "seed": self._seed, "tasks": sorted(s.name for s in self._streams)}
        saved = {"stage": state["stage"], "seed": state["seed"], "tasks": sorted(state["tasks"])}
        if current != saved:
            raise DataError(
                "the data settings changed since the run was saved",
                code="DAT29",
                where="data",
                why=f"saved {json.dumps(saved)}, now {json.dumps(current)}",
                fix="put the settings back as they were, or start another run",
            )
        for stream in self._streams:
            stream.restore(state["tasks"][stream.name])
        self._position = int(state["position"])


class Stream:
    """A task's prompts in order: ``cursor`` counts places looked at, over all epochs."""

    def __init__(self, name: str, weight: float, supply: Supply, shuffle: Callable[[int], int] | None) -> None:
        self.name, self.weight, self.supply = name, weight, supply
        self._key_of_epoch = shuffle  # epoch -> key of its permutation; None keeps the rows' order
        self._order: tuple[int, Permutation] | None = None
        self.cursor = 0
        self.prompts = 0
        self.dropped: Counter[str] = Counter()
        self.ended = False

    def next(self, *, id: str, position: int) -> Prompt | None:
        """The next prompt; None once an endless source has ended.

        Raises:
            DataError: DAT27, a whole epoch went by without one.
        """
        count = self.supply.count()
        patience = count if count is not None else ENDLESS_SKIPS
        skipped: Counter[str] = Counter()
        while skipped.total() < patience:
            if count is not None and self.cursor % count == 0:
                skipped.clear()  # a new epoch reports each row once again
            try:
                prompt = self.supply.make(self._index(self.cursor), id=id, position=position)
            except IndexError:
                self.ended = True
                return None
            self.cursor += 1
            if isinstance(prompt, Prompt):
                self.prompts += 1
                return prompt
            skipped[prompt] += 1
            self.dropped[prompt] += 1
        raise nothing_left(self.name, skipped, self.supply.encoder)

    async def prepare(self, count: int) -> None:
        """Let a plugin's source make the next ``count`` rows, without those that replace rows that are dropped."""
        if self.supply.prepares:
            await self.supply.prepare([self._index(self.cursor + row) for row in range(count)])

    def text(self, count: int) -> list[int]:
        """Return up to ``count`` tokens of the first rows' prompts, in the rows' order, whatever was drawn."""
        rows, tokens, index = self.supply.count(), list[int](), 0
        while len(tokens) < count and index < min(TEXT_ROWS, rows or TEXT_ROWS):
            try:
                row = self.supply.make(index, id="text", position=index)
            except IndexError:  # the end of an endless source
                break
            tokens += row.tokens if isinstance(row, Prompt) else []
            index += 1
        return tokens[:count]

    def state(self) -> dict[str, Any]:
        """Position of the stream, and what must be equal to resume from it."""
        return {
            "cursor": self.cursor,
            "prompts": self.prompts,
            "dropped": dict(self.dropped),
            "ended": self.ended,
            "fingerprint": self.supply.fingerprint(),
            "file": self.supply.mark(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`. Rows that were appended to a file since then are left out.

        Raises:
            DataError: DAT29, the rows are not those of the saved run.
        """
        if state["fingerprint"] != self.supply.fingerprint() and state.get("file"):
            self.supply.shorten(state["file"])
        fingerprint = self.supply.fingerprint()
        if state["fingerprint"] != fingerprint:
            raise changed(self.name, f"saved {state['fingerprint']}, found {fingerprint}")
        self.cursor, self.prompts = int(state["cursor"]), int(state["prompts"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.ended = bool(state["ended"])

    def _index(self, cursor: int) -> int:
        """The row at a place over all epochs."""
        count = self.supply.count()
        if count is None:
            return cursor
        epoch, place = divmod(cursor, count)
        if self._key_of_epoch is None:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(count, self._key_of_epoch(epoch))
        return self._order[1].at(place)


class Permutation:
    """A permutation of ``range(n)`` that is a function of its key; ``at(i)`` needs no table for large n.

    Up to :data:`SMALL` rows it is a Fisher-Yates shuffle. Above, a Feistel network over the next power of four that is
    walked until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Example:
        order = Permutation(10, seed_of(7, "shuffle", 0))
        assert sorted(order.at(i) for i in range(10)) == list(range(10))
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one row, not {n}")
        self.n = n
        self._table = _shuffled(n, key) if n <= SMALL else None
        self._half = ((n - 1).bit_length() + 1) // 2
        self._keys = [_mix(key + r * 0x9E3779B97F4A7C15) for r in range(ROUNDS)]

    def at(self, place: int) -> int:
        """The row at a place, both from 0 to n - 1."""
        if not 0 <= place < self.n:
            raise IndexError(place)
        if self._table is not None:
            return self._table[place]
        value = self._network(place)
        while value >= self.n:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        low_mask = (1 << self._half) - 1
        left, right = value >> self._half, value & low_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & low_mask)
        return left << self._half | right


def pick(weights: Sequence[float], seed: int, position: int) -> int:
    """The task at a position of the run: index i with probability ``weights[i] / sum(weights)``."""
    if len(weights) == 1:
        return 0
    edges = list(accumulate(weights))
    draw = (seed_of(seed, "task", position) >> 11) * 2.0**-53  # in [0, 1), 53 bits
    return min(bisect_right(edges, draw * edges[-1]), len(weights) - 1)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 bits to 64 bits, one to one."""
    value &= MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def _shuffled(n: int, key: int) -> list[int]:
    table = list(range(n))
    for i in range(n - 1, 0, -1):
        # 64 random bits scaled to [0, i]: the bias is below i / 2**64
        j = _mix(key + i * 0x9E3779B97F4A7C15) * (i + 1) >> 64
        table[i], table[j] = table[j], table[i]
    return table
