"""A judge that asks a service, within a deadline and a number of tries.

Whatever keeps a verdict from coming is a verdict too, `infra`: the sample is masked, and nothing is scored.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

import httpx

from slime_core import ConfigError
from slime_kernelbench.service.models import MAX_CANDIDATE
from slime_kernelbench.service.verdicts import hash_of, infra, read
from slime_kernelbench.types import Diagnostic, KernelProblem, Verdict

if TYPE_CHECKING:
    from slime_kernelbench.options import Options

MAX_ANSWER = 8 << 20  # bytes
AGAIN = frozenset({408, 429, 500, 502, 503, 504})
SHOWN = 200  # bytes of a strange answer


@dataclass(slots=True, frozen=True)
class _Trouble(Exception):
    """One try that brought no verdict."""

    kind: str
    why: str
    again: bool
    after: float = 0.0  # seconds that the service asks for


class RemoteJudge:
    """Judges by `slime kernelbench serve`.

    Example:
        judge = RemoteJudge("http://127.0.0.1:8765", token="...")
        verdict = await judge.judge(source, problem)
        await judge.aclose()

    Args:
        deadline: seconds for one verdict, waiting and tries included.
        tries: of one request; a full queue (429) and an ending service (503) do not count, only the deadline does.
        pause: seconds before the second try; doubles, up to 10, with a random part of the same length.
    """

    def __init__(self, url: str, *, token: str, deadline: float = 900.0, tries: int = 4, pause: float = 0.5) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url!r} is not an address of a judge",
                code="CFG02",
                where="plugin.kernelbench.judge_url",
                fix="what `slime kernelbench serve` prints, such as http://127.0.0.1:8765",
            )
        self._url, self._token = url.rstrip("/"), token
        self._deadline, self._tries, self._pause = deadline, tries, pause
        self._http: httpx.AsyncClient | None = None

    async def judge(self, source: str, problem: KernelProblem) -> Verdict:
        """The verdict on one candidate; trouble with the service is `infra`, never an exception."""
        if (refused := _unsendable(source)) is not None:
            return refused
        body = json.dumps({"key": token_urlsafe(24), "source": source, "problem": _problem_tree(problem)}).encode()
        end, tries = time.monotonic() + self._deadline, 0
        while True:
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    return await self._try(body, source)
            except TimeoutError:
                return infra("Deadline", f"{self._url} did not answer in {self._deadline:g} s", source=source)
            except _Trouble as trouble:
                tries += trouble.kind not in ("Full", "Draining")
                pause = max(trouble.after, min(10.0, self._pause * 2 ** max(0, tries - 1))) * (1 + random.random())
                if not trouble.again or tries >= self._tries or time.monotonic() + pause >= end:
                    return infra(trouble.kind, f"{self._url}: {trouble.why}", source=source)
                await asyncio.sleep(pause)

    async def health(self) -> dict[str, Any]:
        """The service's queue and devices.

        Raises:
            ConfigError: CFG05 it does not answer, or refuses the token.
        """
        try:
            async with asyncio.timeout(10):
                answer = await self._open().get("/health")
            status: dict[str, Any] = answer.json()
            if answer.status_code != 200:
                raise ValueError(f"it answers {answer.status_code}: {status.get('error', {}).get('what', '')}")
            return status
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ConfigError(
                f"no judge answers at {self._url}",
                code="CFG05",
                where="plugin.kernelbench.judge_url",
                why=str(error) or type(error).__name__,
                fix="slime kernelbench serve, then its address and its token",
            ) from error

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _try(self, body: bytes, source: str) -> Verdict:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._open().stream("POST", "/v1/judge", content=body, headers=headers) as answer:
                raw = await _read(answer)
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise _Trouble("Unreachable", f"{type(error).__name__}: {error}", again=True) from error
        if answer.status_code != 200:
            raise _refusal(answer, raw)
        try:
            return read(json.loads(raw).get("verdict"), source)
        except (ValueError, AttributeError) as error:
            raise _Trouble("NoVerdict", f"{error}; it begins {raw[:SHOWN]!r}", again=False) from error

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=httpx.Timeout(None, connect=10),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            )
        return self._http


def connect(options: Options, *, deadline: float = 0.0) -> RemoteJudge:
    """The judge at ``judge_url``, with the token of ``judge_token_env``; ``deadline`` in seconds, 0 is 15 time-outs.

    Raises:
        ConfigError: CFG09 the variable is not set, CFG02 no address.
    """
    token = os.environ.get(options.judge_token_env, "")
    if not token:
        raise ConfigError(
            f"the token of the judge is not in {options.judge_token_env}",
            code="CFG09",
            where="plugin.kernelbench.judge_token_env",
            fix=f'export {options.judge_token_env}="$(cat DIR/token)", with the DIR of slime kernelbench serve DIR',
        )
    return RemoteJudge(options.judge_url, token=token, deadline=deadline or 15 * options.judge_timeout)


async def _read(answer: httpx.Response) -> bytes:
    raw = bytearray()
    async for part in answer.aiter_bytes():
        raw += part
        if len(raw) > MAX_ANSWER:
            raise ValueError(f"an answer of more than {MAX_ANSWER} bytes")
    return bytes(raw)


def _refusal(answer: httpx.Response, raw: bytes) -> _Trouble:
    try:
        error = json.loads(raw)["error"]
        reason = " | ".join(str(error[part])[:300] for part in ("what", "why", "fix") if error.get(part))
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = f"it begins {raw[:SHOWN]!r}"
    status = answer.status_code
    kind = {401: "Token", 403: "Token", 429: "Full", 503: "Draining"}.get(status, f"HTTP{status}")
    delay = answer.headers.get("Retry-After", "")
    after = min(30.0, float(delay)) if delay.isdecimal() else 0.0
    return _Trouble(kind, f"HTTP {status}: {reason}", again=status in AGAIN, after=after)


def _problem_tree(problem: KernelProblem) -> dict[str, Any]:
    return {**asdict(problem), "where": problem.where[:4096]}


def _unsendable(source: str) -> Verdict | None:
    """The verdict on a text that no file of Python can hold: it is its author's, so no `infra`."""
    reason = ""
    if len(source) > MAX_CANDIDATE:
        reason = f"the source has {len(source)} characters, at most {MAX_CANDIDATE} are judged"
    elif any("\ud800" <= char <= "\udfff" for char in source):
        reason = "the source is not UTF-8: it has lone surrogates"
    if not reason:
        return None
    diagnostic = Diagnostic(stage="static", kind="source", message=reason)
    return Verdict(status="rejected", reached="static", diagnostics=(diagnostic,), source_hash=hash_of(source))
