"""The transports of one trainer: a route in, its sender out, which keeps from one update to the next what it can use
again (buffers, handles, process groups)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slime_core.errors import TrainerError
from slime_core.plugins.backends import engine_of
from slime_core.types import WeightUpdate
from slime_core.weights.transports.buckets import Part, Source, Stream, stream

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.types import WeightRoute


class Sender(Protocol):
    """One transport at rank 0."""

    def send(
        self, parts: list[Part], tensors: Stream, version: int, route: WeightRoute
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The update's handle, and checksums of what was sent by `types.Held.key`."""
        ...

    def drop(self) -> None:
        """Give memory back."""
        ...


class Senders:
    """Made when a route first asks for them.

    Args:
        device: where buffers of transports that travel from memory to memory lie.
        folder: of the model, whose config.json goes with a folder of weights.
        config: of the run, whose engine brings the senders of its other transports.

    Example:
        update = senders.publish(sources, 4, route)
    """

    def __init__(self, device: torch.device, folder: Path, config: Config) -> None:
        self._device, self._folder, self._config = device, folder, config
        self.made: dict[str, Sender] = {}  # by transport

    def publish(self, sources: Sequence[Source], version: int, route: WeightRoute, *, rank: int = 0) -> WeightUpdate:
        """The update of ``version``, sent by rank 0; every rank goes through all gathers, also where that fails.

        Raises:
            TrainerError: TRN96 no memory for a copy; a broken group; a tensor that comes twice.
            StorageError: the folder cannot be written.
        """
        update = WeightUpdate(version=version, epoch=0, transport=route.transport)
        tensors = stream(sources)
        parts = [part for source in sources for part in source.parts]
        if (rank == 0 or route.copies) and route.transport not in self.made:
            self.made[route.transport] = self._open(route)
        try:
            if rank == 0:
                sent = self.made[route.transport].send(parts, tensors, version, route)
                update.handle, update.fingerprints = sent
        finally:
            for _ in tensors:
                pass
        if route.copies:
            sender: Any = self.made[route.transport]
            copies = sender.spread(parts, route, rank)
            if rank == 0:
                update.handle["copies"] = copies
        return update

    def drop(self) -> None:
        """Give the memory of transports back; the next update makes it anew."""
        for sender in self.made.values():
            sender.drop()

    def _open(self, route: WeightRoute) -> Sender:
        if route.transport == "disk":
            from slime_core.weights.transports.disk import DiskSender

            config = json.loads((self._folder / "config.json").read_bytes())
            config.pop("torch_dtype", None)
            config["dtype"] = route.dtype
            return DiskSender(self._device, {"config.json": json.dumps(config, indent=2) + "\n"})
        backend = engine_of(self._config)
        if route.transport not in backend.senders:
            raise TrainerError(
                f"nothing sends weights by {route.transport} to rollout_engine = {backend.name}",
                where="WeightRoute.transport",
                fix="EngineBackend.senders names what does",
            )
        sender: Sender = backend.senders[route.transport](self._device)
        return sender
