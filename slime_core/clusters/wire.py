"""Frames between the driver and its rank and engine processes: a JSON header, then raw array bytes. No pickle.

    4 bytes length of the header | header (JSON) | blob 0 | blob 1 | ...

Values are JSON's own, tuples, numpy arrays, torch tensors (on arrival: CPU tensors), and the dataclasses of
`slime_core.types` and `.transfer` that cross: Batch, ArrayRef, WeightUpdate and its route, an engine's requests and
completions. Python's JSON
writes a float so that the same float is read, so nothing is rounded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from slime_core.transfer import Held, Piece, WeightRoute
from slime_core.types import ArrayRef, Batch, Completion, GenerateRequest, SamplingParams, WeightUpdate

CROSSING = (ArrayRef, Batch, Completion, GenerateRequest, SamplingParams, WeightUpdate, WeightRoute, Held, Piece)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in CROSSING}
HEADER = struct.Struct("<I")


def encode(value: Any) -> tuple[bytes, list[bytes]]:
    """The header and blobs of a value.

    Raises:
        TypeError: a type that does not cross.
    """
    blobs: list[bytes] = []
    header = json.dumps({"value": _pack(value, blobs), "blobs": [len(blob) for blob in blobs]}).encode()
    return HEADER.pack(len(header)) + header, blobs


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


def decode(header: dict[str, Any], blobs: list[bytes]) -> Any:
    """The value that :func:`encode` took."""
    return _unpack(header["value"], blobs)


def _unpack(value: Any, blobs: list[bytes]) -> Any:
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
        if not blobs[index]:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(bytearray(blobs[index]), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    if "!tuple" in value:
        return tuple(_unpack(item, blobs) for item in value["!tuple"])
    if "!dict" in value:
        return {key: _unpack(item, blobs) for key, item in value["!dict"]}
    return KINDS[value["!kind"]](**{name: _unpack(item, blobs) for name, item in value["fields"].items()})


async def send(writer: asyncio.StreamWriter, value: Any) -> None:
    """Write one frame."""
    head, blobs = encode(value)
    writer.write(head)
    for blob in blobs:
        writer.write(blob)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:
    """Read one frame; raises IncompleteReadError where the other side is gone."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    header = json.loads(await reader.readexactly(length))
    blobs = [await reader.readexactly(size) for size in header["blobs"]]
    return decode(header, blobs)


def send_blocking(sock: socket.socket, value: Any) -> None:
    """:func:`send` for the rank's side, which has no event loop."""
    head, blobs = encode(value)
    sock.sendall(head)
    for blob in blobs:
        sock.sendall(blob)


def receive_blocking(sock: socket.socket) -> Any:
    """:func:`receive` for the rank's side; raises EOFError where the driver is gone."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    header = json.loads(_exactly(sock, length))
    return decode(header, [_exactly(sock, size) for size in header["blobs"]])


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
