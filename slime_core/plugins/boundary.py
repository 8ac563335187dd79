"""The border to plugin code: an answer and its arguments in, its value out, or a PluginError that says where it broke.

Async answers are awaited, others run on threads of their own so that the loop stays awake; all meet a deadline. What a
hook may do to the process is watched by `guard`, what it holds by `calls`.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import os
import threading
import traceback
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from slime_core.errors import PluginError, SlimeError, text_of
from slime_core.plugins.calls import WATCH, Call, Frames, Interrupted, shown
from slime_core.plugins.guard import GUARD, end_if_forked
from slime_core.plugins.provider import CORE, Answer, Provider, signature_of
from slime_core.plugins.running import (
    DEADLINE as DEADLINE,
    HOOK_LOOP as HOOK_LOOP,
    Carried,
    Deadline,
    HookThreads as HookThreads,
    Late,
    Steps,
)

T = TypeVar("T")
CORE_FOLDER = str(Path(__file__).resolve().parent.parent)
ASYNCIO_FOLDER = str(Path(asyncio.__file__).resolve().parent)
ENDINGS = (SystemExit, KeyboardInterrupt)
LONGEST = 3600.0
"""Seconds that a hook without a limit of its own may take."""
OF_GROUPS = frozenset(
    f"slime_{name}" for name in ("sampling", "generate", "rollout", "sample_done", "reward", "reward_types", "filter")
)
"""Hooks about groups, which ``rollout.on_plugin_error`` may drop."""


class Stuck(PluginError):
    """PLG60 of a hook that cannot be ended: no setting makes the run go on beside it."""


async def _awaited(work: Awaitable[Any], deadline: float, watched: Call) -> Any:
    scope = Deadline(deadline)
    token = DEADLINE.set(scope)
    steps = Steps(work, watched)
    try:
        async with scope:
            return await steps.all()
    except TimeoutError:
        if scope.expired:
            raise Late(steps.stopped_at) from None
        raise
    except ENDINGS as error:
        if is_from_terminal(error):
            raise
        raise Carried(error) from None
    finally:
        DEADLINE.reset(token)


async def call(
    threads: HookThreads,
    answer: Answer,
    arguments: Mapping[str, Any],
    *,
    about: str,
    deadline: float,
    key: str,
    draws: bool = False,
) -> Any:
    """The value of one answer.

    Args:
        threads: where sync answers run.
        answer: what to call.
        arguments: everything the hook has; the answer takes what it names.
        about: what it was called for, such as ``prompt 'grpo/17'``.
        deadline: seconds.
        key: the config key of the deadline.
        draws: tell of draws from global random generators.

    Raises:
        PluginError: PLG56 it raised, PLG60 it was late (:class:`Stuck` where it cannot be ended), PLG62 it tried to
            end the process.
        SlimeError: what it met in the core (an EngineError of ``ctx.generate``), unchanged.
    """
    watched = _watched(answer, about, deadline, key)
    watched.loop = asyncio.get_running_loop()
    with _guarded(watched, draws):
        try:
            if answer.is_async:
                return await _awaited(answer(arguments), deadline, watched)
            value = await threads.run(lambda: _shown(watched, arguments), deadline)
            return await _awaited(value, deadline, watched) if inspect.isawaitable(value) else value
        except (Late, Interrupted) as late:
            raise too_late(answer, about, deadline, key, late) from None
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


def _shown(call: Call, arguments: Mapping[str, Any]) -> Any:
    call.show()
    try:
        return call.answer(arguments)
    finally:
        call.hide()


@contextmanager
def _guarded(watched: Call, draws: bool = False) -> Iterator[None]:
    """Watch a call of a plugin; core's own are not."""
    if watched.answer.provider.source == CORE:
        yield
        return
    GUARD.enter(watched, draws=draws)
    try:
        yield
    finally:
        GUARD.leave(watched)


def _watched(answer: Answer, about: str, limit: float, key: str) -> Call:
    return Call(
        answer, about, limit, lambda frames: too_late(answer, about, limit, key, Late(frames, stuck=True)), key=key
    )


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
    except ENDINGS as error:
        if is_from_terminal(error):
            raise
        raise Carried(error) from None


def call_now(
    answer: Answer,
    arguments: Mapping[str, Any],
    *,
    about: str,
    limit: float = LONGEST,
    key: str = "rollout.generate_timeout",
    draws: bool = False,
) -> Any:
    """The value of an answer to a hook that may not await.

    Raises:
        PluginError: PLG56 it raised, PLG60 it took longer than ``limit`` seconds, PLG62 it tried to end the process,
            PLG66 it left a coroutine.
    """
    process = os.getpid()
    watched = _watched(answer, about, limit, key)
    try:
        with _guarded(watched, draws):
            WATCH.hold(watched)
            try:
                value = answer(arguments)
            finally:
                WATCH.release(watched)
                end_if_forked(process)
    except SlimeError:
        raise
    except Interrupted as late:
        raise too_late(answer, about, limit, key, late) from None
    except (Exception, *ENDINGS) as error:
        if is_from_terminal(error):
            raise
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
    at = _place(traceback.extract_tb(error.__traceback__), answer.provider.home)
    drop = ", or set rollout.on_plugin_error=drop to drop such groups" if answer.hook in OF_GROUPS else ""
    return PluginError(
        f"{answer.provider.name}.{answer.hook} failed for {about}: {text_of(error)}",
        code="PLG62" if ending else "PLG56",
        where=_where(answer.provider, at, about),
        why="a hook may not end the process" if ending else "",
        fix=f"mend the code there{drop}",
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


def is_from_terminal(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt is a person's Ctrl-C, and not raised by plugin code.

    Plugin code raises it by a ``raise`` of its own. The interpreter raises it between any two instructions, and
    handlers of signals (asyncio's, the command line's) raise it outside of the plugin's files.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    if code.co_filename.startswith(CORE_FOLDER) or code.co_filename.startswith(ASYNCIO_FOLDER):
        return True
    return dis.opname[code.co_code[trace.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


def too_late(answer: Answer, about: str, deadline: float, key: str, late: Late | Interrupted) -> PluginError:
    """PLG60, with the place and the stack where the hook stood."""
    frames = late.frames if isinstance(late, Late) else traceback.extract_tb(late.__traceback__)
    stuck = isinstance(late, Late) and late.stuck
    at = _place(frames, answer.provider.home)
    why = "it still runs and cannot be ended, so the run ends\n" if stuck else ""
    return (Stuck if stuck else PluginError)(
        f"{answer.provider.name}.{answer.hook} did not answer in {deadline:g} s for {about}",
        code="PLG60",
        where=_where(answer.provider, f"stood at {at}" if at else "", about),
        why=f"{why}{shown(frames)}".rstrip(),
        fix=f"raise the limit: {key}={2 * deadline:g}"
        + ("\nor give what it waits for a timeout of its own; a reward may run in a process, which can be ended: "
           "slime_core.hookspecs.own_process" if stuck else ""),
    )  # fmt: skip


def _where(provider: Provider, *parts: str) -> str:
    return ", ".join([str(provider), *(part for part in parts if part)])


def _place(frames: Frames, home: Path | None) -> str:
    """``file:line`` of the deepest frame in the provider's own code, else the deepest outside of the core."""
    inside = [f for f in frames if home is not None and Path(f.filename).is_relative_to(home)]
    outside = [f for f in frames if not f.filename.startswith(CORE_FOLDER)]
    for found in (inside, outside, frames):
        if found:
            return f"{found[-1].filename}:{found[-1].lineno}"
    return ""
