"""The servers of an environment, those that run elsewhere and those that slime starts, and their sessions.

    open_session -> a server with room -> (started and healthy) -> connection -> EnvSession -> closed, place given back

A session is a connection, and the environment behind it belongs to one episode. A server has ``sessions`` of them at
most, or fewer where it says so; an episode waits for a place. A server that failed last is asked last.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import aiohttp

from slime_core import PluginError
from slime_openenv.options import PORT, Options
from slime_openenv.session import EnvFault, EnvSession, Full

LOOPBACK = "127.0.0.1"
POLL = 0.1
"""Seconds between two looks at a server that starts, or has no room."""
STOPPING = 15.0
"""Seconds in which a launcher must have ended its server."""
HUNG = 16
"""Faults in a row after which a server of ours is started again."""
TAIL = 2000
"""Bytes of a log that an error shows."""


class EnvServer:
    """One server at ``url``."""

    def __init__(self, url: str, limit: int) -> None:
        self.url, self.limit = url, limit
        self.active = 0  # sessions
        self.faults = 0  # in a row

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until it can be asked."""

    async def stop(self) -> None:
        """End it."""


class LocalServer(EnvServer):
    """One that slime starts, and starts again where it has ended."""

    def __init__(self, number: int, options: Options, log: Path | None) -> None:
        super().__init__("", options.sessions)
        self._name, self._options, self._log = f"server {number}", options, log
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._begin = 0  # of the present process's words in the log
        self._was_ready = False
        self._lock = asyncio.Lock()

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Start it where it does not run, and wait until it answers.

        Raises:
            PluginError: PLG70 it has never answered. EnvFault: it has, but does not any more.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is None and self.faults < HUNG:
                return
            await self.stop()
            self.faults = 0
            try:
                self._start()
                async with asyncio.timeout(self._options.start_timeout):
                    while not await self._healthy(http):
                        await asyncio.sleep(POLL)
            except TimeoutError:
                await self._give_up(f"it did not answer in {self._options.start_timeout:g} s")
            except OSError as error:
                await self._give_up(str(error))
            except asyncio.CancelledError:  # whoever waits for the lock would take it for ready
                await self.stop()
                raise
            self._was_ready = True

    async def stop(self) -> None:
        """End it and what it has started."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.to_thread(_wait, process)
        if self._output is not None:
            self._output.close()
            self._output = None

    def _start(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://{LOOPBACK}:{port}"
        words = [word.replace(PORT, str(port)) for word in self._options.command]
        if self._options.command_env:
            words = ["env", *(f"{name}={value}" for name, value in self._options.command_env.items()), *words]
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        self._output = self._log.open("a+b") if self._log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = self._output.seek(0, os.SEEK_END)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slime_openenv.launcher", *words],
            stdin=subprocess.PIPE,  # open as long as we live: the launcher ends with us
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=self._options.command_dir or None,
            start_new_session=True,
        )

    async def _healthy(self, http: aiohttp.ClientSession) -> bool:
        if self._process is not None and self._process.poll() is not None:
            await self._give_up("it has ended")
        try:
            async with http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _give_up(self, why: str) -> None:
        output = self._tail()
        await self.stop()
        if self._was_ready:
            raise EnvFault(f"{why}; its log ends: {output}")
        raise PluginError(
            f"the OpenEnv {self._name} does not start: {why}",
            code="PLG70",
            where="plugin.openenv.command",
            why=f"{' '.join(self._options.command)} says: {output or 'nothing'}",
            fix="run the command by hand, or raise plugin.openenv.start_timeout"
            + (f"; the whole log is {self._log}" if self._log is not None else ""),
        )

    def _tail(self) -> str:
        if self._output is None:
            return ""
        end = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(self._begin, end - TAIL))
        return self._output.read().decode(errors="replace").strip()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class EnvServers:
    """All servers of an environment.

    Example:
        servers = EnvServers(options, run_dir)
        async with servers.open_session(set()) as (server, session):
            result = await session.reset({"seed": 7}, 60.0)
    """

    def __init__(self, options: Options, run_dir: Path | None, name: str = "openenv") -> None:
        self.options = options
        log = run_dir / "log" if run_dir is not None else None
        self._servers = [EnvServer(url, options.sessions) for url in options.url] or [
            LocalServer(number, options, log / f"{name}-{number}.log" if log is not None else None)
            for number in range(options.servers if options.command else 0)
        ]
        self._client: aiohttp.ClientSession | None = None
        self._room, self._once = asyncio.Condition(), asyncio.Lock()
        self._schema: dict[str, Any] | None = None
        self._tools: list[dict[str, Any]] | None = None

    @asynccontextmanager
    async def open_session(self, failed: set[EnvServer]) -> AsyncIterator[tuple[EnvServer, EnvSession]]:
        """A session of a server, which ends with the block; of one in ``failed`` only where all are.

        A server that fails is added there.

        Raises:
            EnvFault: no connection. PluginError: PLG70 a server of ours has never answered.
        """
        server = await self._reserve(failed)
        try:
            session = await self._connect(server)
            try:
                yield server, session
            finally:
                await session.close()
        except EnvFault as error:
            error.args = (f"{server.url}: {error}",)
            if isinstance(error, Full):
                server.limit = max(1, min(server.limit, error.limit or server.limit))
            else:
                server.faults += 1
                failed.add(server)
            raise
        finally:
            async with self._room:
                server.active -= 1
                self._room.notify_all()

    async def schema(self, server: EnvServer) -> dict[str, Any]:
        """The JSON schema of an action; empty where the server has none."""
        async with self._once:
            if self._schema is None:
                answer = await self._get(f"{server.url}/schema")
                action = answer.get("action") if isinstance(answer, dict) else None
                self._schema = action if isinstance(action, dict) else {}
            return self._schema

    async def tools(self, session: EnvSession) -> list[dict[str, Any]]:
        """The environment's tools."""
        async with self._once:
            if self._tools is None:
                self._tools = await session.tools(self.options.step_timeout)
            return self._tools

    async def aclose(self) -> None:
        """End the servers that were started here, and close all connections."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        if self._client is not None:
            await self._client.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            token = os.environ.get(self.options.token_env, "")
            headers = {"authorization": f"Bearer {token}"} if token else {}
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        return self._client

    async def _reserve(self, failed: Collection[EnvServer]) -> EnvServer:
        choice = [server for server in self._servers if server not in failed] or self._servers
        if not choice:
            raise EnvFault("neither plugin.openenv.url nor plugin.openenv.command is set")

        def free() -> list[EnvServer]:
            return [server for server in choice if server.active < server.limit]

        async with self._room:
            await self._room.wait_for(free)
            server = min(free(), key=lambda one: (one.faults, one.active / one.limit))
            server.active += 1
            return server

    async def _connect(self, server: EnvServer) -> EnvSession:
        await server.ready(self._http)
        timeout = aiohttp.ClientWSTimeout(ws_close=1.0)  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(self.options.reset_timeout):
                connection = await self._http.ws_connect(
                    f"{server.url}/ws", max_msg_size=self.options.max_message_bytes, timeout=timeout
                )
        except TimeoutError:
            raise EnvFault(f"no connection in {self.options.reset_timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvFault(f"no connection: {type(error).__name__} {error}") from error
        return EnvSession(connection)

    async def _get(self, url: str) -> Any:
        with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with self._http.get(
                url, timeout=aiohttp.ClientTimeout(total=self.options.reset_timeout)
            ) as response:
                if response.status == 200:
                    return await response.json()
                return {} if response.status == 404 else None
        raise EnvFault("its schema cannot be read")
