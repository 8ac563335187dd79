"""Places where SGLang's router chooses the server: slime's own router with one lane for all requests, the gateway.

    request -> pick (waits for room, for servers, for the gateway) -> the gateway's lane -> SGLang's router -> a server

Servers have lanes of their own, which take weights, pauses and questions, and never a request. What a server has in
flight is not known here, so room is that of all servers together. Whenever the set of servers changes requests wait
until SGLang's router knows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError
from slime_sglang.gateway import KINDS, NUMBER, Gateway, GatewayWorker
from slime_sglang.http import BROKEN, ServerFault
from slime_sglang.router import Lane, LaneKey, Place, Router

if TYPE_CHECKING:
    from slime_core.types import GenerateRequest
    from slime_sglang.address import ServerAddress
    from slime_sglang.client import Client
    from slime_sglang.gateway_client import GatewayClient


class GatewayRouter(Router):
    """See the module; also `gateway.GatewayUser` of its gateway.

    ``connect`` makes a client of the gateway's address; ``gone`` is told when the gateway will not come back.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        connect: Callable[..., GatewayClient],
        room: int,
        on_loss: Callable[[EngineError], None],
    ) -> None:
        super().__init__()
        self._gateway, self._connect, self._room, self._on_loss = gateway, connect, room, on_loss
        self._keys: dict[str, LaneKey] = {}  # whose address is whose, of all generations
        self._changing = 0  # servers that are being taken away
        self._tasks: set[asyncio.Task[Any]] = set()
        self._born = 0
        self._gateway_lane: Lane | None = None
        gateway.keeper = self

    @property
    def shared(self) -> int:
        """See `Router`."""
        return self._gateway_lane.in_flight if self._gateway_lane is not None else 0

    # -- servers

    async def join(self, lane: Lane) -> None:
        """See `Router`."""
        address = lane.client.address
        self._keys[address.url] = lane.key
        kind = KINDS.get(str(lane.fact("disaggregation_mode") or "null"), "regular")
        port = int(lane.fact("disaggregation_bootstrap_port") or 0) if kind == "prefill" else 0
        await self._gateway.add(
            lane.number, GatewayWorker(url=address.url, token=address.token, kind=kind, bootstrap_port=port)
        )
        if not self._born:
            self.up(self._gateway.address)
        self.admit(lane)

    def fence(self, number: int, error: EngineError, *, dying: bool = True) -> Lane | None:
        """See `Router`. Requests on a server that is not ``dying`` would wait for it: all in flight are made again."""
        lane = super().fence(number, error)
        if lane is not None:
            self._changing += 1
            self._run(self._take_away(number, None if dying else error))
        return lane

    async def _take_away(self, number: int, error: EngineError | None) -> None:
        try:
            await self._gateway.remove(number)
            if error is not None and self._gateway_lane is not None:
                self.down(_same(error))
                await self.clear()
                self.up(self._gateway.address)
        finally:
            self._changing -= 1
            self._serve_waiters()

    def culprit(self, lane: Lane, error: EngineError) -> Lane | None:
        """See `Router`."""
        if lane.number != NUMBER:
            return lane
        server = getattr(error, "server", None)
        if server is not None:
            culprit_lane = self._lanes.get(server[0])
            return culprit_lane if culprit_lane is not None and culprit_lane.key == server else None
        if error.code in BROKEN and lane is self._gateway_lane:
            self._gateway.report(_same(error))
            self.down(_same(error))
        return None

    # -- what the gateway tells

    def down(self, error: ServerFault) -> None:
        """See `gateway.GatewayUser`."""
        gateway_lane, self._gateway_lane = self._gateway_lane, None
        if gateway_lane is not None:
            gateway_lane.fenced = error
            self._run(gateway_lane.client.close())

    async def clear(self) -> None:
        """See `gateway.GatewayUser`."""
        ends = (lane.client.abort_all() for lane in self.lanes)
        await asyncio.gather(*ends, return_exceptions=True)  # a server that does not answer is the watch's

    def up(self, address: ServerAddress) -> None:
        """See `gateway.GatewayUser`."""
        self._born += 1
        client = self._connect(address, peers=self._peers, servers=self._keys)
        self._gateway_lane = Lane(client=client, number=NUMBER, room=self._room, generation=self._born)
        self._serve_waiters()

    def ended(self, error: EngineError) -> None:
        """See `gateway.GatewayUser`."""
        self._on_loss(error)

    def _peers(self) -> Sequence[Client]:
        return [lane.client for lane in self.lanes]

    async def close(self) -> None:
        """See `Router`."""
        if self._gateway_lane is not None:
            await self._gateway_lane.client.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name="slime-gateway")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- places

    def _open(self, place: Place) -> bool:
        return not self._is_paused and place.lane is self._gateway_lane

    def _place(self, request: GenerateRequest, avoid: Collection[LaneKey]) -> Place | None:
        gateway_lane = self._gateway_lane
        if self._is_paused or self._changing or gateway_lane is None:
            return None
        kinds = [
            KINDS.get(str(lane.fact("disaggregation_mode") or "null"), "regular") for lane in self._lanes.values()
        ]
        making = sum(kind != "prefill" for kind in kinds)  # servers that decode
        if not making or ("decode" in kinds) != ("prefill" in kinds):
            return None
        gateway_lane.room = self._room * making
        gateway_lane.version = min(lane.version for lane in self._lanes.values())
        if gateway_lane.full:
            return None
        gateway_lane.in_flight += 1
        return Place(gateway_lane, None)


def _same(error: EngineError) -> ServerFault:
    return error if isinstance(error, ServerFault) else ServerFault(**error.as_dict())
