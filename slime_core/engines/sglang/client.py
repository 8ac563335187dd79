"""One SGLang server over HTTP: token ids in, token ids and log-probs out; checked before sending and when they return.

request -> wire.body -> a seat of `concurrency` -> POST /generate -> wire.completion -> Completion
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.sglang.address import Address
    from slime_core.types import Completion, GenerateRequest


class ServerFault(EngineError):
    """The server failed, not the request: another server, or this one later, may serve the same request."""


@dataclass(slots=True)
class Progress:
    """What has come from a server since the client began; counts never fall, ``in_flight`` and ``waiting`` do."""

    tokens: int = 0  # of generate and stream
    replies: int = 0  # good ones, of generate, stream and score
    in_flight: int = 0  # requests that the server has: generate, stream, score
    waiting: int = 0  # requests without a seat
    waited: float = 0.0  # seconds that requests spent without a seat
    last_token: float = 0.0  # time.monotonic() of the last token; of the client's making before the first
    retries: int = 0
    rejected: int = 0  # answers that broke a rule
    late: int = 0  # answers of a try that had been given up
    strangers: int = 0  # answers to no request of ours


class Client:
    """Asks one server.

    ``decode`` turns token ids into text (special tokens kept): it finds a stop string that spans the end of
    ``GenerateRequest.kept`` and the new tokens, and is needed for such requests alone. ``ca`` is a PEM file of
    authorities for an https server that the system's own do not vouch for.

    Example:
        client = Client(server.address, vocab_size=151936, context_len=4096, features=installation.features,
                        concurrency=512, timeout=1800, retries=3, epoch=2)
        done = await client.generate(request, low=4, high=lambda: 4)
        await client.close()
    """

    progress: Progress

    def __init__(
        self,
        address: Address,
        *,
        vocab_size: int,
        context_len: int,
        features: frozenset[str],
        concurrency: int,
        timeout: float,
        retries: int,
        epoch: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        ca: str = "",
    ) -> None:
        raise NotImplementedError

    def version_text(self, version: int) -> str:
        """What the server is told to stamp on tokens of ``version``: ``EPOCH.VERSION``."""
        raise NotImplementedError

    async def generate(
        self, request: GenerateRequest, *, dp_rank: int | None = None, low: int, high: Callable[[], int]
    ) -> Completion:
        """Continue ``request.tokens``; versions of its tokens must lie in ``[low, high()]``. A caller that is
        cancelled ends the request on the server. ``timeout`` counts from the moment when it has a seat.

        Raises:
            EngineError: the request is at fault: ENG01-ENG03, ENG72, ENG73 the token, ENG78 the server refuses it.
            ServerFault: the server is: ENG69 no connection, ENG71 another service, ENG74 busy, ENG75 it keeps
                failing, ENG76 out of time, ENG77 lost on the way, ENG79-ENG83 impossible answers, ENG91 too long.
        """
        raise NotImplementedError

    def stream(
        self, request: GenerateRequest, *, dp_rank: int | None = None, low: int, high: Callable[[], int]
    ) -> AsyncIterator[Completion]:
        """As `generate`, in growing pieces; every piece but the last has finish ``abort``. Closing it ends the
        request on the server."""
        raise NotImplementedError

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine.score`."""
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        """Ask the server to stop these requests; each waiting `generate` returns what it has, finish ``abort``."""
        raise NotImplementedError

    async def abort_all(self) -> None:
        """`abort` of every request that the server has, those of other clients too."""
        raise NotImplementedError

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """POST /pause_generation."""
        raise NotImplementedError

    async def resume(self) -> None:
        """POST /continue_generation."""
        raise NotImplementedError

    async def flush(self) -> None:
        """POST /flush_cache. Raises EngineError ENG78 where requests run."""
        raise NotImplementedError

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info."""
        raise NotImplementedError

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info."""
        raise NotImplementedError

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum of every tensor by the engine's name, one dict a tensor-parallel rank."""
        raise NotImplementedError

    async def get(self, path: str, *, timeout: float, retry: bool = True) -> dict[str, Any]:
        """GET a JSON object."""
        raise NotImplementedError

    async def post(self, path: str, body: dict[str, Any], *, timeout: float, retry: bool = False) -> dict[str, Any]:
        """POST a JSON object and read one, empty where the server answers no JSON; ``retry``: asking twice is safe.

        Raises:
            EngineError: ENG73, or ENG78 with the server's message where it answers 4xx.
            ServerFault: as `generate`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End what is in flight with ENG84 and close the connections."""
        raise NotImplementedError
