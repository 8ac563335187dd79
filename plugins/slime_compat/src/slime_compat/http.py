"""The HTTP client behind `slime.utils.http_utils`: JSON out, JSON in, over httpx as slime's own."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import httpx

RETRY_SECONDS = 1.0
FINAL = {400, 401, 403, 404, 405, 410, 413, 422}
"""Statuses that another try would get again; 408, 409 and 429, for instance, pass."""


class HttpStatusError(RuntimeError):
    """The other side answered with an error status."""

    def __init__(self, url: str, status: int, body: str, *, final: bool = False) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status, self.body, self.final = status, body, final


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
    longest_wait: float = 0.0,
) -> Any:
    """POST ``payload`` as JSON and return the parsed answer (its text where it is no JSON).

    Args:
        url: an http address.
        payload: of JSON.
        max_retries: further tries.
        headers: added to the request's.
        timeout: seconds that a try may wait for the other side; None waits for ever.
        longest_wait: seconds between two tries, up to which they grow: twice as many after each.

    Raises:
        HttpStatusError: an error status, after ``max_retries`` further tries unless it is one of ``FINAL`` or the
            server says ``x-should-retry: false``.
        OSError: no connection, or no answer in time, after them.
    """
    return await _retried("POST", url, json.dumps(payload).encode(), max_retries, headers or {}, timeout, longest_wait)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """GET and return the parsed answer; raises as :func:`post`."""
    return await _retried("GET", url, b"", max_retries, headers or {}, None, 0.0)


async def _retried(
    method: str,
    url: str,
    body: bytes,
    retries: int,
    headers: Mapping[str, str],
    timeout: float | None,
    longest_wait: float,
) -> Any:
    lines = {"accept": "application/json", **({"content-type": "application/json"} if body else {})}
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, headers={**lines, **headers}) as client:
        for attempt in range(retries + 1):
            try:
                response = await client.request(method, url, content=body)
                if response.status_code < 400:
                    return _parsed(response)
                final = response.status_code in FINAL or response.headers.get("x-should-retry") == "false"
                raise HttpStatusError(url, response.status_code, response.text, final=final)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise ValueError(f"'{url}' is not an http address") from error
            except (HttpStatusError, httpx.TransportError) as error:
                if attempt == retries and isinstance(error, httpx.TransportError):
                    raise ConnectionError(f"{url}: {str(error) or type(error).__name__}") from error
                if attempt == retries or (isinstance(error, HttpStatusError) and error.final):
                    raise
                await asyncio.sleep(wait_before_retry(attempt, longest_wait))
    raise AssertionError("unreachable")


def wait_before_retry(attempt: int, longest_wait: float) -> float:
    """Seconds after the try number ``attempt``: doubled with each up to ``longest_wait``, and up to half more.

    Without ``longest_wait`` always the same.
    """
    if longest_wait <= RETRY_SECONDS:
        return RETRY_SECONDS
    return min(RETRY_SECONDS * 2.0**attempt, longest_wait) * random.uniform(1.0, 1.5)


def _parsed(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
