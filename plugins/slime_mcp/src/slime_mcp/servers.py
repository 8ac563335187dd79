"""The MCP servers of a run: started, listed, called, restarted and closed in an event loop on a thread of their own.

    hook (the run's loop) -- call --> McpServers (own loop) -- Connection, a task each -- stdio, or streamable HTTP

A server that dies, hangs or breaks the protocol is replaced, and the call that it lost is made once more, in a process
(or session) of that call's own, so that a call that ends its server takes nobody else's along. What happens there is
the call's own doing, and the model reads it. A server of a single sample has state that is lost with it, so the sample
is given up.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, ImageContent, TextContent
from referencing import Registry
from referencing.exceptions import Unresolvable

from slime_core.errors import ConfigError, PluginError, shortened, text_of
from slime_mcp.options import McpServer, Options, expanded

T = TypeVar("T")
RETRIES = 4  # calls of a server at once that run in a process of their own
ANSWERS = 5.0  # seconds in which a server that works lists its tools
NESTED = 100  # levels of arguments; JSON that is nested deeper than 200 breaks both sides of a session


class ServerLost(Exception):
    """The server's fault: it could not be reached, has died, hangs, or broke the protocol."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolResult:
    """What the model reads of a call; ``error`` says what kind of failure it is, if it is one."""

    text: str
    error: str = ""
    parts: tuple[dict[str, Any], ...] = ()  # of a result with pictures, for a model that sees them


class Tool:
    """A tool of a server, with the validator of its arguments."""

    def __init__(self, server: McpServer, name: str, description: str, schema: Mapping[str, Any]) -> None:
        self.server, self.name = server, name
        self.definition: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": dict(schema)},
        }
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        self._validator = kind(schema, registry=Registry())  # which fetches nothing

    def problem(self, arguments: Any) -> str:
        """What is wrong with a call's arguments; empty where they fit."""
        if _deeper(arguments, NESTED):
            return f"the arguments are nested deeper than {NESTED} levels"
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            return f"the arguments cannot be sent as JSON: {error}"
        if not isinstance(arguments, dict):
            return "the arguments are not a JSON object"
        try:
            mismatch = best_match(self._validator.iter_errors(arguments))
        except (Unresolvable, RecursionError):  # a schema that is elsewhere, or has no end: the server judges
            return ""
        if mismatch is None:
            return ""
        return f"{mismatch.json_path.replace('$', 'arguments', 1)}: {shortened(mismatch.message, 300)}"


class Connection:
    """A session with a server, owned by one task: what it enters, it leaves."""

    def __init__(self, server: McpServer, options: Options, log: Path | None) -> None:
        self.server, self.lost = server, False
        self._options, self._log = options, log
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve())

    async def client(self) -> Client:
        """The session, as soon as it is there.

        Raises:
            ServerLost: it does not come about.
        """
        try:
            async with asyncio.timeout(self._options.start_timeout):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            self.close()
            raise ServerLost(f"did not start in {self._options.start_timeout:g} s") from None
        except Exception as error:
            self.close()
            raise ServerLost(f"did not start: {_cause(error)}") from error

    async def tools(self) -> list[Any]:
        """All tools that the server lists.

        Raises:
            ServerLost: it does not.
        """
        client, tools, cursor = await self.client(), [], None
        try:
            async with asyncio.timeout(self._options.start_timeout):
                while True:
                    page = await client.list_tools(cursor=cursor, cache_mode="bypass")
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        return tools
        except Exception as error:
            self.close()
            raise ServerLost(f"does not list its tools: {_cause(error)}") from error

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool.

        Raises:
            ServerLost: the server's fault; the connection is closed.
        """
        client, seconds = await self.client(), self._options.call_timeout
        try:
            async with asyncio.timeout(seconds):
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            if await self._answers(client):
                return ToolResult(text=f"Error: {tool} did not answer in {seconds:g} s.", error="timeout")
            reason = f"does not answer: no result of {tool} in {seconds:g} s, and no list of tools after that"
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                text = shortened(error.error.message, self._options.result_chars)
                return ToolResult(text=f"Error: {text}", error="failed")
            reason = f"ended during a call of {tool}"
        except Exception as error:  # the SDK raises what it cannot read, and the transport's errors, as they are
            reason = f"failed during a call of {tool}: {_cause(error)}"
        else:
            text, most = text_of_result(result), self._options.result_chars
            kind = "failed" if result.is_error else ""
            return ToolResult(text=shortened(text, most), error=kind, parts=parts_of_result(result, most))
        self.close()
        raise ServerLost(reason)

    def close(self) -> None:
        """End the session, and the server's process, in its own time."""
        self.lost = True
        self._closing.set()
        if not self._ready.done():
            self.task.cancel()

    async def _answers(self, client: Client) -> bool:
        with suppress(Exception):
            async with asyncio.timeout(min(ANSWERS, self._options.call_timeout)):
                await client.list_tools(cache_mode="bypass")
                return True
        return False

    async def _serve(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._new_client(stack))
                self._ready.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self._ready.done():
                return  # what a dead server makes of its own end
            self._ready.set_exception(
                ConnectionError("cancelled") if isinstance(error, asyncio.CancelledError) else error
            )
            self._ready.exception()  # read, if nobody waits for it any longer

    def _new_client(self, stack: AsyncExitStack) -> Client:
        server = self.server
        if server.url:
            import httpx2

            timeout = httpx2.Timeout(30.0, read=None)
            http = httpx2.AsyncClient(headers=expanded(server.headers), timeout=timeout)
            stack.push_async_callback(http.aclose)
            return Client(streamable_http_client(server.url, http_client=http, max_sse_event_size=None))
        command, *arguments = server.command
        parameters = StdioServerParameters(command=command, args=arguments, env=expanded(server.env))
        log = self._log or Path("/dev/null")
        log.parent.mkdir(parents=True, exist_ok=True)
        return Client(stdio_client(parameters, errlog=stack.enter_context(log.open("a"))))


class McpServers:
    """The servers of a run's options; ``log`` is the folder of what they write to stderr."""

    def __init__(self, options: Options, log: Path | None) -> None:
        self._options, self._log = options, log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._shared: dict[str, asyncio.Task[Connection]] = {}  # by server
        self._of_sample: dict[str, dict[str, Connection]] = {}  # by sample and server
        self._waiting: dict[str, asyncio.Task[bool]] = {}  # by sample: for its place among those with own servers
        self._places = asyncio.Semaphore(options.sample_servers)
        self._retries = asyncio.Semaphore(RETRIES)
        self._listing: Future[dict[str, Tool]] = self._run(self._list())
        atexit.register(self.close)

    def tools(self) -> dict[str, Tool]:
        """Every tool by name, in the order of servers; the first call waits until all servers have started.

        Raises:
            PluginError: PLG56, a server that does not start or lists something that is no tool.
            ConfigError: CFG07, a name that two servers have; CFG04, nothing is left by ``allow`` and ``deny``.
        """
        return self._listing.result()

    async def tools_async(self) -> dict[str, Tool]:
        """:meth:`tools`, without blocking the caller's loop."""
        return await asyncio.wrap_future(self._listing)

    async def call(self, sample: str, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool for a sample.

        Raises:
            ServerLost: the server's fault.
        """
        return await asyncio.wrap_future(self._run(self._call(sample, tool, arguments)))

    async def release(self, sample: str) -> None:
        """End the servers of a sample's own."""
        if any(server.per == "sample" for server in self._options.servers):
            await asyncio.wrap_future(self._run(self._release(sample)))

    def close(self) -> None:
        """End all servers and the thread."""
        if self._thread.is_alive():
            atexit.unregister(self.close)
            self._run(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _list(self) -> dict[str, Tool]:
        listed = await asyncio.gather(*map(self._listed, self._options.servers))
        tools: dict[str, Tool] = {}
        for tool in (tool for some in listed for tool in some):
            if tool.name in tools:
                first, second = tools[tool.name].server.name, tool.server.name
                raise ConfigError(
                    f"servers '{first}' and '{second}' both have a tool '{tool.name}'",
                    code="CFG07",
                    where="plugin.mcp.servers",
                    why="the model calls a tool by its name alone",
                    fix=f'deny it in one of them: {{name = "{second}", deny = ["{tool.name}"], ...}}',
                )
            tools[tool.name] = tool
        return tools

    async def _listed(self, server: McpServer) -> list[Tool]:
        where = f"plugin.mcp.servers: '{server.name}'"
        try:
            connection = await self._connection(server)
            listed = await connection.tools()
        except ServerLost as error:
            started = " ".join(server.command) or server.url
            log = f"; its stderr is in {self._file(server)}" if self._log and server.command else ""
            raise PluginError(
                f"the MCP server '{server.name}' {error}",
                code="PLG56",
                where=where,
                why=started + log,
                fix="start it by hand, and look at its own error"
                if server.command
                else "start the server, and check its address",
            ) from error
        tools = []
        for tool in listed:
            if not server.offers(tool.name):
                continue
            try:
                tools.append(Tool(server, tool.name, tool.description or "", tool.input_schema))
            except jsonschema.SchemaError as error:
                raise PluginError(
                    f"the tool '{tool.name}' has an invalid schema: {error.message}",
                    code="PLG56",
                    where=where,
                    fix=f'fix the server, or leave the tool out: deny = ["{tool.name}"]',
                ) from error
        if not tools:
            raise ConfigError(
                f"the MCP server '{server.name}' offers no tool",
                code="CFG04",
                where=where,
                why=f"it has {', '.join(tool.name for tool in listed) or 'none'}",
                fix="change allow and deny, or leave the server out",
            )
        return tools

    async def _call(self, sample: str, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        server = tool.server
        if server.per == "sample":
            return await (await self._connection_of_sample(sample, server)).call(tool.name, arguments)
        connection = await self._connection(server)
        try:
            return await connection.call(tool.name, arguments)
        except ServerLost:
            async with self._retries:
                return await self._again(tool, arguments)

    async def _again(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        connection = self._new(tool.server)
        try:
            await connection.client()
            try:
                return await connection.call(tool.name, arguments)
            except ServerLost as error:
                return ToolResult(text=f"Error: the server of {tool.name} {error}.", error="crash")
        finally:
            connection.close()

    async def _connection(self, server: McpServer) -> Connection:
        """The server's shared connection, another one if it was lost."""
        task = self._shared.get(server.name)
        if task is None or (task.done() and (task.exception() or task.result().lost)):
            task = self._shared[server.name] = asyncio.create_task(self._opened(server))
        return await asyncio.shield(task)

    async def _opened(self, server: McpServer) -> Connection:
        connection = self._new(server)
        await connection.client()
        return connection

    async def _connection_of_sample(self, sample: str, server: McpServer) -> Connection:
        if sample not in self._waiting:
            self._waiting[sample] = asyncio.create_task(self._places.acquire())
        await self._waiting[sample]
        connections = self._of_sample.setdefault(sample, {})
        if server.name not in connections:
            connections[server.name] = self._new(server)
        connection = connections[server.name]
        if connection.lost:
            raise ServerLost("has ended, and its state with it")
        return connection

    def _new(self, server: McpServer) -> Connection:
        return Connection(server, self._options, self._file(server))

    def _file(self, server: McpServer) -> Path | None:
        return self._log / f"mcp-{server.name}.log" if self._log else None

    async def _release(self, sample: str) -> None:
        for connection in self._of_sample.pop(sample, {}).values():
            connection.close()
        place = self._waiting.pop(sample, None)
        if place is not None and not place.cancel() and not place.cancelled():
            self._places.release()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in self._shared.values():
            if task.done() and not task.exception():
                task.result().close()
        for connections in self._of_sample.values():
            for connection in connections.values():
                connection.close()
        _, late = await asyncio.wait(tasks, timeout=10) if tasks else ((), ())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than ``levels``."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(items) and (levels == 0 or any(_deeper(item, levels - 1) for item in items))


def text_of_result(result: CallToolResult) -> str:
    """A result as the model reads it: its texts; media are named with their type and size."""
    parts = []
    for part in result.content:
        if isinstance(part, TextContent):
            parts.append(part.text)
        else:
            parts.append(_named(part.model_dump(mode="json", by_alias=True, exclude_none=True)))
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def parts_of_result(result: CallToolResult, most: int) -> tuple[dict[str, Any], ...]:
    """A result's texts, of ``most`` characters each, and pictures, as parts of a message; none without pictures."""
    parts: list[dict[str, Any]] = []
    for part in result.content:
        if isinstance(part, ImageContent):
            parts.append({"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"})
        else:
            text = text_of_result(result.model_copy(update={"content": [part]}))
            parts.append({"type": "text", "text": shortened(text, most)})
    return tuple(parts) if any(part["type"] == "image" for part in parts) else ()


def _named(part: Mapping[str, Any]) -> str:
    resource = part.get("resource", {})
    if "text" in resource:
        return str(resource["text"])
    data = part.get("data") or resource.get("blob") or ""
    kind, uri = part.get("mimeType") or resource.get("mimeType") or "", part.get("uri") or resource.get("uri") or ""
    size = f"{len(data) * 3 // 4} bytes, not shown" if data else ""
    return f"[{', '.join(filter(None, (str(part['type']), str(uri), str(kind), size)))}]"


def _cause(error: BaseException) -> str:
    """The first error inside of a group's, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return text_of(error, 500)
