"""The HTTP client behind `slime.utils.http_utils`: JSON out, JSON in, over httpx as slime's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

RETRY_SECONDS = 1.0


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
    """GET and return the parsed answer; raises as :func:`post`."""
    return await _retried("GET", url, b"", max_retries, headers or {})


async def _retried(method: str, url: str, body: bytes, retries: int, headers: Mapping[str, str]) -> Any:
    lines = {"accept": "application/json", **({"content-type": "application/json"} if body else {})}
    async with httpx.AsyncClient(timeout=None, trust_env=False, headers={**lines, **headers}) as client:
        for attempt in range(retries + 1):
            try:
                response = await client.request(method, url, content=body)
                if response.status_code < 400:
                    return _parsed(response)
                raise HttpStatusError(url, response.status_code, response.text)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise ValueError(f"'{url}' is not an http address") from error
            except (HttpStatusError, httpx.TransportError) as error:
                if attempt == retries and isinstance(error, httpx.TransportError):
                    raise ConnectionError(f"{url}: {error or type(error).__name__}") from error
                if attempt == retries or (isinstance(error, HttpStatusError) and error.status < 500):
                    raise
                await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError("unreachable")


def _parsed(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
