"""Pool of workers: a bounded queue, so many candidates a device, devices that rest.

    submit -> queue -> keeper of a free device -> worker (a process) -> verdict
                            |  the worker died, was out of time or judged nothing; a GPU's candidate ended abnormally
                            v
                       quarantine -> a kernel that is known to be right is judged right -> back

A worker that died is replaced, one that lives goes on where the canary kernel passes; it is asked when those that were
under way on the device have ended. What could not be judged is judged once more, elsewhere if it can be; a second
time it is `infra`. A GPU measures one candidate at a time (the judge's own lock); others of its lanes are compiled and
checked meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_kernelbench.problems import answer, shipped
from slime_kernelbench.service.devices import Device
from slime_kernelbench.service.process import JudgeWorker, Lost
from slime_kernelbench.service.verdicts import infra, read
from slime_kernelbench.types import KernelProblem, Verdict

TRIES = 2
ENDED = frozenset({"died", "memory", "too_much_output"})  # kinds of diagnostics: how a sandboxed process ended
UNJUDGEABLE = "Unjudgeable"  # the kind of a diagnostic: `judge.examination.Unjudgeable`
log = logging.getLogger("slime.kernelbench")
Start = Callable[[Device], Awaitable[JudgeWorker]]


class PoolFull(Exception):
    """As many candidates wait as may."""


class Stopped(Exception):
    """The service ended before a candidate was judged."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolLimits:
    """Numbers that bound the service. Times in seconds."""

    waiting: int = 256  # candidates in the queue
    deadline: float = 600.0  # of one candidate in the queue
    judging: float = 300.0  # of one candidate in a worker
    canary: float = 300.0  # of the first kernel in a new worker, its imports included
    lanes: int = 1  # candidates under way on a device
    first_rest: float = 1.0  # of a device whose canary failed; doubles
    longest_rest: float = 60.0


@dataclass(slots=True, eq=False)
class JudgeJob:
    """A candidate under way."""

    source: str
    problem: KernelProblem
    until: float  # monotonic
    done: asyncio.Future[Verdict]
    tries: int = 0


@dataclass(slots=True)
class PoolDevice:
    """A device as the pool sees it."""

    device: Device
    state: str = "starting"  # ready, busy, quarantined
    why: str = ""
    judged: int = 0
    quarantines: int = 0
    pid: int = 0
    active: int = 0  # candidates under way


@dataclass(slots=True)
class Pool:
    """Workers over devices. An async context manager: it ends with no process of its own left.

    Example:
        async with Pool(devices((), 2), start=lambda device: Worker.start(device, options={})) as pool:
            verdict = await pool.submit(source, problem)
    """

    devices: Sequence[Device]
    start: Start
    limits: PoolLimits = field(default_factory=PoolLimits)
    places: list[PoolDevice] = field(init=False)
    counts: Counter[str] = field(init=False, default_factory=Counter)
    _queue: deque[JudgeJob] = field(init=False, default_factory=deque)
    _busy: set[JudgeJob] = field(init=False, default_factory=set)  # in a worker
    _open: set[JudgeJob] = field(init=False, default_factory=set)  # somebody waits for its verdict
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _keepers: list[asyncio.Task[None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.places = [PoolDevice(device) for device in self.devices]

    async def __aenter__(self) -> Pool:
        self._keepers = [asyncio.create_task(self._keep(place)) for place in self.places]
        self._keepers.append(asyncio.create_task(self._expire()))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers; who waits for what was not judged gets :class:`Stopped`."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for job in self._open:
            if not job.done.done():
                job.done.set_exception(Stopped())

    async def submit(self, source: str, problem: KernelProblem) -> Verdict:
        """The verdict on one candidate. A caller that is cancelled takes its candidate out of the queue.

        Raises:
            Full: the queue is.
            Stopped: the pool was closed.
        """
        if len(self._queue) >= self.limits.waiting:
            raise PoolFull
        loop = asyncio.get_running_loop()
        job = JudgeJob(source, problem, time.monotonic() + self.limits.deadline, loop.create_future())
        self._open.add(job)
        self._put(job)
        try:
            verdict = await job.done
        finally:
            self._forget(job)
        self.counts[verdict.status] += 1
        return verdict

    async def idle(self) -> None:
        """Wait until nothing is queued or judged."""
        await self._until(lambda: not self._queue and not self._busy)

    def state(self) -> dict[str, Any]:
        """The queue, the devices and the verdicts so far, JSON-ready."""
        places = [{**asdict(place), "device": place.device.name} for place in self.places]
        waiting = {"waiting": len(self._queue), "judging": len(self._busy), "limit": self.limits.waiting}
        return {"queue": waiting, "devices": places, "verdicts": dict(self.counts)}

    def _put(self, job: JudgeJob, *, first: bool = False) -> None:
        (self._queue.appendleft if first else self._queue.append)(job)
        self._changed.set()

    async def _take(self, place: PoolDevice) -> JudgeJob:
        """The next candidate for a device that is not in doubt."""
        await self._until(lambda: bool(self._queue) and place.state != "quarantined")
        job = self._queue.popleft()
        self._busy.add(job)
        place.active += 1
        place.state = "busy"
        return job

    def _put_down(self, job: JudgeJob, place: PoolDevice) -> None:
        self._busy.discard(job)
        place.active -= 1
        if place.state == "busy" and not place.active:
            place.state = "ready"
        self._changed.set()

    def _forget(self, job: JudgeJob) -> None:
        self._open.discard(job)
        with suppress(ValueError):
            self._queue.remove(job)
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _expire(self) -> None:
        """Answer those that waited too long."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.deadline / 4))
            now = time.monotonic()
            for job in [job for job in self._queue if job.until <= now]:
                reason = f"no device was free for {self.limits.deadline:g} s"
                _answer(job, infra("Deadline", reason, source=job.source))

    async def _keep(self, place: PoolDevice) -> None:
        """Keep one device at work for as long as the service lives."""
        rest = self.limits.first_rest
        while True:
            worker = None
            try:
                worker = await self.start(place.device)
                place.pid = worker.pid
                await self._canary(worker)
                rest = self.limits.first_rest
                await self._work(worker, place)
            except Lost as error:
                self._quarantine(place, str(error))
            except Exception as error:
                self._quarantine(place, f"{type(error).__name__}: {error}")
                log.exception("the keeper of device %s", place.device.name)
            finally:
                place.pid = 0
                if worker is not None:
                    await worker.kill()
            if worker is None or not worker.passed:  # it never got as far as a candidate: do not spin
                await asyncio.sleep(rest)
                rest = min(2 * rest, self.limits.longest_rest)

    async def _canary(self, worker: JudgeWorker) -> None:
        """A kernel that is known to be right must be found right.

        Raises:
            Lost: it was not.
        """
        problem = next(problem for problem in shipped() if problem.name == "add")
        source = answer("add") + f"# {secrets.token_hex(8)}\n"  # never the one that was judged before
        verdict = await self._ask(worker, source, problem, self.limits.canary)
        if not verdict.correct:
            raise Lost(f"the canary kernel was found {verdict.status}: {_summary(verdict)}")
        worker.passed = True

    async def _work(self, worker: JudgeWorker, place: PoolDevice) -> None:
        """Judge candidates for as long as the worker lives and passes its canary.

        Raises:
            Lost: it does not.
        """
        place.state, place.why = "ready", ""
        lanes = [asyncio.create_task(self._lane(worker, place)) for _ in range(self.limits.lanes)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _lane(self, worker: JudgeWorker, place: PoolDevice) -> None:
        while True:
            job = await self._take(place)
            try:
                doubt = await self._judge(worker, job)
            finally:
                self._put_down(job, place)
            place.judged += 1
            if doubt:
                self._quarantine(place, doubt)
            if place.state == "quarantined" and not place.active:
                await self._canary(worker)
                place.state, place.why = "ready", ""
                self._changed.set()

    def _quarantine(self, place: PoolDevice, reason: str) -> None:
        place.quarantines += place.state != "quarantined"
        place.state, place.why = "quarantined", reason
        log.warning("device %s is in quarantine: %s", place.device.name, reason)

    async def _judge(self, worker: JudgeWorker, job: JudgeJob) -> str:
        """Why the device may not be sound after a candidate; empty where it is.

        Raises:
            Lost: the worker is gone.
        """
        if job.done.done():
            return ""
        job.tries += 1
        try:
            verdict = await self._ask(worker, job.source, job.problem, self.limits.judging)
        except Lost as error:
            self._again(job, str(error))
            raise
        except asyncio.CancelledError:  # another lane lost the worker
            job.tries -= 1
            self._put(job, first=True)
            raise
        if verdict.status == "infra" and not _unjudgeable(verdict):
            self._again(job, _summary(verdict))
            return _summary(verdict) or "the judge could judge nothing"
        _answer(job, verdict)
        return f"a candidate ended with {verdict.status}" if worker.device.gpu and _abnormal(verdict) else ""

    async def _ask(self, worker: JudgeWorker, source: str, problem: KernelProblem, seconds: float) -> Verdict:
        answer = await worker.judge(source, problem, seconds)
        try:
            return read(answer, source)
        except ValueError as error:
            raise Lost(str(error)) from error

    def _again(self, job: JudgeJob, reason: str) -> None:
        """Queue a candidate once more, before all others; answer `infra` where that has been done."""
        if job.tries < TRIES and time.monotonic() < job.until:
            self._put(job, first=True)
        else:
            _answer(job, infra("WorkerLost", reason, source=job.source))


def _unjudgeable(verdict: Verdict) -> bool:
    """Whether the problem is at fault: no device would do better."""
    return any(item.kind == UNJUDGEABLE for item in verdict.diagnostics)


def _abnormal(verdict: Verdict) -> bool:
    """Whether a candidate's process was ended, or the driver raised, rather than a line of Python."""
    ended = any(item.kind in ENDED or "CUDA error" in item.message for item in verdict.diagnostics)
    return verdict.status == "timeout" or (ended and not verdict.correct)


def _summary(verdict: Verdict) -> str:
    return "; ".join(item.message for item in verdict.diagnostics[:1])


def _answer(job: JudgeJob, verdict: Verdict) -> None:
    if not job.done.done():
        job.done.set_result(verdict)
