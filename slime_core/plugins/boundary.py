"""Call a hook: on a thread or in the event loop, with a deadline, and an error that names plugin, hook and prompt.

A plugin is trusted code, and nothing more is guarded here. `slime plugins check` and `report.check_hooks` look closer.
A hook that holds the interpreter or the event loop past its limit is ended by a process beside the run, which reads in
`slime_core.heartbeat` who is at work.

A deadline is measured in slices: a process that is stopped (SIGSTOP, a suspended machine, a debugger) would find every
deadline long past when it goes on. A slice that took much longer than planned counts with its planned length only.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import queue
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slime_core.errors import PluginError, SlimeError, text_of
from slime_core.heartbeat import HEARTBEAT, HookCall
from slime_core.memory import shortage
from slime_core.plugins.provider import CORE, Answer, Provider, signature_of

T = TypeVar("T")
Frames = Sequence[traceback.FrameSummary]  # outermost first
CORE_FOLDER = str(Path(__file__).resolve().parent.parent)
LONGEST = 3600.0
"""Seconds that a hook without a limit of its own may take."""
SLICE = 1.0  # seconds
SLACK = 1.0  # a busy loop may wake so much later
TO_END = 1.0
"""Seconds that a hook on a thread has to end after its deadline."""
IDLE = 5.0
"""Seconds that a thread waits for its next hook before it ends; starting one takes longer than most rewards do."""
DEEPEST = 12  # lines of a stack that are shown
OF_GROUPS = frozenset(
    f"slime_{name}" for name in ("sampling", "generate", "rollout", "sample_done", "reward", "reward_types", "filter")
)
"""Hooks about groups, which ``rollout.on_plugin_error`` may drop."""
HOOK_LOOP: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("slime_hook_loop")
"""On a hook's thread: the loop that waits for it."""


class Stuck(PluginError):
    """PLG60 of a hook that cannot be ended: no setting makes the run go on beside it."""


class Late(Exception):
    """The deadline passed; ``frames`` is where the hook stood then."""

    def __init__(self, frames: Frames = (), *, stuck: bool = False) -> None:
        super().__init__()
        self.frames, self.stuck = frames, stuck  # whether it still runs


class Carried(Exception):
    """Carries an exception that would end the loop (SystemExit) or that a coroutine may not raise (StopIteration)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Deadline:
    """Cancels the task that entered it when its seconds are over; others may move it, or stop its clock.

    Example:
        async with Deadline(60.0) as deadline:
            await work()             # TimeoutError after 60 s, and deadline.expired is True
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._planned = 0.0  # of the slice

    @property
    def expired(self) -> bool:
        """Whether the seconds were over inside the block."""
        return self._scope.expired()

    async def __aenter__(self) -> Deadline:
        await self._scope.__aenter__()
        self._sleep()
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._stop()
        await self._scope.__aexit__(*raised)  # type: ignore[arg-type]

    def when(self) -> float | None:
        """The loop's time at which the seconds are over; None while the clock stands."""
        return None if self._timer is None else self._loop.time() + self.left - self._spent()

    def reschedule(self, when: float | None) -> None:
        """Move the end to ``when`` on the loop's clock; None stops the clock."""
        if self._scope.expired():
            raise RuntimeError("the deadline has passed")
        self._stop()
        if when is not None:
            self.left = when - self._loop.time()
            self._sleep()

    def _sleep(self) -> None:
        if self.left <= 0:
            self._scope.reschedule(self._loop.time())
        elif self.left < math.inf:
            self._since, self._planned = self._loop.time(), min(self.left, SLICE)
            self._timer = self._loop.call_later(self._planned, self._wake)

    def _wake(self) -> None:
        self.left -= self._spent()
        self._timer = None
        self._sleep()

    def _spent(self) -> float:
        took = self._loop.time() - self._since
        return took if took <= self._planned + SLACK else self._planned

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


DEADLINE: contextvars.ContextVar[Deadline] = contextvars.ContextVar("slime_hook_deadline")
"""Inside an async hook: its deadline, which whoever makes the hook wait may move."""


async def wait_for_future(future: asyncio.Future[Any], seconds: float) -> None:
    """Return when the future is done or its seconds are over; the future goes on."""
    with suppress(TimeoutError):
        async with Deadline(seconds):
            await asyncio.wait({future})


class HookThreads:
    """Threads for sync hooks: a bounded number, each a daemon, so that a hook that hangs cannot keep the process."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_ThreadCall] = queue.SimpleQueue()
        self._idle = 0  # threads that wait, less the calls that are queued for them

    async def run(self, fn: Callable[[], T], deadline: float = math.inf) -> T:
        """The value of ``fn``, called on a thread; the deadline in seconds counts from its start.

        Raises:
            Late: the deadline passed; ``stuck`` says that the thread still runs.
            Carried: ``fn`` raised what a coroutine cannot raise.
            Exception: ``fn`` raised it.
        """
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._limit))
        async with self._slots[1]:
            call = _ThreadCall(fn, loop, loop.create_future(), contextvars.copy_context())
            self._start(call)
            await wait_for_future(call.outcome, deadline)
            if not call.outcome.done():
                frames = stack_of(call.thread)
                await wait_for_future(call.outcome, TO_END)
                raise Late(frames, stuck=not call.outcome.done())
        value, error = call.outcome.result()
        if error is None:
            return value  # type: ignore[no-any-return]
        carried = isinstance(error, StopIteration) or not isinstance(error, Exception)
        raise Carried(error) if carried else error

    def _start(self, call: _ThreadCall) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._queue.put(call)
                return
        try:
            threading.Thread(target=self._serve, args=(call,), name="slime-hook", daemon=True).start()
        except RuntimeError as error:  # the hook has not begun: nothing of it is at fault
            raise shortage(error) from error

    def _serve(self, call: _ThreadCall | None) -> None:
        while call is not None:
            call.run()
            call = None  # what it holds is not kept until the next
            call = self._next()

    def _next(self) -> _ThreadCall | None:
        """The next call of this thread; None where it has waited for long."""
        with self._lock:
            self._idle += 1
        while True:
            try:
                return self._queue.get(timeout=IDLE)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._idle -= 1
                        return None


@dataclass(slots=True, eq=False)
class _ThreadCall:
    """One call on a thread, and the future of its value or error."""

    fn: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[tuple[Any, BaseException | None]]
    context: contextvars.Context
    thread: int = 0

    def run(self) -> None:
        """On the thread."""
        self.thread = threading.get_ident()
        self.context.run(HOOK_LOOP.set, self.loop)
        value, failed = None, None
        try:
            value = self.context.run(self.fn)
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._settle, value, failed)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result((value, error))


async def call(
    threads: HookThreads, answer: Answer, arguments: Mapping[str, Any], *, about: str, deadline: float, key: str
) -> Any:
    """The value of one answer.

    Args:
        threads: where sync answers run.
        answer: what to call.
        arguments: everything the hook has; the answer takes what it names.
        about: what it was called for, such as ``prompt 'grpo/17'``.
        deadline: seconds.
        key: the config key of the deadline.

    Raises:
        PluginError: PLG56 it raised, PLG60 it was late (:class:`Stuck` where it cannot be ended), PLG62 it tried to
            end the process.
        SlimeError: what it met in the core (an EngineError of ``ctx.generate``), unchanged.
    """

    def on_thread() -> Any:
        with _at_work(answer, about, deadline, key):
            return answer(arguments)

    try:
        value = answer(arguments) if answer.is_async else await threads.run(on_thread, deadline)
        if inspect.isawaitable(value):
            with _at_work(answer, about, deadline, key):
                return await _awaited(value, deadline)
        return value
    except Late as late:
        raise too_late(answer, about, deadline, key, late) from None
    except Carried as carried:
        raise failure(answer, carried.error, about) from carried.error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure(answer, error, about) from error
    except SlimeError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(answer, error, about) from error


async def _awaited(work: Awaitable[T], deadline: float) -> T:
    scope = Deadline(deadline)
    token = DEADLINE.set(scope)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if scope.expired:
            waited = error.__cause__ or error  # the cancellation went through every frame that waited
            raise Late(traceback.extract_tb(waited.__traceback__)) from None
        raise
    finally:
        DEADLINE.reset(token)


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """The answers of plugin coroutines that run side by side; the first failure cancels the others."""
    works = list(works)
    tasks = [asyncio.ensure_future(_contained(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            if inspect.iscoroutine(work):
                work.close()  # one that was cancelled before it began
        raise


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise Carried(error) from None


def call_now(
    answer: Answer,
    arguments: Mapping[str, Any],
    *,
    about: str,
    limit: float = LONGEST,
    key: str = "rollout.generate_timeout",
) -> Any:
    """The value of an answer to a hook that may not await; a process beside the run keeps the ``limit`` in seconds.

    Raises:
        PluginError: PLG56 it raised, PLG62 it tried to end the process, PLG66 it left a coroutine.
    """
    try:
        with _at_work(answer, about, limit, key):
            value = answer(arguments)
    except SlimeError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(answer, error, about) from error
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise PluginError(
            f"{answer.provider.name}.{answer.hook} returned a coroutine; this hook is called without await",
            code="PLG66",
            where=_where(answer.provider, about),
            fix=f"write it as `def {signature_of(answer.hook)}`",
        )
    return value


@contextmanager
def _at_work(answer: Answer, about: str, limit: float, key: str) -> Iterator[None]:
    """Show who watches from outside that the calling thread is in a plugin's hook, or awaits one."""
    provider = answer.provider
    if provider.source == CORE or not HEARTBEAT.watched:
        yield
        return
    hook, source = f"{provider.name}.{answer.hook}", str(provider.home or "")
    call = HookCall(limit=limit, hook=hook, provider=str(provider), key=key, source=source, subject=about)
    slot = HEARTBEAT.begin_call(call)
    try:
        yield
    finally:
        HEARTBEAT.end_call(slot)


def failure(answer: Answer, error: BaseException, about: str) -> SlimeError:
    """The PluginError of an exception that came out of ``answer``; an error of the core is itself."""
    if isinstance(error, SlimeError):
        return error
    ending = isinstance(error, (SystemExit, KeyboardInterrupt))
    at = _place(traceback.extract_tb(error.__traceback__), answer.provider.home)
    drop = ", or set rollout.on_plugin_error=drop to drop such groups" if answer.hook in OF_GROUPS else ""
    return PluginError(
        f"{answer.provider.name}.{answer.hook} failed for {about}: {text_of(error)}",
        code="PLG62" if ending else "PLG56",
        where=_where(answer.provider, at, about),
        why="a hook may not end the process" if ending else "",
        fix=f"fix the code there{drop}",
    )


def wrong(answer: Answer, what: str, about: str, *, code: str, why: str = "", fix: str = "") -> PluginError:
    """The PluginError of an answer that broke the hook's contract."""
    return PluginError(
        f"{answer.provider.name}.{answer.hook} {what} for {about}",
        code=code,
        where=_where(answer.provider, about),
        why=why,
        fix=fix,
    )


def listed(answer: Answer, value: Any, kind: type[T], about: str, name: str) -> list[T]:
    """The value, where it is a list of ``kind``, which plugins know as ``name``.

    Raises:
        PluginError: PLG57.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, kind) for item in value):
        raise wrong(answer, f"returned {value!r}", about, code="PLG57", fix=f"return a list of {name}")
    return list(value)


def too_late(answer: Answer, about: str, deadline: float, key: str, late: Late) -> PluginError:
    """PLG60, with the place and the stack where the hook stood."""
    at = _place(late.frames, answer.provider.home)
    stack = "".join(traceback.format_list(list(late.frames)[-DEEPEST:])).rstrip()
    reason = "it still runs and cannot be ended, so the run ends\n" if late.stuck else ""
    fix = f"raise the limit: {key}={2 * deadline:g}"
    if late.stuck:
        fix += (
            "\nor set a timeout on what it waits for; a reward may run in a separate process, which can be ended: "
            "slime_core.hookspecs.own_process"
        )
    return (Stuck if late.stuck else PluginError)(
        f"{answer.provider.name}.{answer.hook} did not answer in {deadline:g} s for {about}",
        code="PLG60",
        where=_where(answer.provider, f"blocked at {at}" if at else "", about),
        why=f"{reason}{stack}",
        fix=fix,
    )


def _where(provider: Provider, *parts: str) -> str:
    return ", ".join([str(provider), *(part for part in parts if part)])


def _place(frames: Frames, home: Path | None) -> str:
    """``file:line`` of the deepest frame in the provider's own code, else the deepest outside of the core."""
    inside = [f for f in frames if home is not None and Path(f.filename).is_relative_to(home)]
    outside = [f for f in frames if not f.filename.startswith(CORE_FOLDER)]
    for stack_frames in (inside, outside, frames):
        if stack_frames:
            return f"{stack_frames[-1].filename}:{stack_frames[-1].lineno}"
    return ""


def stack_of(thread: int) -> Frames:
    """Where a thread stands, outermost first; empty where it has ended."""
    frame = sys._current_frames().get(thread)
    return traceback.extract_stack(frame) if frame is not None else []
