"""Rows of a task by number: endless ones to train on, and a held-out set that no run trains on.

A hash of the question decides on which side it lies, whatever its seed, level and parameters: the sides are disjoint
by construction, however few questions a task has.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from slime_core import DataError, Prompt
from slime_core.context import Context
from slime_core.seeds import seed_of
from slime_reasoning_gym.curriculum import Levels
from slime_reasoning_gym.options import Options
from slime_reasoning_gym.tasks import TaskSettings
from slime_reasoning_gym.worker import CHUNK
from slime_reasoning_gym.workers import WorkerError, Workers

KEY = "reasoning_gym"
"""In a prompt's metadata: the address of its entry, and the question's hash."""
ATTEMPTS = 64  # at a question that is not held out
CANDIDATES = 4  # times those that a held-out set needs on average: fewer questions than rows, and the search ends


class TaskRows:
    """What both sides share: entries as prompts."""

    def __init__(self, task: TaskSettings, options: Options, ctx: Context, workers: Workers) -> None:
        self._task, self._options, self._workers = task, options, workers
        self._messages = ctx.config.data.apply_chat_template
        prompts: dict[str, str] = workers.describe()["system_prompts"] if options.system_prompt else {}
        self._system = prompts.get(options.system_prompt, options.system_prompt)

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows."""
        names = ("parameters", "system_prompt", "heldout", "split_seed", "curriculum", "start_level")
        return {"task": self._task.name, **self._options.model_dump(include=set(names))}

    def _entry(self, address: dict[str, Any]) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._workers.ask("entry", **address)
        except WorkerError as error:
            raise DataError(
                f"reasoning_gym made no entry of task '{self._task.name}'",
                where=f"task '{self._task.name}', {address}",
                why=str(error),
                fix=f"change [plugin.reasoning_gym.parameters.{self._task.dataset}], or leave the task out",
            ) from error
        return entry

    def _prompt(self, entry: dict[str, Any], address: dict[str, Any], position: int) -> Prompt:
        texts = {"system": self._system.strip(), "user": entry["question"]}
        shown = {role: text for role, text in texts.items() if text}
        return Prompt(
            id="",
            position=position,
            prompt=[{"role": role, "content": text} for role, text in shown.items()]
            if self._messages
            else "\n\n".join([*shown.values(), ""]),
            label=entry["answer"],
            metadata={KEY: {**address, "question": digest(entry["question"], 0)}},
        )


class TrainingRows(TaskRows):
    """Endless rows; with ``levels`` each has the level of the time when it was first drawn."""

    def __init__(
        self, task: TaskSettings, options: Options, ctx: Context, workers: Workers, levels: Levels | None
    ) -> None:
        super().__init__(task, options, ctx, workers)
        self._names, self._run_seed, self._levels = (KEY, ctx.stage, task.name), ctx.config.seed, levels
        self._prepared: dict[tuple[int, int | None], Prompt] = {}  # by position and level

    def __len__(self) -> int:
        raise TypeError("endless")

    async def prepare(self, positions: Sequence[int]) -> None:
        """Make rows on threads, for :meth:`at` to find; they have the levels of the moment of the call."""
        places = [(position, self._level(position)) for position in positions]

        async def make(place: tuple[int, int | None]) -> None:
            with suppress(DataError):  # `at` raises it
                self._prepared[place] = await asyncio.to_thread(self._row, *place)

        self._prepared.clear()
        await asyncio.gather(*map(make, places))

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens.

        Raises:
            DataError: the task failed, or hardly has a question that is not held out.
        """
        place = position, self._level(position)
        return self._prepared.pop(place, None) or self._row(*place)

    def _level(self, position: int) -> int | None:
        return self._task.level if self._levels is None else self._levels.at(position)

    def _row(self, position: int, level: int | None) -> Prompt:
        """A row, which depends on nothing but the seed, the stage, the task, its position and its level."""
        chunk, index = divmod(position, CHUNK)
        for attempt in range(ATTEMPTS):
            seed = seed_of(self._run_seed, *self._names, chunk, attempt) >> 33
            address = self._task.address(seed, index, level)
            entry = self._entry(address)
            if not held_out(entry["question"], self._options):
                return self._prompt(entry, address, position)
        raise DataError(
            f"task '{self._task.name}' has too few questions: {ATTEMPTS} in a row are held out",
            where=f"task '{self._task.name}', row {position}",
            fix=f"--heldout {self._options.heldout / 4:g}, or parameters with more questions: "
            f"[plugin.reasoning_gym.parameters.{self._task.dataset}]",
        )


class HeldoutRows(TaskRows):
    """Different held-out questions, ``heldout_rows`` at most, the same for every run."""

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens."""
        entry, address = self._rows[position]
        return self._prompt(entry, address, position)

    @cached_property
    def _rows(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        count = self._options.heldout_rows
        for candidate in range(round(CANDIDATES * count / self._options.heldout)):
            if len(rows) == count:
                break
            chunk, index = divmod(candidate, CHUNK)
            seed = seed_of(self._options.split_seed, KEY, "heldout", self._task.dataset, chunk) >> 33
            address = self._task.address(seed, index, self._task.level)
            entry = self._entry(address)
            if held_out(entry["question"], self._options):
                rows.setdefault(digest(entry["question"], 0), (entry, address))
        return list(rows.values())


def digest(question: str, seed: int) -> str:
    """16 hex digits of a question; case and white space do not count."""
    text = f"{seed}\x1f{' '.join(question.casefold().split())}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out(question: str, options: Options) -> bool:
    """Whether no run trains on a question."""
    return int(digest(question, options.split_seed + 1), 16) < options.heldout * 2.0**64
