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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from slime_core.errors import PluginError, SlimeError, text_of
from slime_core.heartbeat import HEARTBEAT, NONE, HookCall
from slime_core.hookspecs import OWN_PROCESS, signature_of
from slime_core.memory import shortage

T = TypeVar("T")
CORE = "core"
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


def hook_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop in which the hook that calls this runs, or which waits for its thread; None outside of both."""
    return HOOK_LOOP.get(None) or asyncio._get_running_loop()


@dataclass(slots=True, frozen=True, kw_only=True)
class Provider:
    """Where an implementation comes from.

    Example:
        Provider(name="rm_math", origin="slime-rm-math==0.1.0", source="plugin", home=Path(".../slime_rm_math"))
    """

    name: str  # of the plugin, "core", or the config key of a function by path
    origin: str  # distribution==version, or the path that was given
    source: Literal["path", "plugin", "core"]
    home: Path | None = None  # folder (or file) of its code

    def __str__(self) -> str:
        return self.name if self.source == "core" else f"{self.name} ({self.origin})"


@dataclass(slots=True, frozen=True, kw_only=True)
class HookImpl:
    """One implementation of one hook."""

    provider: Provider
    hook: str
    fn: Callable[..., Any]
    takes: frozenset[str] | None = None  # arguments it names; None takes all

    @property
    def is_async(self) -> bool:
        """Whether it is declared async."""
        return inspect.iscoroutinefunction(self.fn)

    @property
    def own_process(self) -> bool:
        """Whether it is a reward that asks for a process (`slime_core.hookspecs.own_process`)."""
        return bool(getattr(self.fn, OWN_PROCESS, False))

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of ``arguments`` that it takes."""
        if self.takes is None:
            return self.fn(**arguments)
        return self.fn(**{name: value for name, value in arguments.items() if name in self.takes})


class Stuck(PluginError):
    """PLG60 of a hook that cannot be ended: no setting makes the run go on beside it."""


class Late(Exception):
    """The deadline passed; ``frames`` is where the hook was then."""

    def __init__(self, frames: Frames = (), *, stuck: bool = False) -> None:
        super().__init__()
        self.frames, self.stuck = frames, stuck  # whether it still runs


class Carried(Exception):
    """Carries an exception that would end the loop (SystemExit) or that a coroutine may not raise (StopIteration)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Deadline:
    """Ends its block after some seconds; who makes the block wait stops its clock.

    Raises:
        Late: the seconds are over, with the place where the block waited.

    Example:
        async with Deadline(60.0):
            await work()
    """

    def __init__(self, seconds: float) -> None:
        self._remaining = seconds
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of a slice
        self._since = self._planned = 0.0  # of the slice
        self._token: contextvars.Token[Deadline] | None = None  # inside the block
        self._outer = DEADLINE.get(None)

    async def __aenter__(self) -> Deadline:
        await self._scope.__aenter__()
        self._token = DEADLINE.set(self)
        self._start()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._stop()
        if self._token is not None:
            DEADLINE.reset(self._token)
        self._token = None
        try:
            await self._scope.__aexit__(*raised)
        except TimeoutError:  # the cancellation went through every frame that waited
            raise Late(traceback.extract_tb(raised[2])) from None

    @property
    def runs(self) -> bool:
        """Whether the clock does."""
        return self._timer is not None

    @property
    def over(self) -> bool:
        """Whether its seconds are over."""
        return self._scope.expired()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside this block, and those of the deadlines around it."""
        runs = self.runs
        self._stop()
        try:
            with nullcontext() if self._outer is None else self._outer.stopped():
                yield
        finally:
            if runs and self._token is not None and not self._scope.expired():
                self._start()

    def _start(self) -> None:
        """Begin the next slice; the end, where no seconds are left."""
        if self._remaining <= 0:
            self._scope.reschedule(self._loop.time())
        elif self._remaining < math.inf:
            self._since, self._planned = self._loop.time(), min(self._remaining, SLICE)
            self._timer = self._loop.call_later(self._planned, self._next)

    def _stop(self) -> None:
        """End the slice, and count it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            took = self._loop.time() - self._since
            self._remaining -= took if took <= self._planned + SLACK else self._planned

    def _next(self) -> None:
        self._stop()
        self._start()


DEADLINE: contextvars.ContextVar[Deadline] = contextvars.ContextVar("slime_hook_deadline")
"""Inside an async hook: its deadline."""


async def wait_for_future(future: asyncio.Future[Any], seconds: float) -> None:
    """Return when the future is done or its seconds are over; the future goes on."""
    with suppress(Late):
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
    threads: HookThreads, impl: HookImpl, arguments: Mapping[str, Any], *, about: str, deadline: float, key: str
) -> Any:
    """The value of a hook: an async one runs in the event loop, a sync one on a thread.

    ``about`` is what it is called for (``prompt 'grpo/17'``), ``key`` the config key of the deadline in seconds.

    Raises:
        PluginError: PLG56 it raised, PLG60 it was late (:class:`Stuck` where it cannot be ended), PLG62 it tried to
            end the process.
        SlimeError: what it met in the core (an EngineError of ``ctx.generate``), unchanged.
    """

    def on_thread() -> Any:
        with _at_work(impl, about, deadline, key):
            return impl(arguments)

    try:
        value: Any = None if impl.is_async else await threads.run(on_thread, deadline)
        if impl.is_async or inspect.isawaitable(value):
            with _at_work(impl, about, deadline, key):
                async with Deadline(deadline):
                    return await (impl(arguments) if impl.is_async else value)
        return value
    except Late as late:
        raise too_late(impl, about, deadline, key, late) from None
    except Carried as carried:
        raise failure(impl, carried.error, about) from carried.error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure(impl, error, about) from error


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """The values of plugin coroutines that run side by side; the first failure cancels the others."""
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
    impl: HookImpl,
    arguments: Mapping[str, Any],
    *,
    about: str,
    limit: float = LONGEST,
    key: str = "rollout.generate_timeout",
) -> Any:
    """The value of a hook that may not await; the watchdog keeps the ``limit`` in seconds.

    Raises:
        PluginError: PLG56 it raised, PLG62 it tried to end the process, PLG66 it left a coroutine.
    """
    with _at_work(impl, about, limit, key):
        value = impl(arguments)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        fix = f"write it as `def {signature_of(impl.hook)}`"
        raise wrong(
            impl, "returned a coroutine", about, code="PLG66", why="this hook is called without await", fix=fix
        )
    return value


@contextmanager
def _at_work(impl: HookImpl, about: str, limit: float, key: str) -> Iterator[None]:
    """Show the watchdog that this thread is in a plugin's hook, and raise what the hook raises as a PluginError."""
    provider, slot = impl.provider, NONE
    if provider.source != CORE and HEARTBEAT.watched:
        hook, source = f"{provider.name}.{impl.hook}", str(provider.home or "")
        slot = HEARTBEAT.begin_call(
            HookCall(limit=limit, hook=hook, provider=str(provider), key=key, source=source, subject=about)
        )
    try:
        yield
    except (SlimeError, Late, Carried):
        raise
    except (Exception, SystemExit) as error:
        raise failure(impl, error, about) from error
    finally:
        HEARTBEAT.end_call(slot)


def failure(impl: HookImpl, error: BaseException, about: str) -> SlimeError:
    """The PluginError of an exception that came out of a hook; an error of the core is itself."""
    if isinstance(error, SlimeError):
        return error
    ending = isinstance(error, (SystemExit, KeyboardInterrupt))
    return wrong(
        impl,
        "failed",
        about,
        code="PLG62" if ending else "PLG56",
        text=f": {text_of(error)}",
        at=_place(traceback.extract_tb(error.__traceback__), impl.provider.home),
        why="a hook may not end the process" if ending else "",
        fix="fix the code there"
        + (", or set rollout.on_plugin_error=drop to drop such groups" if impl.hook in OF_GROUPS else ""),
    )


def too_late(impl: HookImpl, about: str, deadline: float, key: str, late: Late) -> PluginError:
    """PLG60, with the place and the stack where the hook waited."""
    at = _place(late.frames, impl.provider.home)
    stack = "".join(traceback.format_list(list(late.frames)[-DEEPEST:])).rstrip()
    reason, fix = "", f"raise the limit: {key}={2 * deadline:g}"
    if late.stuck:
        reason = "it still runs and cannot be ended, so the run ends\n"
        fix += (
            "\nor set a timeout on what it waits for; a reward may run in a separate process, which can be ended: "
            "slime_core.hookspecs.own_process"
        )
    message, place = f"did not answer in {deadline:g} s", f"blocked at {at}" if at else ""
    kind = Stuck if late.stuck else PluginError
    return wrong(impl, message, about, code="PLG60", at=place, why=f"{reason}{stack}", fix=fix, kind=kind)


def wrong(
    impl: HookImpl,
    what: str,
    about: str,
    *,
    code: str,
    text: str = "",
    at: str = "",
    why: str = "",
    fix: str = "",
    kind: type[PluginError] = PluginError,
) -> PluginError:
    """The PluginError of a hook that broke its contract: plugin, hook, and what it was called for."""
    where = ", ".join(filter(None, [str(impl.provider), at, about]))
    return kind(f"{impl.provider.name}.{impl.hook} {what} for {about}{text}", code=code, where=where, why=why, fix=fix)


def listed(impl: HookImpl, value: Any, kind: type[T], about: str, name: str) -> list[T]:
    """The value, where it is a list of ``kind``, which plugins know as ``name``.

    Raises:
        PluginError: PLG57.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, kind) for item in value):
        raise wrong(impl, f"returned {value!r}", about, code="PLG57", fix=f"return a list of {name}")
    return list(value)


def _place(frames: Frames, home: Path | None) -> str:
    """``file:line`` of the deepest frame in the provider's own code, else the deepest outside of the core."""
    inside = [f for f in frames if home is not None and Path(f.filename).is_relative_to(home)]
    outside = [f for f in frames if not f.filename.startswith(CORE_FOLDER)]
    for stack_frames in (inside, outside, frames):
        if stack_frames:
            return f"{stack_frames[-1].filename}:{stack_frames[-1].lineno}"
    return ""


def stack_of(thread: int) -> Frames:
    """The frames of a thread, outermost first; empty where it has ended."""
    frame = sys._current_frames().get(thread)
    return traceback.extract_stack(frame) if frame is not None else []
