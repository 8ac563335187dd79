"""Asks an address whether it is an SGLang server that serves and takes our token: yes, not yet, or never and why.

GET /health (no token) -> GET /model_info with the token -> GET /model_info without it, which must be refused
                       -> GET /server_info: what it says of itself
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import EngineError
from slime_sglang.address import ServerAddress
from slime_sglang.http import SHOWN, Reply, ServerFault, Transport

REFUSED = (401, 403)
CAP = 1 << 20  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Greeting:
    """What came of one question."""

    missing: str = ""  # what keeps the server from being ready; empty where it is
    facts: Mapping[str, Any] = field(default_factory=dict)  # its settings and version, by SGLang's names


async def handshake(address: ServerAddress, *, owned: bool, where: str, timeout: float) -> Greeting:
    """Ask once; ``where`` is the log or key to look at. An owned server must refuse whoever has no token.

    Raises:
        EngineError: what waiting does not mend: ENG71 another service answers, ENG73 it refuses the token or asks for
            none, ENG93 its certificate is not trusted.
    """
    end = time.monotonic() + timeout
    anonymous = Transport(address.url, ca=address.ca)
    authorized = Transport(address.url, token=address.token, ca=address.ca)
    try:
        reply = await anonymous.ask("GET", "/health", end=end, cap=CAP)
        if reply.status in REFUSED:
            raise _refused(address, where, reply)
        if reply.status >= 500:
            return Greeting(f"/health answered {reply.status}")
        if reply.status != 200:
            raise _wrong(address, where, reply)
        reply = await authorized.ask("GET", "/model_info", end=end, cap=CAP)
        if reply.status in REFUSED:
            raise _refused(address, where, reply)
        if reply.status >= 500:
            return Greeting(f"/model_info answered {reply.status}")
        if reply.status != 200 or "model_path" not in _object(reply.body):
            raise _wrong(address, where, reply)
        if owned and (await anonymous.ask("GET", "/model_info", end=end, cap=CAP)).status == 200:
            raise EngineError(
                f"SGLang server {address.number} at {address.url} answers without a token",
                code="ENG73",
                where=where,
                why="SGLang does not require one with more than one tokenizer process",
                fix="leave sglang.tokenizer_worker_num at 1",
            )
        reply = await authorized.ask("GET", "/server_info", end=end)
        if reply.status != 200:
            return Greeting(f"/server_info answered {reply.status}")
        return Greeting(facts=_object(reply.body))
    except ServerFault as error:
        return Greeting(f"{error.what}: {error.why}" if error.why else error.what)
    finally:
        await anonymous.close()
        await authorized.close()


def _wrong(address: ServerAddress, where: str, reply: Reply) -> EngineError:
    body = reply.body[:SHOWN].decode(errors="replace")
    if address.token:
        body = body.replace(address.token, "***")
    return EngineError(
        f"what answers at {address.url} is not an SGLang server",
        code="ENG71",
        where=where,
        why=f"{reply.where} -> {reply.status}: {body}",
        fix="correct the address, or stop what listens there",
    )


def _refused(address: ServerAddress, where: str, reply: Reply) -> EngineError:
    return EngineError(
        f"SGLang server {address.number} at {address.url} refuses the token ({reply.status})",
        code="ENG73",
        where=where,
        why="it was started with another --api-key" if address.token else "no token was given",
        fix="put its --api-key into the environment variable that rollout.rollout_engine_token_env names",
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
