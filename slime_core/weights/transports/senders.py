"""Transports of one trainer, by route; a sender keeps buffers, handles and process groups between updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import TrainerError
from slime_core.plugins.backends import engine_of
from slime_core.types import WeightUpdate
from slime_core.weights.hashing import Checksums
from slime_core.weights.transports.adapters import AdapterSenders, AdapterSources
from slime_core.weights.transports.buckets import Sender, Tally, TensorSource, stream
from slime_core.weights.transports.quantised import in_fp8

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.types import WeightRoute
    from slime_core.weights.fp8 import BlockFormat


class Senders:
    """Created when a route first needs them.

    Args:
        device: where buffers of transports that travel from memory to memory lie.
        folder: of the model, whose config.json goes with a folder of weights.
        config: of the run, whose engine brings the senders of its other transports.
        block_format: in which linear weights are sent; None: as floats.

    Example:
        update = senders.publish(sources, 4, route)
    """

    def __init__(
        self, device: torch.device, folder: Path, config: Config, block_format: BlockFormat | None = None
    ) -> None:
        self._device, self._folder, self._config = device, folder, config
        self._block_format = block_format
        self.by_transport: dict[str, Sender] = {}
        self._adapters = AdapterSenders(lambda where: self._constructor("senders", "tensor")(where))

    def publish(
        self,
        sources: Sequence[TensorSource],
        version: int,
        route: WeightRoute,
        *,
        rank: int = 0,
        adapters: AdapterSources | None = None,
    ) -> WeightUpdate:
        """The update of ``version``, sent by rank 0; every rank goes through all gathers, also where that fails.

        ``adapters``, of an engine that computes with them beside the base, go under ``adapters`` in the update's
        handle; without ``route.base`` they are all of the update.

        Raises:
            TrainerError: TRN96 no memory for a copy; a broken group; a tensor that comes twice.
            StorageError: the folder cannot be written.
        """
        update = WeightUpdate(version=version, epoch=0, transport=route.transport, handle={})
        if route.base:
            self._send(sources, update, route, rank)
        if adapters:
            update.handle |= {"adapters": self._adapters.send(adapters, version, route, rank=rank)}
        return update

    def _send(self, sources: Sequence[TensorSource], update: WeightUpdate, route: WeightRoute, rank: int) -> None:
        """Tensors of the model."""
        if self._block_format is not None:
            sources = in_fp8(sources, self._block_format)
        tensors = stream(sources)
        parts = [part for source in sources for part in source.parts]
        if (rank == 0 or route.copies) and route.transport not in self.by_transport:
            self.by_transport[route.transport] = self._open(route)
        try:
            if rank == 0:
                tally = Tally(route, self._sums(route), self._block_format)
                update.handle = self.by_transport[route.transport].send(parts, tensors, update.version, route, tally)
                update.fingerprints = tally.finish()
        finally:
            for _ in tensors:
                pass
        if route.copies:
            sender: Any = self.by_transport[route.transport]
            copies = sender.spread(parts, route, rank)
            if rank == 0:
                update.handle["copies"] = copies

    def drop(self) -> None:
        """Give the memory of transports back; the next update makes it anew."""
        for sender in self.by_transport.values():
            sender.drop()
        self._adapters.drop()

    def _open(self, route: WeightRoute) -> Sender:
        if route.transport == "disk":
            from slime_core.weights.transports.disk import DiskSender

            config = json.loads((self._folder / "config.json").read_bytes())
            for name in ("torch_dtype", "quantization_config"):
                config.pop(name, None)
            config["dtype"] = route.dtype
            if self._block_format is not None:
                config["quantization_config"] = self._block_format.table()
            return DiskSender(self._device, {"config.json": json.dumps(config, indent=2) + "\n"})
        sender: Sender = self._constructor("senders", route.transport)(self._device)
        return sender

    def _sums(self, route: WeightRoute) -> Callable[[torch.dtype], Checksums]:
        return Checksums if route.checksum == "sha256" else self._constructor("checksums", route.checksum)

    def _constructor(self, field: str, name: str) -> Callable[[Any], Any]:
        """The senders that the run's engine provides for its routes."""
        backend = engine_of(self._config)
        classes: Mapping[str, Callable[[Any], Any]] = getattr(backend, field)
        if name not in classes:
            raise TrainerError(
                f"rollout_engine = {backend.name} provides no {name}, which its WeightRoute names",
                where=f"EngineBackend.{field}",
            )
        return classes[name]
