"""One session of OpenEnv's protocol: a WebSocket at URL/ws, behind which an environment of its own lives.

{"type": "reset", "data": {"seed": 7}}       ->  {"type": "observation", "data": {"observation": {...},
{"type": "step", "data": {"message": "hi"}}  ->                           "reward": 0.5, "done": false}}
{"type": "mcp", "data": JSON-RPC request}    ->  {"type": "mcp", "data": JSON-RPC response}
{"type": "close"}                            ->  the server ends the environment, then the connection
                                                 {"type": "error", "data": {"code": ..., "message": ...}}
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

LONGEST = 300
"""Characters of a message that an error shows."""
LARGEST = sys.float_info.max
FULL = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"


class EnvFault(Exception):
    """The environment, its server or the way there failed: an infrastructure error, never the model's."""


class Full(EnvFault):
    """The server has all the sessions that it allows: ``limit``, 0 where it does not say."""

    def __init__(self, text: str, limit: int) -> None:
        super().__init__(text)
        self.limit = limit


class InvalidAction(Exception):
    """The environment, or the reading of an answer, refuses an action; the text is for the model."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    """What follows a reset or a step. ``reward`` is None where the environment gives none."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class EnvSession:
    """An open session. Methods raise `EnvFault` where the environment fails; then it can only be closed."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._receive_next()

    async def reset(self, arguments: dict[str, Any], seconds: float) -> Result:
        """Begin an episode."""
        try:
            return _result(await self._ask("reset", arguments, "observation", seconds))
        except InvalidAction as error:
            raise EnvFault(f"it refuses the reset's arguments: {error}") from None

    async def step(self, action: dict[str, Any], seconds: float) -> Result:
        """Act.

        Raises:
            InvalidAction: the action does not have the environment's schema; nothing has happened in it.
        """
        return _result(await self._ask("step", action, "observation", seconds))

    async def tools(self, seconds: float) -> list[dict[str, Any]]:
        """The MCP tools of the environment, as chat templates want them."""
        answer: Any = None
        try:
            answer = await self._ask("mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1}, "mcp", seconds)
            return [_tool(tool) for tool in answer["result"]["tools"]]
        except (KeyError, TypeError, AttributeError, InvalidAction) as error:
            raise EnvFault(
                f"it has no list of tools: {_short(json.dumps(answer) if answer else str(error))}"
            ) from None

    async def close(self) -> None:
        """Ask for the session's end and wait for it, a moment at most: until then it takes a place on the server."""
        try:
            if not self._socket.closed:
                with suppress(TimeoutError, OSError, aiohttp.ClientError):
                    async with asyncio.timeout(2.0):
                        await self._socket.send_str('{"type": "close"}')
                        await asyncio.shield(self._next)
        finally:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            await self._socket.close()

    def _receive_next(self) -> None:
        """Receive while the model thinks, too: a server's pings are answered only by whoever receives."""
        self._next = asyncio.get_running_loop().create_task(self._socket.receive())

    async def _ask(self, kind: str, data: dict[str, Any], answer_type: str, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                with suppress(aiohttp.ClientConnectionError):  # the server may have said why before it closed
                    await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await asyncio.shield(self._next)
        except TimeoutError:
            raise EnvFault(f"it did not answer a {kind} in {seconds:g} s") from None
        except (OSError, aiohttp.ClientError) as error:
            raise EnvFault(f"the connection broke: {type(error).__name__} {error}") from error
        self._receive_next()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvFault(_end(message, self._socket))
        try:
            answer = json.loads(message.data)
            data, kind = answer["data"], answer["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise EnvFault(f"its answer is none of the protocol: {_short(message.data)}") from None
        if kind == "error" and isinstance(data, dict):
            raise _error(data)
        if kind != answer_type or not isinstance(data, dict):
            raise EnvFault(f"its answer is none of the protocol: {_short(message.data)}")
        return data


def _result(data: dict[str, Any]) -> Result:
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise EnvFault(f"its answer has no observation, or no done: {_short(json.dumps(data))}")
    if reward is not None and not (isinstance(reward, (int, float)) and abs(reward) <= LARGEST):
        raise EnvFault(f"its reward is not a number: {_short(json.dumps(reward))}")
    return Result(observation=observation, reward=None if reward is None else float(reward), done=done)


def _error(data: dict[str, Any]) -> Exception:
    code, text = data.get("code"), _short(str(data.get("message")))
    if code == FULL:
        limit = data.get("max_sessions")
        return Full(text, limit if isinstance(limit, int) else 0)
    if code == INVALID:
        errors = data.get("errors")
        details = [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
        words = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in details]
        return InvalidAction("; ".join(words) or text)
    return EnvFault(f"{code}: {text}")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _end(message: aiohttp.WSMessage, socket: aiohttp.ClientWebSocketResponse) -> str:
    if socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
        return "its message is longer than max_message_bytes"
    if message.type is aiohttp.WSMsgType.BINARY:
        return "its answer is none of the protocol: bytes"
    return f"it closed the connection (code {socket.close_code})"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
