"""Adapters on their way to an engine that computes with them beside the base: a folder each, or shared memory.

    disk, nccl   ROUTE.folder/adapters/v-VERSION/NAME: adapter_config.json and adapter_model.safetensors, as peft's
    tensor       one buffer in the memory of the host, which every rank of every server on this machine maps

Engines copy adapters to the host before they use them, so they are sent there and not to a GPU. Buffers take turns: an
engine maps that of its version until it has loaded the next, and a version may be sent once more in between.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.durable import storage_error
from slime_core.weights.hashing import Checksums
from slime_core.weights.transports.buckets import DTYPES, Tally, TensorSource, stream

if TYPE_CHECKING:
    from slime_core.types import WeightRoute
    from slime_core.weights.transports.buckets import Sender

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TURNS = 3  # buffers of an adapter
KEPT = 2  # versions of folders

AdapterSources = Mapping[str, tuple[Mapping[str, Any], Sequence[TensorSource]]]
"""By name: what adapter_config.json holds, and the factors by peft's names without ``base_model.model.``."""


class AdapterSenders:
    """Sends adapters; ``connect`` makes the sender of the transport ``tensor`` for a device.

    Example:
        handle["adapters"] = AdapterSenders(connect).send(adapters, 4, route)
    """

    def __init__(self, connect: Callable[[torch.device], Sender]) -> None:
        self._connect = connect
        self._buffers: dict[str, list[Sender]] = {}  # by adapter, the next one first
        self._folders: list[Path] = []  # of versions, newest last

    def send(self, adapters: AdapterSources, version: int, route: WeightRoute, *, rank: int = 0) -> dict[str, Any]:
        """Of each adapter ``config`` and ``folder`` or ``buckets``; {} on ranks other than the first.

        Every rank goes through all gathers, also where the first fails.

        Raises:
            StorageError: the folder cannot be written.
        """
        streams = {name: stream(sources) for name, (_, sources) in adapters.items()}
        try:
            if rank:
                return {}
            folder = None if route.transport == "tensor" else self._open(Path(route.folder), version)
            handles = {}
            for name, (config, sources) in adapters.items():
                plain = plain_config(config)
                if folder is not None:
                    handles[name] = {"config": plain, "folder": _write(folder / name, plain, streams[name], route)}
                    continue
                parts = [part for source in sources for part in source.parts]
                tally = Tally(replace(route, checks=()), Checksums)
                sent = self._buffer(name).send(parts, streams[name], version, route, tally)
                handles[name] = {"config": plain, **sent}
            return handles
        finally:
            for tensors in streams.values():
                for _ in tensors:
                    pass

    def drop(self) -> None:
        """Give the memory of buffers back."""
        for sender in (sender for buffers in self._buffers.values() for sender in buffers):
            sender.drop()
        self._buffers = {}

    def _buffer(self, name: str) -> Sender:
        buffers = self._buffers.setdefault(name, [self._connect(torch.device("cpu")) for _ in range(TURNS)])
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def _open(self, folder: Path, version: int) -> Path:
        """A folder for a version; those of other processes and all but the newest go."""
        adapters = folder.absolute() / "adapters"
        try:
            adapters.mkdir(parents=True, exist_ok=True)
            self._folders = self._folders[1 - KEPT :]
            for path in adapters.iterdir():
                if path not in self._folders:
                    shutil.rmtree(path)
            names = (f"v-{version}" + (f".{count}" if count else "") for count in range(KEPT + 1))
            place = next(adapters / name for name in names if adapters / name not in self._folders)
            place.mkdir()
        except OSError as error:
            raise storage_error(error, adapters, "adapters cannot be written for the engine") from error
        self._folders.append(place)
        return place


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same adapter without rsLoRA, which not every engine knows: alpha' / r = alpha / sqrt(r)."""
    if not config.get("use_rslora"):
        return dict(config)
    return {**config, "use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}


def _write(folder: Path, config: Mapping[str, Any], tensors: Any, route: WeightRoute) -> str:
    from safetensors.torch import save_file

    dtype = DTYPES[route.dtype]
    factors = {
        f"{PREFIX}{part.name}": part.cut(whole).detach().to("cpu", dtype).contiguous()
        for parts, whole in tensors
        for part in parts
    }
    try:
        folder.mkdir()
        save_file(factors, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise storage_error(error, folder, "an adapter cannot be written for the engine") from error
    return str(folder)
