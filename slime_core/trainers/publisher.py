"""How a rank's weights come to engines: whole ones, or the base of its adapters once and then adapters alone.

no route     tensors: the storage that one rank computes with, or whole copies
"tensors"    the engine reads the trainer's memory and has the base of its adapters
another      `weights.transports`: sent by the first rank, adapters as folders or in the memory of the host
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers.adapter_updates import adapter_sources, fingerprints
from slime_core.types import AdapterUpdate, WeightUpdate
from slime_core.weights.transports.buckets import TensorPart, TensorSource, one_part, stream

if TYPE_CHECKING:
    from slime_core.types import WeightRoute
    from slime_core.weights.fp8 import BlockFormat
    from slime_core.weights.transports.senders import Senders

Tensors = dict[str, torch.Tensor]


class Publisher(ABC):
    """The part of a worker that publishes; see `worker.Worker`."""

    rank: int
    train: Any  # the [train] section
    senders: Senders
    block_format: BlockFormat | None  # in which engines compute

    @torch.no_grad()
    def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`; a collective. With a route, what was sent is at its place or on its way.

        Raises:
            TrainerError: a tensor that no engine knows a name for; TRN96 no memory for a copy; a broken group.
            StorageError: the folder cannot be written.
        """
        adapters, base = self.adapter_updates(), route is None or route.base
        with self.unmerged() if adapters else nullcontext():
            if route is not None and route.transport != "tensors":
                sources = self.sources() if base else []
                return self.senders.publish(
                    sources, version, route, rank=self.rank, adapters=adapter_sources(adapters)
                )
            update = WeightUpdate(version=version, epoch=0, transport="tensors")
            if base:
                update.transport, update.tensors = self.storage()
        if adapters and self.rank == 0:
            update.adapters = adapters
            update.fingerprints = fingerprints(adapters, route.dtype if route else self.train.dtype)
        return update

    def storage(self) -> tuple[str, Tensors]:
        """What an engine without a route reads: a transport and tensors, on the first rank alone; a collective."""
        from slime_core.trainers.fsdp.publishing import rounded  # that package imports this module

        return "tensors", rounded(self.whole(), self.block_format, self.parts)

    def adapter_updates(self) -> dict[str, AdapterUpdate]:
        """Adapters for engines that compute with them beside the base, whole on every rank; a collective.

        None where engines get merged weights.
        """
        return {}

    def unmerged(self) -> AbstractContextManager[None]:
        """Inside the block weights with adapters are those of the base."""
        return nullcontext()

    @torch.no_grad()
    def whole(self) -> Tensors:
        """Every tensor by its name in the model folder on rank 0; nothing on the others; a collective."""
        tensors: Tensors = {}
        for parts, tensor in stream(self.sources()):
            if self.rank == 0:
                tensors |= {part.name: part.cut(tensor).cpu().contiguous() for part in parts}
        return tensors

    @abstractmethod
    def sources(self) -> list[TensorSource]:
        """All tensors that engines hold, by their names in the model folder."""

    def parts(self, name: str, shape: torch.Size) -> tuple[TensorPart, ...]:
        """What a tensor of `whole` is in the model folder."""
        return one_part(name, shape)
