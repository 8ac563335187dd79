"""Messages between the server and its workers: one line of JSON each, with a cap."""

from __future__ import annotations

import asyncio
import json
from typing import Any

MAX_LINE = 8 << 20  # bytes


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Write one message."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None where the other end is gone.

    Raises:
        ValueError: a line that is no message.
    """
    try:
        line = await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError as error:
        raise ValueError("a message is too long") from error
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    return message
