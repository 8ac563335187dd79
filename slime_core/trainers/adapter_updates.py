"""Adapters on their way to engines that compute with them beside the base: checksums, and sources for a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers.fingerprint import checksums
from slime_core.types import AdapterUpdate
from slime_core.weights.transports.buckets import TensorSource, one_part

if TYPE_CHECKING:
    from collections.abc import Sequence


def fingerprints(adapters: Mapping[str, AdapterUpdate], dtype: str) -> dict[str, str]:
    """What an engine that computes in ``dtype`` must hold, by ``ADAPTER/NAME``; see `fingerprint.checksums`."""
    tensors = {f"{name}/{key}": one for name, update in adapters.items() for key, one in update.tensors.items()}
    return checksums(tensors, getattr(torch, dtype))


def adapter_sources(
    adapters: Mapping[str, AdapterUpdate],
) -> dict[str, tuple[Mapping[str, Any], Sequence[TensorSource]]]:
    """Config and sources of each adapter, whose tensors are whole; see `Senders.publish`."""
    return {
        name: (
            update.config,
            [TensorSource(one_part(key, one.shape), one.detach) for key, one in update.tensors.items()],
        )
        for name, update in adapters.items()
    }
