"""A generator in another process: claim work from a buffer, call a function per sample, write the result back.

    async def generate(task):                               # one rollout, any number of turns
        story = Story(task)
        turn = await task.ask(story.tokens)                 # the run's own engine: ids, log-probs, versions
        story.say(turn)
        return story.sequence(reward=float(turn.text.strip() == task.label))

    asyncio.run(serve("http://127.0.0.1:8010", token, generate))

What raises is given back to the queue and tried again, by whoever claims it; after ``tries`` times it is written as
failed, which the trainer drops as an infrastructure error. What is :class:`Away` costs no try. A reward of 0 is only
what the function says itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from slime_buffer.client import BufferClient
from slime_buffer.service import models

WAIT = 10.0  # seconds of one claim
PAUSE = 0.2  # seconds before work that failed is looked for again


class GiveUp(Exception):
    """Raised by a generate function: this rollout cannot be generated and must not be retried."""


class Away(Exception):
    """What a rollout needs does not answer, such as its environment. The work is given back, and that costs no try."""


class EngineAway(Away):
    """The run's engine does not answer: its process ended, or it has moved."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """What the engine has made: an entry a token, and its text."""

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    text: str
    finish: str  # stop, length or abort


@dataclass(slots=True, frozen=True)
class Task:
    """One rollout to make. ``work`` has the group's ``prompt tokens label metadata task sampling version``."""

    work: models.Work
    id: str  # of the sample
    seed: int  # of its draws
    _http: httpx.AsyncClient = field(repr=False)

    @property
    def tokens(self) -> list[int]:
        """The prompt's, as the model sees it."""
        return list(self.work.tokens)

    @property
    def label(self) -> Any:
        """The row's."""
        return self.work.label

    async def ask(self, tokens: Sequence[int], **changes: Any) -> Turn:
        """Continue ``tokens`` by the run's engine; ``changes`` go over the run's sampling parameters.

        The draw is a function of the sample's seed and the position, so the same work gives the same tokens.

        Raises:
            EngineAway: it does not answer. ValueError: it refuses the request, or the run has no engine to ask.
        """
        engine = self.work.engine
        if engine is None:
            raise ValueError("the run named no engine; generate tokens elsewhere")
        params = {**self.work.sampling.model_dump(mode="json"), "sampling_seed": self.seed, **changes}
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True}
        headers = {"authorization": f"Bearer {engine.token}"}
        try:
            reply = await self._http.post(f"{engine.url}/generate", json=body, headers=headers)
        except httpx.TransportError as error:
            raise EngineAway(f"{engine.url}: {type(error).__name__} {error}") from error
        if reply.status_code in (401, 410, 503):  # another run has the port, or the run ends
            raise EngineAway(f"{engine.url} answers {reply.status_code}")
        if reply.status_code != 200:
            raise ValueError(f"the engine answers {reply.status_code}: {reply.text[:300]}")
        return _turn(reply.json())


def _turn(answer: dict[str, Any]) -> Turn:
    meta = answer["meta_info"]
    tokens = [int(token) for token in answer["output_ids"]]
    return Turn(
        tokens=tokens,
        log_probs=[float(entry[0]) for entry in meta["output_token_logprobs"]],
        versions=[int(v) for v in meta.get("weight_versions") or [meta["weight_version"]] * len(tokens)],
        text=str(answer["text"]),
        finish=str(meta["finish_reason"]["type"]),
    )


class Story:
    """Builds one sequence, turn by turn; texts are never tokenised again.

    Example:
        story = Story(task)
        story.say(await task.ask(story.tokens))
        story.tell(task.tokens)                 # the environment's text: does not train
        story.say(await task.ask(story.tokens))
        return story.sequence(reward=1.0)
    """

    def __init__(self, task: Task, tokens: Sequence[int] | None = None) -> None:
        self.prompt = list(task.tokens if tokens is None else tokens)
        self.temperature = task.work.sampling.temperature or 1.0
        self.turns: list[Turn] = []
        self._response: list[int] = []
        self._log_probs: list[float] = []
        self._mask: list[int] = []
        self._versions: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt, *self._response]

    def say(self, turn: Turn) -> None:
        """Add the model's tokens."""
        self.turns.append(turn)
        self._add(turn.tokens, turn.log_probs, 1, turn.versions)

    def tell(self, tokens: Sequence[int]) -> None:
        """Add tokens that do not train: the environment's text."""
        self._add(tokens, [0.0] * len(tokens), 0, [-1] * len(tokens))

    def sequence(self, reward: float | dict[str, float] | None = None, **metadata: Any) -> models.Sequence:
        """The whole. Without a reward the run's own judges.

        Raises:
            GiveUp: the model has said nothing.
        """
        if not self._response:
            raise GiveUp("the model said nothing")
        return models.Sequence(
            tokens=self.tokens,
            response_length=len(self._response),
            log_probs=self._log_probs,
            weight_versions=self._versions,
            loss_mask=self._mask,
            response="".join(turn.text for turn in self.turns),
            status="completed" if self.turns and self.turns[-1].finish == "stop" else "truncated",
            reward=reward,
            temperature=self.temperature,
            metadata=metadata,
        )

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], mask: int, versions: Sequence[int]) -> None:
        self._response += tokens
        self._log_probs += log_probs
        self._mask += [mask] * len(tokens)
        self._versions += versions


Made = models.Sequence | Sequence[models.Sequence]
Generate = Callable[[Task], Awaitable[Made]]


async def serve(
    url: str,
    token: str,
    generate: Generate,
    *,
    concurrency: int = 8,
    run: str | None = None,
    task: str | None = None,
    worker: str = "",
    lease_seconds: float = 60.0,
    groups: int = 0,
    tries: int = 3,
    patience: float = 300.0,
    stop: asyncio.Event | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """Make rollouts until ``stop`` is set or ``groups`` are done (0: for ever); the answer counts what happened.

    Args:
        url: of `slime buffer serve`.
        token: its token.
        generate: generates one rollout; returns its sequence, or several that share the rollout.
        concurrency: groups at once; the samples of a group are made side by side.
        run: only this run's work.
        task: only this task's.
        worker: a name for this process.
        lease_seconds: work is given to others when nothing was heard for so long.
        groups: how many, at most.
        tries: how often one rollout may fail before it is written as failed.
        patience: seconds that the service may be away.
        stop: set to end in order: open work is given back.
        note: gets sentences for people.

    Raises:
        EngineError: ENG69 the service is away, ENG73 it refuses the token.
    """
    worker = worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    timeout = httpx.Timeout(None, connect=10.0)
    async with (
        BufferClient(url, token, deadline=patience) as buffer,
        httpx.AsyncClient(trust_env=False, timeout=timeout, limits=httpx.Limits(max_connections=1024)) as engine,
    ):
        shop = _Shop(buffer, engine, generate, lease_seconds, tries, note)
        query: dict[str, Any] = {"run": run, "task": task, "lease_seconds": lease_seconds}
        works = [
            asyncio.ensure_future(shop.work(f"{worker}.{number}", groups, query)) for number in range(concurrency)
        ]
        ended = asyncio.ensure_future((stop or asyncio.Event()).wait())
        try:
            pending: set[asyncio.Future[Any]] = set(works)
            while pending and not ended.done():
                done, _ = await asyncio.wait({*pending, ended}, return_when=asyncio.FIRST_COMPLETED)
                for future in done - {ended}:
                    future.result()
                pending -= done
        finally:
            for future in (*works, ended):
                future.cancel()
            await asyncio.gather(*works, ended, return_exceptions=True)
        return shop.counts


class _Shop:
    """What the workers of one :func:`serve` share."""

    def __init__(
        self,
        buffer: BufferClient,
        engine: httpx.AsyncClient,
        generate: Generate,
        lease_seconds: float,
        tries: int,
        note: Callable[[str], None],
    ) -> None:
        self._buffer, self._engine, self._generate = buffer, engine, generate
        self._lease_seconds, self._tries, self._note = lease_seconds, tries, note
        self._failures: Counter[tuple[str, str, int, str]] = Counter()
        self._claims = 0
        self.counts: Counter[str] = Counter()

    async def work(self, worker: str, groups: int, options: dict[str, Any]) -> None:
        """Claim and make one group after the other."""
        while not groups or self._claims < groups:
            self._claims += 1
            items = await self._buffer.claim_work(worker, wait_seconds=WAIT, **options)
            if not items:
                self._claims -= 1
                continue
            whole = await self._make(items[0])
            self.counts.update(["groups"] if whole else [])
            if not whole:
                self._claims -= 1
                await asyncio.sleep(PAUSE)

    async def _make(self, work: models.Work) -> bool:
        """Generate a group's missing samples; return whether all were written. Otherwise release the lease."""
        tasks = [
            asyncio.ensure_future(self._one(Task(work, sample.id, sample.seed, self._engine)))
            for sample in work.samples
        ]
        beat = asyncio.ensure_future(self._beat(work))
        whole = False
        try:
            pending: set[asyncio.Future[Any]] = set(tasks)
            while pending and not beat.done():
                both: set[asyncio.Future[Any]] = {*pending, beat}
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                if any(task.exception() for task in done):
                    break
            ends: list[asyncio.Future[Any]] = [beat, *tasks]
            for future in ends:
                if future.done():
                    future.result()  # raises where the service is away
            if pending:
                self._note(f"{work.id}: the lease was lost")
            whole = not pending and all(task.result() for task in tasks)
        finally:
            await _end(beat, *tasks)
            if not whole:
                await self._give_back(work)
        return whole

    async def _one(self, task: Task) -> bool:
        work = task.work
        key = (work.run, work.id, work.attempt, task.id)
        try:
            result = await self._generate(task)
            sequences = [result] if isinstance(result, models.Sequence) else list(result)
            row = models.Trajectory(group=work.id, attempt=work.attempt, sample=task.id, sequences=sequences)
        except Away as error:
            self._note(f"{task.id}: {error}")
            self.counts["engine_away" if isinstance(error, EngineAway) else "away"] += 1
            return False
        except Exception as error:
            self._failures[key] += 1
            self._note(f"{task.id} failed: {type(error).__name__}: {error}")
            if self._failures[key] < self._tries and not isinstance(error, GiveUp):
                return False
            reason = f"{type(error).__name__}: {error}"[:200].encode(errors="replace").decode()
            row = models.Trajectory(group=work.id, attempt=work.attempt, sample=task.id, failed=reason)
        written = await self._buffer.write(work.run, [row])
        self._failures.pop(key, None)
        self.counts[written.trajectories[0].state] += 1
        self.counts.update(["failed"] if row.failed else [])
        return True

    async def _beat(self, work: models.Work) -> None:
        """Extend the lease while it is held."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            reply = await self._buffer.extend([work.lease], self._lease_seconds)
            if reply.lost:
                return

    async def _give_back(self, work: models.Work) -> None:
        with suppress(Exception):  # the lease ends by itself
            async with asyncio.timeout(5):
                await self._buffer.release([work.lease])


async def _end(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
