"""One SGLang server: started and stopped by us, or another's that runs already.

    Launch --Host.start--> its process, somewhere --ready--> Address --stop or death--> nothing left

Every start is a new generation with ports of its own, so an answer of an old one can be told by its address. The token
goes to nobody but a process of ours: before it is sent, the listener on the port is looked up. Where the process lives
is its host's affair.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from slime_core.clusters.host import Listener, ProcessHost
from slime_core.errors import EngineError
from slime_sglang.address import ServerAddress
from slime_sglang.handshake import handshake
from slime_sglang.host import Launch, LocalHost, log_since

EXTERNAL = "rollout.rollout_external_engine_addrs"

GRACE = 15.0
"""Seconds from SIGTERM to SIGKILL; the launcher, which is told first, gives the server 10 of them."""

POLL = 0.2  # seconds between looks while a server starts
ASK = 30.0  # seconds for one answer while it starts: SGLang's /health makes a token when it is idle
SETTLED = 5.0  # seconds until a process that was stopped is known to have ended
PORT_TRIES = 4  # starts on other ports where somebody took the one that was held
TAIL_LINES, TAIL_WIDTH = 30, 300

ACCESS = re.compile(r'"(GET|POST) \S+ HTTP/[0-9.]+" 200')  # requests that were served say nothing of an end
IN_USE = re.compile(r"address already in use", re.IGNORECASE)


class Server:
    """A server of ours (``launch``) or another's (``attach``).

    Example:
        server = Server.launch(Launch(...), number=0)
        await server.start()
        await server.ready(900.0)
        ...
        await server.stop()
    """

    def __init__(self, address: ServerAddress, launch: Launch | None, host: ProcessHost | None = None) -> None:
        self.address = address  # of its present generation
        self.facts: Mapping[str, Any] = {}  # what it said of itself when it was last ready
        self.log = launch.log if launch is not None else None
        self._launch = launch
        self._host: ProcessHost = host or LocalHost()
        self._end: asyncio.Task[str] | None = None
        self._served = False  # it was ready once
        self._last = ""  # why it was not ready at the last look
        self._from = 0  # where the present generation's part of the log begins

    @classmethod
    def launch(
        cls,
        launch: Launch,
        *,
        number: int = 0,
        group: str = "rollout",
        token: str = "",
        host: ProcessHost | None = None,
    ) -> Self:
        """A server of ours, not started; its token is drawn here, unless it shares one. No host: this machine."""
        token = token or secrets.token_urlsafe(32)
        return cls(ServerAddress(url="", token=token, number=number, group=group, generation=0), launch, host)

    @classmethod
    def attach(cls, url: str, *, token: str = "", ca: str = "", number: int = 0, group: str = "rollout") -> Self:
        """A server that somebody else runs: never started and never stopped by us."""
        return cls(ServerAddress(url=url.rstrip("/"), token=token, ca=ca, number=number, group=group), None)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"SGLang server {self.address.number}"

    @property
    def owned(self) -> bool:
        """Whether we started it, and may stop it."""
        return self._launch is not None

    @property
    def host(self) -> ProcessHost:
        """Where it lives, for one of ours."""
        return self._host

    @property
    def pid(self) -> int:
        """Of the launcher, which leads the session of all its processes; 0 where none runs."""
        return self._host.pid

    @property
    def lost(self) -> str:
        """Why it cannot be started again where it lives, as the end of a sentence; empty while it can."""
        return self._host.lost

    @property
    def where(self) -> str:
        """Its log, or the address of another's: what a message names."""
        if self.log is None:
            return self.address.url
        return f"{self._host.place}:{self.log}" if self._host.place else str(self.log)

    # -- start and end

    async def start(self) -> None:
        """Start the process, a new generation of ``address``.

        Another's server is not started; where it had been ready before, it counts as a new generation from here on.

        Raises:
            EngineError: ENG69 where no process can be started, ENG84 where its machine is lost.
        """
        if self._launch is None:
            if self._served:
                self.address = replace(self.address, generation=self.address.generation + 1)
            return
        await self.stop(grace=0)
        launch = self._launch
        try:
            process = await self._host.start(launch, self.address.token)
        except OSError as error:
            if lost := self.lost:
                raise EngineError(f"{self.title} {lost}", code="ENG84", where=self.where, lost=True) from None
            raise EngineError(
                f"{self.title} cannot be started: {error}",
                code="ENG69",
                where=self.where,
                fix="sglang.python names the python of an environment that has sglang",
            ) from None
        self._from = process.log_begin
        host = f"[{launch.address}]" if ":" in launch.address else launch.address
        generation = self.address.generation + 1
        self.address = replace(self.address, url=f"http://{host}:{process.port}", generation=generation)
        self._end = asyncio.create_task(self._host.ended(), name=f"slime-sglang-{self.address.number}")

    async def died(self) -> str:
        """Wait until its process ends, and say how, as the end of a sentence; for another's server, wait forever."""
        if self._end is None:
            if self._launch is None:
                await asyncio.Event().wait()
            return "was stopped"
        return await asyncio.shield(self._end)

    @property
    def running(self) -> bool:
        """Whether its process lives; always, as far as we know, for another's."""
        return self._launch is None or (self._end is not None and not self._end.done())

    async def stop(self, grace: float = GRACE) -> None:
        """End all its processes and wait until none is left; a no-op where none runs, and for another's server.

        Without ``grace`` they are killed; what they had in shared memory and temporary files is removed all the same.
        """
        end = self._end
        if end is None:
            return
        await self._host.stop(grace)
        await asyncio.wait({end}, timeout=SETTLED)
        self._end = None

    # -- readiness

    async def ready(self, timeout: float) -> None:
        """Wait until it serves, at most ``timeout`` seconds; a port that somebody took is left for another one.

        Raises:
            EngineError: ENG69 it does not answer in time, or ended; ENG71, ENG73, ENG93 as `handshake`.
        """
        deadline = time.monotonic() + timeout
        for _ in range(PORT_TRIES):
            state = await self._wait(deadline)
            if state == "ready":
                self._served = True
                return
            if state == "late":
                raise self._silent(f"did not answer in {timeout:g} s")
            await self.start()
        raise self._silent(f"found its port taken {PORT_TRIES} times")

    async def _wait(self, deadline: float) -> str:
        """``ready``; ``taken``: somebody else listens on the port; ``late``."""
        self._last = "no process listens there yet"
        where = self.where if self.owned else EXTERNAL
        while (remaining := deadline - time.monotonic()) > 0:
            if not self.running:
                if IN_USE.search(self._written()):
                    return "taken"
                raise self._silent(await self.died())
            listener = await self._listener()
            if listener == "other":
                return "taken"
            if listener == "ours":
                self._last = await self._greet(where, min(ASK, remaining))
                if not self._last:
                    return "ready"
            await asyncio.sleep(min(POLL, remaining))
        return "late"

    async def _greet(self, where: str, timeout: float) -> str:
        """Empty where it is ready, else what keeps it from that."""
        greeting = await handshake(self.address, owned=self.owned, where=where, timeout=timeout)
        self.facts = greeting.facts
        return greeting.missing

    async def _listener(self) -> Listener:
        """Who listens on the port; another's server is taken as it is."""
        if self._launch is None:
            return "ours"
        return await self._host.listener(int(self.address.url.rpartition(":")[2]))

    # -- what it says

    def _silent(self, how: str) -> EngineError:
        message = f"{self.title} at {self.address.url} {how}"
        if not self.owned:
            return EngineError(
                message,
                code="ENG69",
                where=EXTERNAL,
                why=self._last,
                fix="start it, or correct its address; rollout.rollout_start_timeout is how long a run waits",
            )
        return EngineError(
            message,
            code="ENG69",
            where=self.where,
            why=f"{self._last}; its log ends\n{self.tail()}",
            fix="the log's end says why; a large model may need a larger rollout.rollout_start_timeout",
            lost=bool(self.lost),
        )

    def _written(self) -> str:
        """The end of what this generation wrote into its log."""
        return self._redacted(log_since(self.log, self._from)) if self.log is not None else ""

    def _redacted(self, text: str) -> str:
        return text.replace(self.address.token, "***") if self.address.token else text

    def tail(self) -> str:
        """The last lines of its log but those of served requests, no token, each cut to a few hundred characters."""
        if self.log is None:
            return "its log is not ours"
        lines = [line.rstrip() for line in self._written().splitlines() if line.strip() and not ACCESS.search(line)]
        cut = [line if len(line) <= TAIL_WIDTH else f"{line[:TAIL_WIDTH]} ..." for line in lines[-TAIL_LINES:]]
        return "\n".join(cut) or "its log is empty"
