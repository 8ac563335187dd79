"""Frames between the driver and its rank and engine processes: a JSON header, then raw array bytes. No pickle.

    4 bytes length of the header | header (JSON) | blob 0 | blob 1 | ...

Values are JSON's own, tuples, numpy arrays, torch tensors (on arrival: CPU tensors), and the dataclasses of
`slime_core` that cross: a Batch or a rank's Portion of it, ArrayRef, WeightUpdate and its route, an engine's requests
and completions. Python's JSON writes a float so that the same float is read, so nothing is rounded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from slime_core.trainers.portion import Portion, Seat
from slime_core.types import (
    ArrayRef,
    Batch,
    Completion,
    GenerateRequest,
    Held,
    Piece,
    SamplingParams,
    WeightRoute,
    WeightUpdate,
)
from slime_core.weights.flops import Flops

CROSSING = (
    *(ArrayRef, Batch, Portion, Seat, Flops),
    *(Completion, GenerateRequest, SamplingParams),
    *(WeightUpdate, WeightRoute, Held, Piece),
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in CROSSING}
HEADER = struct.Struct("<I")


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
    if isinstance(value, list):
        return [_pack(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {"!tuple": [_pack(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"!dict": [[str(key), _pack(item, blobs)] for key, item in value.items()]}
    if is_dataclass(value) and type(value).__name__ in KINDS:
        parts = {item.name: _pack(getattr(value, item.name), blobs) for item in fields(value)}
        return {"!kind": type(value).__name__, "fields": parts}
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


async def send(writer: asyncio.StreamWriter, value: Any) -> None:
    """Write one frame."""
    await send_frame(writer, encode(value))


async def send_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write one frame that is there already."""
    writer.write(frame.head)
    for blob in frame.blobs:
        writer.write(blob)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:
    """Read one frame; raises IncompleteReadError where the other side is gone."""
    return decode(await receive_frame(reader))


async def receive_frame(reader: asyncio.StreamReader) -> Frame:
    """Read one frame as it is; raises IncompleteReadError where the other side is gone."""
    size = await reader.readexactly(HEADER.size)
    head = await reader.readexactly(HEADER.unpack(size)[0])
    return Frame(size + head, [await reader.readexactly(n) for n in json.loads(head)["blobs"]])


def send_blocking(sock: socket.socket, value: Any) -> None:
    """:func:`send` for the rank's side, which has no event loop."""
    frame = encode(value)
    sock.sendall(frame.head)
    for blob in frame.blobs:
        sock.sendall(blob)


def receive_blocking(sock: socket.socket) -> Any:
    """:func:`receive` for the rank's side; raises EOFError where the driver is gone."""
    size = _exactly(sock, HEADER.size)
    head = _exactly(sock, HEADER.unpack(size)[0])
    return decode(Frame(size + head, [_exactly(sock, n) for n in json.loads(head)["blobs"]]))


def _exactly(sock: socket.socket, count: int) -> bytes:
    read: Callable[[memoryview], int] = sock.recv_into
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = read(view)
        if got == 0:
            raise EOFError("the driver closed the connection")
        view = view[got:]
    return bytes(buffer)
