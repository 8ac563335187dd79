"""The HTTP client behind `slime.utils.http_utils`: JSON out, JSON in, standard library only."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

RETRY_SECONDS = 1.0
LIMIT = 64 << 20


class HttpStatusError(RuntimeError):
    """The other side answered with an error status; 4xx are not tried again."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status, self.body = status, body


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """POST ``payload`` as JSON and return the parsed answer (its text where it is no JSON).

    Raises:
        HttpStatusError: an error status, after ``max_retries`` further tries where it is 5xx.
        OSError: no connection after them.
    """
    return await _retried("POST", url, json.dumps(payload).encode(), max_retries, headers or {})


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """GET and return the parsed answer.

    Raises:
        HttpStatusError: an error status, after ``max_retries`` further tries where it is 5xx.
        OSError: no connection after them.
    """
    return await _retried("GET", url, b"", max_retries, headers or {})


async def _retried(method: str, url: str, body: bytes, retries: int, headers: Mapping[str, str]) -> Any:
    for attempt in range(retries + 1):
        try:
            status, answer = await _once(method, url, body, headers)
            if status < 400:
                with suppress(ValueError):
                    return json.loads(answer)
                return answer.decode(errors="replace")
            raise HttpStatusError(url, status, answer.decode(errors="replace"))
        except (HttpStatusError, OSError, asyncio.IncompleteReadError) as error:
            if attempt == retries or (isinstance(error, HttpStatusError) and error.status < 500):
                raise
            await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError("unreachable")


async def _once(method: str, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"'{url}' is no http address")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=LIMIT)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {"host": parts.netloc.rpartition("@")[2], "connection": "close", "accept": "application/json"}
        lines |= {"content-type": "application/json", "content-length": str(len(body))} if body else {}
        lines |= {name.lower(): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await writer.drain()
        return await _read(reader)
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ")[1])
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:]) if k}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return status, body
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    return status, await reader.read()
