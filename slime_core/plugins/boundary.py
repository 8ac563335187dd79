"""The border to plugin code: an answer and its arguments in, its value out, or a PluginError that says where it broke.

Async answers are awaited, others run on threads of their own so that the loop stays awake; both meet a deadline.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.provider import Answer, Provider, signature_of

T = TypeVar("T")
Frames = Sequence[tuple[str, int]]  # file and line, outermost first
HOOK_LOOP: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("slime_hook_loop")
"""On a hook's thread: the loop that waits for it."""
DEADLINE: contextvars.ContextVar[asyncio.Timeout] = contextvars.ContextVar("slime_hook_deadline")
"""Inside an async hook: its deadline, which whoever makes the hook wait may move."""

CORE_FOLDER = str(Path(__file__).resolve().parent.parent)
ENDINGS = (SystemExit, KeyboardInterrupt)


class Late(Exception):
    """The deadline passed; ``frames`` is where a thread stood then."""

    def __init__(self, frames: Frames = ()) -> None:
        super().__init__()
        self.frames = frames


class Carried(Exception):
    """Carries an exception that would end the loop (SystemExit) or that a future refuses (StopIteration)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class HookThreads:
    """Threads for sync hooks: a bounded number, each a daemon, so that a hook that hangs cannot keep the process."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, fn: Callable[[], Any], deadline: float | None = None) -> Any:
        """Call ``fn`` on a thread; the deadline in seconds counts from its start. :class:`Carried` holds its error."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._limit))
        async with self._slots[1]:
            future: asyncio.Future[Any] = loop.create_future()
            context = contextvars.copy_context()
            context.run(HOOK_LOOP.set, loop)
            thread = threading.Thread(
                target=context.run, args=(_work, fn, loop, future), name="slime-hook", daemon=True
            )
            thread.start()
            await asyncio.wait({future}, timeout=deadline)
            if not future.done():
                raise Late(_frames_of(thread))
            return future.result()


def _work(fn: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    value, failed = None, None
    try:
        value = fn()
    except BaseException as error:
        failed = error
    if not loop.is_closed():
        loop.call_soon_threadsafe(_settle, future, value, failed)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error if type(error) is Late else Carried(error))


def _frames_of(thread: threading.Thread) -> Frames:
    frame = sys._current_frames().get(thread.ident or 0)
    return [(f.filename, f.lineno or 0) for f in traceback.extract_stack(frame)] if frame else []


async def _awaited(work: Awaitable[Any], deadline: float) -> Any:
    scope = asyncio.timeout(deadline)
    token = DEADLINE.set(scope)
    try:
        async with scope:
            return await work
    except TimeoutError:
        if scope.expired():
            raise Late from None
        raise
    except ENDINGS as error:
        raise Carried(error) from None
    finally:
        DEADLINE.reset(token)


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
        PluginError: PLG56 it raised, PLG60 it was late, PLG62 it tried to end the process.
        SlimeError: what it met in the core (an EngineError of ``ctx.generate``), unchanged.
    """
    try:
        if answer.is_async:
            return await _awaited(answer(arguments), deadline)
        value = await threads.run(lambda: answer(arguments), deadline)
        return await _awaited(value, deadline) if inspect.isawaitable(value) else value
    except Late as late:
        raise _too_late(answer, about, deadline, key, _place(late.frames, answer.provider.home)) from None
    except Carried as carried:
        raise (
            carried.error if isinstance(carried.error, SlimeError) else failure(answer, carried.error, about)
        ) from carried.error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure(answer, error, about) from error
    except SlimeError:
        raise
    except Exception as error:
        raise failure(answer, error, about) from error


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """The answers of plugin coroutines that run side by side; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(_contained(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except ENDINGS as error:
        raise Carried(error) from None


def call_now(answer: Answer, arguments: Mapping[str, Any], *, about: str) -> Any:
    """The value of an answer to a hook that may not await.

    Raises:
        PluginError: PLG56 it raised, PLG62 it tried to end the process, PLG66 it left a coroutine.
    """
    try:
        value = answer(arguments)
    except SlimeError:
        raise
    except (Exception, *ENDINGS) as error:
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


def failure(answer: Answer, error: BaseException, about: str) -> PluginError:
    """The PluginError of an exception that came out of ``answer``."""
    ending = isinstance(error, ENDINGS)
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    at = _place(frames, answer.provider.home)
    return PluginError(
        f"{answer.provider.name}.{answer.hook} failed for {about}: {type(error).__name__}: {error}",
        code="PLG62" if ending else "PLG56",
        where=_where(answer.provider, at, about),
        why="a hook may not end the process" if ending else "",
        fix="mend the code there, or set rollout.on_plugin_error=drop to drop such groups",
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


def _too_late(answer: Answer, about: str, deadline: float, key: str, at: str) -> PluginError:
    return PluginError(
        f"{answer.provider.name}.{answer.hook} did not answer in {deadline:g} s for {about}",
        code="PLG60",
        where=_where(answer.provider, f"stood at {at}" if at else "", about),
        fix=f"raise the limit: {key}={2 * deadline:g}",
    )


def _where(provider: Provider, *parts: str) -> str:
    return ", ".join([str(provider), *(part for part in parts if part)])


def _place(frames: Frames, home: Path | None) -> str:
    """``file:line`` of the deepest frame in the provider's own code, else the deepest outside of the core."""
    inside = [f for f in frames if home is not None and Path(f[0]).is_relative_to(home)]
    outside = [f for f in frames if not f[0].startswith(CORE_FOLDER)]
    for found in (inside, outside, frames):
        if found:
            return f"{found[-1][0]}:{found[-1][1]}"
    return ""
