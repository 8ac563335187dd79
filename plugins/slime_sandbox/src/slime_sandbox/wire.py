"""Messages between the sandbox's processes: JSON with file descriptors in one packet, and raw bytes in frames."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

FRAME = struct.Struct(">Q")
"""A frame is its length and its bytes."""
PACKET = 1 << 16
"""Bytes of one JSON message, at most."""
DESCRIPTORS = 8


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def post(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One message. Raises `OSError`."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([json.dumps(message).encode()], rights)


def collect(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors, which are not inherited; None at the end. Raises `OSError`."""
    space = socket.CMSG_SPACE(DESCRIPTORS * 4)
    data, rights, _, _ = sock.recvmsg(PACKET, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return (json.loads(data) if data else None), descriptors.tolist()
