"""One SGLang router over HTTP: requests go to it, and aborts of requests to every server behind it.

    generate, score, stream -> router (X-SMG-Routing-Key) -> whichever server
    abort                   -> every server: which one has the request is known to the router alone

The router hands a server's own answer on as it is; where it speaks for itself (X-SMG-Error-Code) the fault is the
router's word, and names the server by its address where one could not be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_sglang.client import Client
from slime_sglang.http import Reply, ServerFault, fault, message

if TYPE_CHECKING:
    from slime_core.types import GenerateRequest
    from slime_sglang.router import LaneKey

SESSION = "X-SMG-Routing-Key"
"""The router's header for session affinity; its policy `manual` goes by it."""
SAYS = "X-SMG-Error-Code"
"""The router's header on answers of its own making."""
NOBODY = frozenset({"no_available_workers", "server_selection_failed", "no_workers"})


class GatewayClient(Client):
    """A `Client` whose address is the router's.

    ``peers`` are the clients of the servers behind it, ``servers`` whose address is whose, older ones too.
    """

    def __init__(
        self, *words: Any, peers: Callable[[], Sequence[Client]], servers: Mapping[str, LaneKey], **more: Any
    ) -> None:
        super().__init__(*words, **more)
        self._peers, self._servers = peers, servers

    def _headers(self, request: GenerateRequest | None) -> Mapping[str, str]:
        key = (request.session_id or request.id) if request is not None else ""
        return {SESSION: key} if key.isascii() and key.isprintable() and key else {}

    def _answered(self, reply: Reply) -> Reply:
        code = reply.headers.get(SAYS, "")
        if reply.status == 200 or not code:
            return super()._answered(reply)
        text = message(reply.body)
        if code in NOBODY:
            raise fault("SGLang's router has no server", "ENG74", reply.where, again=True, why=text)
        server = next((key for url, key in self._servers.items() if f"{url}/" in text), None)
        if server is None:
            return super()._answered(reply)
        error = fault(
            f"SGLang's router lost server {server[0]}", "ENG77", reply.where, running=True, why=f"{code}: {text}"
        )
        error.server = server
        raise error

    async def abort_all(self) -> None:
        """See `Client`; on every server."""
        self._end()
        await asyncio.gather(*(peer.abort_all() for peer in self._peers()))

    async def _abort(self, rid: str, timeout: float) -> None:
        """On every server: the one that has it ends it, the others do nothing.

        Raises:
            EngineError: of the first server that could not be asked; where nobody listens, nothing runs.
        """
        peers = list(self._peers())
        results = await asyncio.gather(*(peer._abort(rid, timeout) for peer in peers), return_exceptions=True)
        for peer, result in zip(peers, results, strict=True):
            if isinstance(result, ServerFault):
                if result.code == "ENG69":
                    continue
                result.server = (peer.address.number, peer.address.generation)
            if isinstance(result, BaseException):
                raise result
