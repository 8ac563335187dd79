"""HTTP over aiohttp: one try has a whole answer or a named fault, which says when asking again is safe.

    Transport.ask (one try, deadline, size cap) -> Reply -> checked (status) -> decoded (JSON)

Nothing here knows what is asked. No environment variable is read (proxies, .netrc), and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError

try:
    import orjson
except ImportError:  # slower, the same answers
    orjson = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import aiohttp

SHOWN = 200
"""Bytes of an answer that a message quotes."""
CAP = 64 << 20
"""Bytes of an answer, where nothing else is said."""
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 4.0
"""A connection that idled longer is not used again: SGLang's server closes them after 5 s."""
BUSY = frozenset({429, 503})
FAILED = frozenset({500, 502, 504})


BROKEN = frozenset({"ENG69", "ENG77"})
"""Faults of a connection, not answers: the other end may be dying."""


class ServerFault(EngineError):
    """The server failed, not the request: another server, or this one later, may serve the same request."""

    again = False  # the same server may be asked at once
    running = False  # it may still be at work on the request
    wait = 0.0  # seconds for which it asked
    server: tuple[int, int] | None = None  # number and generation, where it came through a router that names one


def fault(
    what: str,
    code: str,
    where: str,
    *,
    why: str = "",
    fix: str = "",
    again: bool = False,
    running: bool = False,
    wait: float = 0.0,
) -> ServerFault:
    """A ServerFault and what is known of asking again."""
    error = ServerFault(what, code=code, where=where, why=why, fix=fix)
    error.again, error.running, error.wait = again, running, wait
    return error


@dataclass(slots=True, frozen=True)
class Reply:
    """A whole answer."""

    where: str  # METHOD URL, for messages
    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """One service's base URL and the connections to it, made when they are first needed.

    ``ca`` is a PEM file of authorities, for https; empty: those that Python trusts by itself.

    Example:
        http = Transport("http://127.0.0.1:30000", token=token)
        reply = await http.ask("GET", "/model_info", end=time.monotonic() + 10)
        await http.close()
    """

    def __init__(self, url: str, *, token: str = "", ca: str = "") -> None:
        self.url = url.rstrip("/")
        self._token, self._ca = token, ca
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether their connections are kept
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        end: float,
        cap: int = CAP,
        headers: Mapping[str, str] | None = None,
        reuse: bool = True,
    ) -> Reply:
        """One try: send and read the whole answer before ``end`` (time.monotonic()), whatever its status.

        A kept connection may have been closed by the server, unread so far: after an error of its own, say, while this
        process was busy. What cannot be sent twice says ``kept=False`` and gets a connection of its own.

        Raises:
            ServerFault: ENG69 no connection, ENG76 ``end`` is past, ENG77 the connection broke, ENG91 more than
                ``cap`` bytes.
            EngineError: ENG93 a certificate that is not trusted.
        """
        where = f"{method} {self.url}{path}"
        session = self._sessions.get(reuse) or self._open(reuse)
        with _named(where):
            async with asyncio.timeout(_remaining(end)):
                async with session.request(
                    method, self.url + path, data=body, headers=headers, allow_redirects=False
                ) as response:
                    _fits(response.content_length or 0, cap, response, where)
                    parts, size = [], 0
                    async for part in response.content.iter_any():
                        parts.append(part)
                        size += len(part)
                        _fits(size, cap, response, where)
                    whole = parts[0] if len(parts) == 1 else b"".join(parts)
                    return Reply(where, response.status, response.headers, whole)

    async def events(
        self, path: str, body: bytes, *, end: float, cap: int = CAP, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """POST and yield the data of each server-sent event, ``cap`` bytes at most.

        Raises:
            ServerFault, EngineError: as `ask`, and as `checked` for another status than 200; ENG71 where what comes
                are no events.
        """
        where = f"POST {self.url}{path}"
        session = self._sessions.get(True) or self._open(True)
        with _named(where):
            async with asyncio.timeout(_remaining(end)):
                response = await session.post(self.url + path, data=body, headers=headers, allow_redirects=False)
        try:
            if response.status != 200:
                with _named(where):
                    async with asyncio.timeout(_remaining(end)):
                        data = await response.content.read(CAP)
                checked(Reply(where, response.status, response.headers, data))
            rest = b""
            while True:
                with _named(where):
                    async with asyncio.timeout(_remaining(end)):
                        part = await response.content.readany()
                if not part:
                    break
                *lines, rest = (rest + part).split(b"\n")
                _fits(len(rest), cap, response, where)
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
                    elif line.strip():
                        raise stranger(where, line)
            if rest.strip():
                raise stranger(where, rest)
        finally:
            response.close()

    async def close(self) -> None:
        """Close every connection, for good: a call that is made later, or again, fails with ENG84."""
        self._closed = True
        while self._sessions:
            await self._sessions.popitem()[1].close()

    def _open(self, reuse: bool) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise fault("the connections to this server were closed", "ENG84", self.url)
        tls: ssl.SSLContext | bool = True
        if self._ca:
            try:
                tls = ssl.create_default_context(cafile=self._ca)
            except (OSError, ssl.SSLError) as error:
                raise EngineError(
                    "the file of certificate authorities cannot be read",
                    code="ENG93",
                    where=self._ca,
                    why=str(error),
                    fix="rollout.rollout_engine_ca: a PEM file",
                ) from error
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        keeping: dict[str, Any] = {"keepalive_timeout": IDLE_SECONDS} if reuse else {"force_close": True}
        self._sessions[reuse] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, **keeping),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self._sessions[reuse]


@contextmanager
def _named(where: str) -> Iterator[None]:
    """What aiohttp raises in this block leaves it as an error of ours."""
    import aiohttp

    try:
        yield
    except aiohttp.ClientSSLError as error:
        raise EngineError(
            "no secure connection to the server",
            code="ENG93",
            where=where,
            why=_reason(error),
            fix="name the PEM file of the authority that signed its certificate in rollout.rollout_engine_ca, "
            "or give http:// where it speaks no TLS; nothing turns the check off",
        ) from error
    except aiohttp.InvalidURL as error:
        raise EngineError(
            "this is not an address of a server", code="ENG69", where=where, why=_reason(error)
        ) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        unknown = isinstance(error, aiohttp.ClientConnectorDNSError)
        raise fault(
            "the server's name is not known" if unknown else "no connection to the server",
            "ENG69",
            where,
            again=True,
            why=f"{_reason(error)}; proxies that the environment names are not used",
            fix="look at the server's log, and whether the address is right",
        ) from error
    except aiohttp.ClientError as error:
        raise fault(
            "the connection broke before the answer was whole",
            "ENG77",
            where,
            again=True,
            running=True,
            why=_reason(error),
        ) from error
    except TimeoutError as error:
        raise fault(
            "no whole answer in time",
            "ENG76",
            where,
            running=True,
            fix="raise rollout.rollout_request_timeout where answers take that long; else see the server's log",
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[: 2 * SHOWN]


def _remaining(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def _fits(size: int, cap: int, response: aiohttp.ClientResponse, where: str) -> None:
    if size <= cap:
        return
    response.close()
    raise fault(
        f"the answer is longer than {cap} bytes",
        "ENG91",
        where,
        running=True,
        why="no answer to this request can be that long; the rest was not read",
    )


def checked(reply: Reply) -> Reply:
    """The reply where its status is 200.

    Raises:
        ServerFault: ENG74 it is busy, ENG75 it failed.
        EngineError: ENG73 the token, ENG71 a service without this route, ENG78 the request is refused.
    """
    status, where = reply.status, reply.where
    if status == 200:
        return reply
    if status in (401, 403):
        raise EngineError(
            f"the server refuses the token (status {status})",
            code="ENG73",
            where=where,
            why=message(reply.body),
            fix="export the token of external servers under the name that rollout.rollout_engine_token_env gives",
        )
    if status in BUSY:
        wait = retry_after(reply.headers)
        raise fault(
            f"the server is busy (status {status})", "ENG74", where, again=True, wait=wait, why=message(reply.body)
        )
    if status >= 500:
        again = status in FAILED
        raise fault(
            f"the server failed (status {status})",
            "ENG75",
            where,
            again=again,
            running=True,
            why=message(reply.body),
            fix="see the server's log",
        )
    if status in (404, 405) or status < 400:
        raise stranger(where, reply.body, f"; status {status}")
    raise EngineError(
        f"the server refuses the request (status {status}): {message(reply.body)}", code="ENG78", where=where
    )


def decoded(reply: Reply) -> Any:
    """The JSON of an answer.

    Raises:
        ServerFault: ENG71 no JSON at all (its first 200 bytes are quoted), ENG77 JSON that is cut off.
    """
    body = reply.body
    try:
        return loads(body)
    except ValueError as error:
        if body.lstrip()[:1] in (b"{", b"["):
            raise fault(
                "the answer is not complete JSON",
                "ENG77",
                reply.where,
                again=True,
                running=True,
                why=f"{error}: {body[:SHOWN]!r}",
            ) from None
        raise stranger(reply.where, body) from None


def stranger(where: str, body: bytes, more: str = "") -> ServerFault:
    """What answers is another service."""
    return fault(
        "what answers there is no SGLang server" + more,
        "ENG71",
        where,
        running=True,
        why=f"it says {body[:SHOWN]!r}" if body else "its answer is empty",
        fix="look which service has this port, and give the server's own address",
    )


def loads(body: bytes) -> Any:
    """JSON to objects; NaN and Infinity, which no JSON has, are read too. Raises ValueError."""
    if orjson is not None:
        with suppress(ValueError):
            return orjson.loads(body)
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def dumps(value: Any) -> bytes:
    """Objects to JSON; numpy's numbers are numbers."""
    if orjson is None:
        return json.dumps(value, default=_plain).encode()
    return orjson.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def message(body: bytes) -> str:
    """What an error's body says: its message, or its first 200 bytes."""
    try:
        content = loads(body)
    except ValueError:
        content = None
    for key in ("error", "message", "detail", "error_message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    text = content if isinstance(content, str) else body[:SHOWN].decode(errors="replace")
    return text[: 5 * SHOWN]


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header; 0 where there is none, or a date."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() else 0.0
