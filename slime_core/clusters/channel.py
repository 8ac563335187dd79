"""A child process of a run, and the frames between it and the driver, wherever it runs.

    proxy.Proxy --> Channel --+-- ProcessChannel: a socket pair to a child on this machine
                              `-- of another cluster: a host on another machine, which has such a socket

A frame is a JSON header, then raw array bytes; no pickle.

    4 bytes length of the header | header (JSON) | blob 0 | blob 1 | ...

Values are JSON's own, bytes, tuples, sets of words, paths, a Config, numpy arrays, torch tensors (on arrival: CPU
tensors), and the dataclasses of `slime_core` in `CROSSING`. Python's JSON writes a float so that the same float is
read, so nothing is rounded.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slime_core.clusters.hangs import Look, look, within
from slime_core.config.schema import Config
from slime_core.durable import FileMark
from slime_core.trainers.data_parallel import DataParallelRank, RankBatch
from slime_core.types import (
    AdapterUpdate,
    ArrayRef,
    Batch,
    Completion,
    GenerateRequest,
    Media,
    Piece,
    RankTensor,
    SamplingParams,
    WeightRoute,
    WeightUpdate,
)
from slime_core.weights.flops import Flops, TowerFlops

CROSSING = (
    *(ArrayRef, Batch, RankBatch, DataParallelRank, Flops, TowerFlops, FileMark),
    *(Completion, GenerateRequest, Media, SamplingParams),
    *(WeightUpdate, AdapterUpdate, WeightRoute, RankTensor, Piece),
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in CROSSING}
BUILT: dict[str, Callable[[Any], Any]] = {
    "!set": set,
    "!frozenset": frozenset,
    "!path": Path,
    "!config": Config.model_validate_json,
}
HEADER = struct.Struct("<I")

LOG_TAIL = 4000  # bytes of a dead process's log in an error


@dataclass(slots=True, eq=False)
class Frame:
    """One value as it crosses: the header behind its length, and raw arrays."""

    head: bytes
    blobs: Sequence[Any]  # bytes, or whatever else has a buffer
    stored: Any = None  # where a channel has put it, for those that send it on


def encode(value: Any) -> Frame:
    """The frame of a value.

    Raises:
        TypeError: a type that does not cross.
    """
    blobs: list[bytes] = []
    header = json.dumps({"value": _pack(value, blobs), "blobs": [len(blob) for blob in blobs]}).encode()
    return Frame(HEADER.pack(len(header)) + header, blobs)


def _pack(value: Any, blobs: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"!array": [len(blobs) - 1, value.dtype.str, list(value.shape)]}
    if isinstance(value, bytes):
        blobs.append(value)
        return {"!bytes": len(blobs) - 1}
    if isinstance(value, list):
        return [_pack(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {"!tuple": [_pack(item, blobs) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {f"!{type(value).__name__}": sorted(value)}
    if isinstance(value, Path):
        return {"!path": str(value)}
    if isinstance(value, Config):
        return {"!config": value.model_dump_json()}
    if isinstance(value, dict):
        return {"!dict": [[str(key), _pack(item, blobs)] for key, item in value.items()]}
    if is_dataclass(value) and type(value).__name__ in KINDS:
        parts = {item.name: _pack(getattr(value, item.name), blobs) for item in fields(value)}
        return {"!kind": type(value).__name__, "fields": parts}
    if (floats := getattr(value, "dense", None)) is not None:
        value = floats()  # of a weight in fewer bits, which an engine elsewhere computes with
    if type(value).__module__.startswith("torch"):
        import torch

        dtype = str(value.dtype).removeprefix("torch.")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        blobs.append(flat.numpy().tobytes())
        return {"!tensor": [len(blobs) - 1, dtype, list(value.shape)]}
    raise TypeError(f"a {type(value).__name__} does not cross between processes")


def decode(frame: Frame) -> Any:
    """The value that :func:`encode` took."""
    return _unpack(json.loads(frame.head[HEADER.size :])["value"], frame.blobs)


def _unpack(value: Any, blobs: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    for kind, build in BUILT.items():
        if kind in value:
            return build(value[kind])
    if "!bytes" in value:
        return bytes(blobs[value["!bytes"]])
    if "!array" in value:
        index, dtype, shape = value["!array"]
        return np.frombuffer(bytearray(blobs[index]), dtype=dtype).reshape(shape)
    if "!tensor" in value:
        import torch

        index, dtype, shape = value["!tensor"]
        if not len(blobs[index]):
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(bytearray(blobs[index]), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    if "!tuple" in value:
        return tuple(_unpack(item, blobs) for item in value["!tuple"])
    if "!dict" in value:
        return {key: _unpack(item, blobs) for key, item in value["!dict"]}
    return KINDS[value["!kind"]](**{name: _unpack(item, blobs) for name, item in value["fields"].items()})


async def send_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write one frame."""
    writer.write(frame.head)
    for blob in frame.blobs:
        writer.write(blob)
    await writer.drain()


async def receive_frame(reader: asyncio.StreamReader) -> Frame:
    """Read one frame; raises IncompleteReadError where the other side is gone."""
    size = await reader.readexactly(HEADER.size)
    head = await reader.readexactly(HEADER.unpack(size)[0])
    return Frame(size + head, [await reader.readexactly(n) for n in json.loads(head)["blobs"]])


@dataclass(slots=True, frozen=True, kw_only=True)
class Child:
    """What to start: ``python -m MODULE FD PARENT``, its output appended to ``log``.

    Example: Child(module="slime_core.clusters.ranks", log=run_dir / "log" / "rank-0.log")
    """

    module: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # beside the environment of who starts it
    folder: str = ""  # working directory; empty: that of who starts it


class Channel(Protocol):
    """One child. What is written arrives in order; a child that is gone is a ConnectionError on either side."""

    pid: int
    log: str  # where its output goes, as a person finds it
    node: str  # the machine it is on

    async def write(self, frame: Frame) -> None:
        """Send a frame; it may be written to several channels.

        Raises:
            ConnectionError: the child is gone.
        """
        ...

    async def read(self) -> Any:
        """The value of the child's next frame.

        Raises:
            ConnectionError: the child is gone.
        """
        ...

    async def ended(self, seconds: float) -> str:
        """How it ended, as the end of a sentence; empty where it runs on after ``seconds``."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    async def tail(self) -> str:
        """The end of its log."""
        ...

    async def look(self) -> Look:
        """What it does: its state, and where its threads are."""
        ...

    async def close(self) -> None:
        """Hang up: a child that waits for calls ends by itself."""
        ...


Start = Callable[[int, Child], Awaitable[Channel]]
"""Starts the child of a number (a rank, an engine) in the place that it is meant for."""


async def end(channel: Channel, farewell: Frame, grace: float) -> str:
    """Tell a child to end and see that it does; how it ended, empty where it had to be killed."""
    await within(grace, channel.write(farewell))
    await within(grace, channel.close())
    how: str = await within(2 * grace, channel.ended(grace)) or ""
    if not how:
        await within(grace, channel.kill())
    return how


class ProcessChannel:
    """A child on this machine; it dies with the process that started it.

    Example:
        channel = await ProcessChannel.start(child)
        await channel.write(encode({"rank": 0}))
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid, self.log, self.node = process.pid, str(log), socket.gethostname()
        self._process, self._path = process, log
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, child: Child, *fds: int) -> ProcessChannel:
        """Start it; ``fds`` are further descriptors that it inherits, named on its command line after the first.

        Raises:
            OSError: it cannot be started, or its log not be written.
        """
        child.log.parent.mkdir(parents=True, exist_ok=True)
        parent_end, child_end = socket.socketpair()
        with child_end, child.log.open("ab") as out:
            passed = [child_end.fileno(), *fds]
            process = subprocess.Popen(
                [sys.executable, "-m", child.module, *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.env},
                cwd=child.folder or None,
                process_group=0,  # a terminal's Ctrl-C is for the driver
            )
        channel = cls(process, child.log)
        channel._reader, channel._writer = await asyncio.open_unix_connection(sock=parent_end)
        return channel

    async def write(self, frame: Frame) -> None:
        """See `Channel`."""
        await send_frame(self._writer, frame)

    async def read(self) -> Any:
        """See `Channel`."""
        return decode(await self.read_frame())

    async def read_frame(self) -> Frame:
        """The child's next frame as it came.

        Raises:
            ConnectionError: the child is gone.
        """
        try:
            return await receive_frame(self._reader)
        except asyncio.IncompleteReadError as cut:
            raise ConnectionResetError("the process closed its socket") from cut

    async def ended(self, seconds: float) -> str:
        """See `Channel`."""
        with suppress(subprocess.TimeoutExpired):
            return end_of(await asyncio.to_thread(self._process.wait, seconds))
        return ""

    async def kill(self) -> None:
        """See `Channel`."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def tail(self) -> str:
        """See `Channel`."""
        return self._path.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()

    async def look(self) -> Look:
        """See `Channel`."""
        return await look(self.pid, self._path)

    async def close(self) -> None:
        """See `Channel`."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def start_here(_: int, child: Child) -> Channel:
    """A :data:`Start` of children on this machine."""
    return await ProcessChannel.start(child)


def end_of(code: int) -> str:
    """A process's exit code as the end of a sentence.

    Example: end_of(-9) == "was killed by SIGKILL"
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
