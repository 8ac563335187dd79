"""Calls from the driver to one of its processes: any methods of an object there, many at once, each under a number.

    Proxy.call("step", rank_batch) --frame--> Service.step, else that of its `target`
                                        <--frame-- the value, or the error, in the order in which they are ready

    python -m MODULE CALLS [FD ...] PARENT         runs a service; CALLS is the socket of its `channel.Channel`

A caller that is cancelled cancels its call. Where the process dies, every call that waits and every later one raises
the error that the proxy was made for, with how it ended and the end of its log.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

from slime_core.clusters.channel import Channel, Frame, decode, encode, end, receive_frame, send_frame
from slime_core.clusters.hangs import show_stacks
from slime_core.errors import SlimeError, TrainerError, remade
from slime_core.parent import die_with

GRACE = 5.0
"""Seconds in which a process that was told to end, or that closed its socket, must be gone before it is killed."""
FRAMES = 3  # innermost frames of an exception's trace in its error; the log has all
SILENT = "it wrote nothing into its log"  # why, in the error of a process that ended so
RESUME = "what was finished is in the ledger: slime run --resume RUN_DIR"

P = ParamSpec("P")
R = TypeVar("R")


def request(number: int, method: str, *args: Any) -> Frame:
    """The frame of a call; number 0 has no answer, and is done before the next one is read."""
    return encode({"number": number, "method": method, "args": list(args)})


def forwarded(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A protocol's method for a class with ``call(name, *args)``, by which it goes to a process.

    Example: fingerprint = forwarded(Trainer.fingerprint)
    """

    signature = inspect.signature(method)

    @wraps(method)
    async def forward(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(self, *args, **kwargs)
        if kwargs:  # those before a named one, too
            bound.apply_defaults()
        answer: R = await self.call(method.__name__, *bound.args[1:])
        return answer

    return forward


class Proxy:
    """The driver's side. ``title`` begins the message of the process's end; ``note`` gets the service's state.

    Example:
        proxy = Proxy(channel, f"the engine's process {channel.pid}", EngineError, "ENG84")
        await proxy.call("start", config)
        await proxy.close()
    """

    def __init__(
        self,
        channel: Channel,
        title: str,
        kind: type[SlimeError],
        code: str,
        note: Callable[[Any], object] = lambda state: None,
    ) -> None:
        self.channel = channel
        self.last_reply = 0.0  # when it last answered, or was first asked: monotonic seconds
        self.lost: SlimeError | None = None  # why no call can be answered any more
        self._title, self._kind, self._code, self._note = title, kind, code, note
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._errands = set[asyncio.Task[None]]()
        self._listener = asyncio.create_task(self._listen(), name=f"slime-proxy-{channel.pid}")

    @property
    def waiting(self) -> int:
        """Calls without an answer."""
        return len(self._waiting)

    async def call(self, method: str, *args: Any) -> Any:
        """The answer of a method.

        Raises:
            SlimeError: the method's own, or of a process that is gone.
        """
        number = next(self._numbers)
        return await self.ask(number, request(number, method, *args))

    async def ask(self, number: int, frame: Frame) -> Any:
        """:meth:`call` by a frame that may go to several processes; its numbers are the caller's then."""
        if self.lost is not None:
            raise self.lost
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.last_reply = self.last_reply if self._waiting else time.monotonic()
        self._waiting[number] = future
        try:
            await self.send(frame)
            return await future
        except asyncio.CancelledError:
            if self.lost is None:
                errand = asyncio.create_task(self.send(request(0, "cancel", number)))
                self._errands.add(errand)
                errand.add_done_callback(self._errands.discard)
            raise
        finally:
            del self._waiting[number]

    async def send(self, frame: Frame) -> None:
        """Send a frame that has no answer; where the process is gone, the listener knows more."""
        with suppress(ConnectionError):
            await self.channel.write(frame)

    async def close(self) -> None:
        """Have the process end, and see that it does."""
        self.lost = self.lost or self._kind(f"{self._title} was closed", code=self._code)
        await end(self.channel, request(0, "close"), GRACE)
        await asyncio.gather(self._listener, return_exceptions=True)
        self._fail(self.lost)

    async def _listen(self) -> None:
        try:
            while True:
                answer = await self.channel.read()
                self.last_reply = time.monotonic()
                self._note(answer["state"])
                future = self._waiting.get(answer["number"])
                if future is None or future.done():
                    continue  # its caller has gone
                if "error" in answer:
                    _fail(future, remade(answer["kind"], answer["error"], self._kind))
                else:
                    future.set_result(answer["value"])
        except ConnectionError:
            reason = f"{self._title} {await self._end() or 'closed its connection'}"
        except Exception as error:
            reason = f"{self._title} answered something unreadable: {error!r}"
        if self.lost is None:
            tail, log = await self.channel.tail(), self.channel.log
            self.lost = self._kind(reason, code=self._code, where=log, why=tail or SILENT, fix=RESUME, lost=True)
            self._fail(self.lost)

    async def _end(self) -> str:
        """How the process ended; empty where it did not end by itself and was killed."""
        how = await self.channel.ended(GRACE)
        if not how:
            await self.channel.kill()
        return how

    def _fail(self, error: SlimeError) -> None:
        for future in self._waiting.values():
            if not future.done():
                _fail(future, error)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a call; a caller that is cancelled meanwhile never looks at it, and asyncio is not to print that."""
    future.set_exception(error)
    future.exception()


class Service:
    """The process's side: calls go to methods of a subclass, else to those of ``target``, which one of them makes.

    Example:
        class Sums(Service):
            async def add(self, a, b):
                return a + b

        if __name__ == "__main__":
            run(Sums)
    """

    target: Any = None
    fault: Callable[..., SlimeError] = TrainerError  # what another exception becomes

    def __init__(self) -> None:
        self.stack = AsyncExitStack()  # closed when the driver is gone
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def state(self) -> Any:
        """What every answer tells beside."""
        return None

    def cancel(self, number: int) -> None:
        """Cancel a call."""
        if task := self._tasks.get(number):
            task.cancel()

    async def serve(self, calls: socket.socket) -> None:
        """Answer until the driver says ``close`` or is gone."""
        reader, writer = await asyncio.open_unix_connection(sock=calls)
        async with self.stack:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while (call := decode(await receive_frame(reader)))["method"] != "close":
                    number, method, args = call["number"], call["method"], call["args"]
                    if number == 0:
                        getattr(self, method)(*args)
                        continue
                    task = asyncio.create_task(self._answer(writer, number, method, args))
                    self._tasks[number] = task
                    task.add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]
            for task in self._tasks.values():
                task.cancel()

    async def _answer(self, writer: asyncio.StreamWriter, number: int, method: str, args: list[Any]) -> None:
        try:
            value = (getattr(self, method, None) or getattr(self.target, method))(*args)
            value = await value if inspect.isawaitable(value) else value
            frame = encode({"number": number, "state": self.state, "value": value})
        except Exception as error:
            traceback.print_exc()  # into the log
            frames = "".join(traceback.format_tb(error.__traceback__)[-FRAMES:]).rstrip()
            if not isinstance(error, SlimeError):
                error = self.fault(f"{type(error).__name__}: {error}", why=frames)
            parts = {"error": error.as_dict(), "kind": type(error).__name__}
            frame = encode({"number": number, "state": self.state, **parts})
        with suppress(ConnectionError):
            await send_frame(writer, frame)


def run(kind: Callable[..., Service]) -> None:
    """The program of a process: serve, and end with its parent; ``kind`` is called with the further descriptors."""
    calls, *more, parent = map(int, sys.argv[1:])
    die_with(parent)
    show_stacks()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # to the log, as all output
    logging.getLogger("slime_core").setLevel(logging.INFO)
    asyncio.run(kind(*more).serve(socket.socket(fileno=calls)))
    sys.stdout.flush()
    os._exit(0)  # a collective that waits for a dead peer must not hold the process
