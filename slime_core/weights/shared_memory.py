"""Weights from one process to another on this machine: a block of anonymous memory, a list of what lies where.

    trainer's tensors --copy--> SharedBlock == descriptor (once) ==> MappedBlock --views--> engine copies them
                                    `------- listing (JSON), with each version -------'

The block is a memfd: it has no name in any file system, so nothing of it is left when its processes end, however they
do, and its size does not depend on /dev/shm. The size is sealed, so a reader cannot be cut off; weights that need more
room get a new block. Each tensor is listed with the crc32 of its bytes. One writer: a block is filled again only when
its reader has answered that it has copied.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes: a cache line
CHUNK = 1 << 26
CHECKERS = 4  # threads that checksum: crc32 lets go of the interpreter's lock
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Listing = dict[str, Any]
"""``block``: number of the block, ``size``: bytes of it, ``tensors``: rows of name, dtype, shape, offset, crc32."""


class SharedBlock:
    """The writer's side.

    Example:
        block = SharedBlock()
        listing = block.fill(model.state_dict())
        socket.send_fds(channel, [b"w"], [block.fd])
    """

    def __init__(self) -> None:
        self.fd = -1
        self.number = 0  # counts the blocks that were made
        self._size = 0
        self._map: mmap.mmap | None = None

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Listing:
        """Copy tensors of any device into the block, in their own dtypes; tied ones once.

        Raises:
            EngineError: ENG86, the memory for them is not there.
        """
        import torch

        places, rows, end = _lay_out(tensors)
        if end > self._size:
            self._make(end)
        assert self._map is not None
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        for place, tensor in places.values():
            _view(whole, place, tensor.dtype, tensor.shape).copy_(tensor.detach())
        sums = _checksums(memoryview(self._map), [(place, _nbytes(tensor)) for place, tensor in places.values()])
        at = {place: crc for (place, _), crc in zip(places.values(), sums, strict=True)}
        return {"block": self.number, "size": self._size, "tensors": [[*row, at[row[-1]]] for row in rows]}

    @property
    def memory(self) -> memoryview:
        """The block's bytes, for a reader that has no shared memory with us (:func:`tensors_in`)."""
        assert self._map is not None, "nothing was filled in"
        return memoryview(self._map)

    def close(self) -> None:
        """Give up the block; readers keep what they have mapped."""
        self._map = None  # unmapped when no view is left
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._size = -1, 0

    def _make(self, size: int) -> None:
        self.close()
        self.fd = os.memfd_create("slime-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)  # now, rather than a SIGBUS later
        except OSError as error:
            self.close()
            raise EngineError(
                f"no {size / 2**20:.0f} MiB of shared memory for the weights",
                code="ENG86",
                why=str(error),
                fix="free memory, or train on-policy in one process: --max-staleness 0",
            ) from error
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._map = mmap.mmap(self.fd, size)
        self._size, self.number = size, self.number + 1


class MappedBlock:
    """The reader's side of a block whose descriptor has arrived; the descriptor is closed here."""

    def __init__(self, fd: int, listing: Listing) -> None:
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < listing["size"]:
                raise EngineError("a block of weights arrived that is not whole", code="ENG86")
            self._map = mmap.mmap(fd, listing["size"])
        finally:
            os.close(fd)
        self.number: int = listing["block"]

    def tensors(self, listing: Listing) -> dict[str, torch.Tensor]:
        """Views of the block by name; to be copied before the writer is answered.

        Raises:
            EngineError: ENG83, bytes that are not those that were listed (named).
        """
        return tensors_in(self._map, listing)


def tensors_in(memory: Any, listing: Listing) -> dict[str, torch.Tensor]:
    """Views of a block's bytes (a writable buffer) by name.

    Raises:
        EngineError: ENG83, bytes that are not those that were listed (named).
    """
    import torch

    whole = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = {
        name: _view(whole, place, getattr(torch, dtype), shape) for name, dtype, shape, place, _ in listing["tensors"]
    }
    spans = {place: _nbytes(tensors[name]) for name, _, _, place, _ in listing["tensors"]}
    sums = dict(zip(spans, _checksums(memoryview(memory), list(spans.items())), strict=True))
    wrong = [name for name, _, _, place, crc in listing["tensors"] if sums[place] != crc]
    if wrong:
        raise EngineError(
            f"{len(wrong)} tensors arrived with other bytes than the trainer's: {', '.join(wrong[:5])}",
            code="ENG83",
            why="weights did not reach the sampler whole",
        )
    return tensors


def checksums(listing: Listing, dtype: str) -> dict[str, str]:
    """Checksum of each listed tensor by name, for those of one dtype (``float32``)."""
    return {name: crc for name, kind, _, _, crc in listing["tensors"] if kind == dtype}


def _lay_out(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[Any, tuple[int, torch.Tensor]], list[list[Any]], int]:
    """Where each storage goes, the rows of the listing without checksums, and the bytes that are needed."""
    places: dict[Any, tuple[int, torch.Tensor]] = {}
    rows: list[list[Any]] = []
    end = 0
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = same if tensor.numel() else name
        if key not in places:
            places[key] = (end, tensor)
            end += -(-max(_nbytes(tensor), 1) // ALIGNMENT) * ALIGNMENT
        rows.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), places[key][0]])
    return places, rows, max(end, ALIGNMENT)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(whole: torch.Tensor, place: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    import torch

    count = torch.Size(shape).numel() * dtype.itemsize
    return whole[place : place + count].view(dtype).view(tuple(shape)) if count else torch.empty(shape, dtype=dtype)


def _checksums(memory: memoryview, spans: Sequence[tuple[int, int]]) -> list[str]:
    """crc32 of the bytes of each (begin, length), in hex."""
    with ThreadPoolExecutor(CHECKERS) as pool:
        return list(pool.map(lambda span: _checksum(memory, *span), spans))


def _checksum(memory: memoryview, begin: int, length: int) -> str:
    value = 0
    for at in range(begin, begin + length, CHUNK):
        value = zlib.crc32(memory[at : min(at + CHUNK, begin + length)], value)
    return f"{value:08x}"
