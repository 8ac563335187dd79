"""One JSON question to an HTTP server by a deadline; asked again where that helps."""

from __future__ import annotations

import asyncio
import json
from typing import Any

LARGEST = 1 << 20  # bytes of an answer that are read
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0  # seconds before another try; doubled each time
AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))


class Unanswered(Exception):
    """There is no answer that could be used; says why."""


async def post_json(url: str, payload: Any, *, token: str, seconds: float, retries: int) -> Any:
    """What the server answers, as JSON.

    Tried again: no connection, one that broke, HTTP 408 425 429 500 502 503 504. Not tried again: any other status, an
    answer that is no JSON, or longer than 1 MiB. ``seconds`` holds for all tries together.

    Raises:
        Unanswered: no usable answer.
    """
    reason = "it was not asked"
    try:
        async with asyncio.timeout(seconds):
            for attempt in range(retries + 1):
                try:
                    return await _once(url, payload, token)
                except _Again as error:
                    reason = str(error)
                if attempt < retries:
                    await asyncio.sleep(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT))
    except TimeoutError:
        before = "" if reason == "it was not asked" else f"; before that: {reason}"
        raise Unanswered(f"no answer in {seconds:g} s{before}") from None
    raise Unanswered(f"{reason} ({retries + 1} tries)")


class _Again(Exception):
    """Another try may help."""


async def _once(url: str, payload: Any, token: str) -> Any:
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = b""
    try:
        async with (  # the caller's deadline holds
            httpx.AsyncClient(timeout=None, headers=headers, trust_env=False) as client,
            client.stream("POST", url, json=payload) as answer,
        ):
            if answer.status_code in AGAIN:
                raise _Again(f"HTTP {answer.status_code}")
            if answer.status_code != 200:
                raise Unanswered(f"HTTP {answer.status_code}")
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > LARGEST:
                    break
    except (httpx.RequestError, OSError) as error:
        raise _Again(f"{type(error).__name__}: {error}") from error
    if len(body) > LARGEST:
        raise Unanswered(f"an answer of more than {LARGEST} bytes")
    try:
        return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise Unanswered(f"an answer that is not JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which each name stands once: which of two would be meant, nobody can say."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name appears twice in an object")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
