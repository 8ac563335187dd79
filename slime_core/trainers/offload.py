"""A rank's state in host memory: offloaded while others use the device, and staged for a save that is written behind.

Offloading: parameters, their shards and buffers of megatron-core's or FSDP2's are views of each other, so no tensor is
moved: its bytes go to page-locked memory of the host, its storage becomes empty, and later both come back. That memory
is kept, and what is offloaded can be read there.

    stage: device -> host memory, on a stream of its own        write: host memory -> header, bytes, sha256, fsync

On CUDA the host memory is page-locked, made once, and kept: `before_change` puts the wait for the copy in front of
whatever changes parameters or moments next, so that the copy runs beside the passes before it. State that lies in host
memory anyway is written from where it is, and `before_change` copies what is not written yet.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_core import durable
from slime_core.durable import FileMark, storage_error
from slime_core.weights.shards import header

KEPT = ("parameters", "optimizer")  # gradients come back as zeros
BLOCK = 64 << 20  # bytes of host memory asked for at once: a power of two, which torch's allocator does not round up
PIECE = 16 << 20  # bytes hashed and written at once
IN_FLIGHT = 512 << 20  # bytes of gathered tensors that wait for their copy


class Offload:
    """Offload ``parameters``, ``optimizer`` or ``gradients`` to the host and load them back; ``tensors`` lists each.

    Example:
        offload = Offload(tensors)
        offload.to_host({"gradients", "optimizer"})
        offload.to_device({"gradients", "optimizer"})
    """

    def __init__(self, tensors: Callable[[str], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._on_host: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[str, list[torch.Tensor]] = {}
        self._host_bytes: dict[int, torch.Tensor] = {}  # bytes of an offloaded storage, by its id

    @property
    def on_host(self) -> set[str]:
        """The names that are offloaded."""
        return set(self._on_host)

    def to_host(self, what: set[str]) -> None:
        """Copy to the host and empty the storages; what is offloaded stays so."""
        for name in sorted(what - self.on_host):
            others = {id_ for other in KEPT if other != name for id_ in self._pointers(other)}
            storages = self._storages(name, others if name == "optimizer" else set())
            if name in KEPT:
                copies = self._room(name, storages)
                for storage, host in zip(storages, copies):
                    host.copy_(_bytes(storage), non_blocking=True)
                    self._host_bytes[storage._cdata] = host
                if storages and storages[0].device.type == "cuda":
                    torch.cuda.synchronize()
            self._on_host[name] = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def to_device(self, what: set[str]) -> None:
        """Fill the storages again."""
        for name in sorted(what & self.on_host):
            for number, (storage, size) in enumerate(self._on_host.pop(name)):
                storage.resize_(size)
                self._host_bytes.pop(storage._cdata, None)
                if name in KEPT:
                    _bytes(storage).copy_(self._host[name][number], non_blocking=True)
                else:
                    _bytes(storage).zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that can be read: itself, or the same view of its bytes on the host if offloaded."""
        host = self._host_bytes.get(tensor.untyped_storage()._cdata)
        if host is None:
            return tensor
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), *place)  # type: ignore[call-overload,no-any-return]

    @contextmanager
    def loaded(self, what: Iterable[str] | None = None) -> Iterator[None]:
        """Load everything, or ``what``, for the block; what was offloaded is again afterwards."""
        absent = self.on_host if what is None else self.on_host & set(what)
        self.to_device(absent)
        try:
            yield
        finally:
            self.to_host(absent)

    def _pointers(self, name: str) -> set[int]:
        return {storage.data_ptr() for storage in self._storages(name, set())}

    def _storages(self, name: str, others: set[int]) -> list[torch.UntypedStorage]:
        """The storages behind a name, each once, without those of ``others`` and those that are empty."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors(name):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in others:
                storages.setdefault(storage.data_ptr(), storage)
        return list(storages.values())

    def _room(self, name: str, storages: list[torch.UntypedStorage]) -> list[torch.Tensor]:
        """Buffers on the host, those of the last time where they fit: pinned memory is slow to get."""
        sizes = [storage.nbytes() for storage in storages]
        if name not in self._host or [host.nbytes for host in self._host[name]] != sizes:
            pinned = bool(storages) and storages[0].device.type == "cuda"
            self._host[name] = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes]
        return self._host[name]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(slots=True)
class FileLayout:
    """One file: tensors by name with shape and dtype, and where their bytes begin in host memory."""

    name: str
    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    begin: int = 0
    metadata: dict[str, str] = field(default_factory=dict)  # in the header

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    def starts(self) -> dict[str, int]:
        """Where each tensor's bytes begin in host memory."""
        starts, place = {}, self.begin
        for name, (shape, dtype) in self.tensors.items():
            starts[name] = place
            place += shape.numel() * dtype.itemsize
        return starts

    def parts(self, read: Callable[[int, int], Iterator[memoryview]]) -> Iterator[bytes | memoryview]:
        """The file; ``read`` gives host memory from one place to another in pieces. Another format is a subclass."""
        yield header(((name, dtype, shape) for name, (shape, dtype) in self.tensors.items()), self.metadata)
        yield from read(self.begin, self.begin + self.size)


class HostStaging:
    """Host memory for one rank's state, and the thread that writes it; one save at a time.

    Example:
        staging.wait()                                   # for the save before
        staging.plan([layout])
        for name, tensor in tensors.items():
            staging.copy(layout.starts()[name], tensor)
        staging.write(path, {"trainer.json": text})
        marks = staging.writing.result()
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._blocks: list[torch.Tensor] = []  # on CUDA
        self._sources: list[tuple[int, torch.Tensor]] = []  # elsewhere: where bytes belong, and the bytes
        self._live = False  # whether sources are the trainer's own tensors
        self._reached = 0  # bytes before it are written
        self._lock = threading.Lock()  # of sources that change
        self._layouts: list[FileLayout] = []
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._copied: torch.cuda.Event | None = None  # until the copy is waited for
        self._in_flight = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[dict[str, FileMark]] | None = None

    def reserve(self, size: int) -> None:
        """Make ``size`` bytes of host memory on the writer's thread; page-locking them takes a second a few GB."""
        self._pool.submit(self._have, size)

    def _have(self, size: int) -> None:
        while self._cuda and len(self._blocks) * BLOCK < size:
            self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True))

    def plan(self, layouts: Sequence[FileLayout]) -> None:
        """Lay files out one after another, and begin a copy after what the device was told to do before."""
        self._sources.clear()
        self._live, self._reached = True, 0
        self._layouts, place = list(layouts), 0
        for layout in self._layouts:
            layout.begin, place = place, place + layout.size
        self._pool.submit(self._have, place).result()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._copied = torch.cuda.Event()

    def copy(self, begin: int, tensor: torch.Tensor, *, temporary: bool = False) -> None:
        """Copy a tensor's bytes to host memory at ``begin``; ``temporary`` ones were made to be saved."""
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        if self._stream is None:
            self._sources.append((begin, source.cpu()))
            return
        temporary = temporary or source.data_ptr() != tensor.data_ptr()
        if temporary:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._move(begin, source)
        if temporary:  # what lives on is not freed before `before_change` was called
            if source.is_cuda:  # state that was released lies in host memory
                source.record_stream(self._stream)
            self._in_flight += len(source)
        if self._in_flight > IN_FLIGHT:
            self._stream.synchronize()
            self._in_flight = 0

    def _move(self, begin: int, source: torch.Tensor) -> None:
        done = 0
        for view in self._views(begin, begin + len(source)):
            view.copy_(source[done : done + len(view)], non_blocking=True)
            done += len(view)

    def _views(self, begin: int, end: int, most: int = BLOCK) -> Iterator[torch.Tensor]:
        if not self._cuda:
            yield from self._pieces(begin, end, most)
            return
        while begin < end:
            block, inside = divmod(begin, BLOCK)
            count = min(BLOCK - inside, end - begin, most)
            yield self._blocks[block][inside : inside + count]
            begin += count

    def _pieces(self, begin: int, end: int, most: int) -> Iterator[torch.Tensor]:
        index = bisect_right(self._sources, begin, key=lambda source: source[0]) - 1
        while begin < end:
            with self._lock:
                self._reached = begin
                place, source = self._sources[index]
                piece = source[begin - place : min(begin - place + most, end - place)].clone()
            if len(piece):
                yield piece
                begin += len(piece)
            else:
                index += 1

    def write(self, path: Path, texts: Mapping[str, bytes | Callable[[], bytes]]) -> None:
        """Write the planned files and ``texts`` into a folder that is there, on the writer's thread.

        A text that takes time is a function, called there.
        """
        if self._stream is not None and self._copied is not None:
            self._copied.record(self._stream)
        self._sources.sort(key=lambda source: source[0])
        self._writing = self._pool.submit(self._write, path, dict(texts), self._copied)

    def _write(self, path: Path, texts: dict[str, Any], copied: torch.cuda.Event | None) -> dict[str, FileMark]:
        if copied is not None:
            copied.synchronize()
        marks: dict[str, FileMark] = {}
        try:
            for layout in self._layouts:
                marks[layout.name] = durable.write_file(path / layout.name, layout.parts(self._read))
            for name, text in texts.items():
                marks[name] = durable.write_file(path / name, [text() if callable(text) else text])
        except OSError as error:
            raise storage_error(error, path, "the trainer's state cannot be written") from error
        finally:
            with self._lock:
                self._sources.clear()
        return marks

    def _read(self, begin: int, end: int) -> Iterator[memoryview]:
        for view in self._views(begin, end, PIECE):
            yield view.numpy().data

    def before_change(self) -> None:
        """Call before parameters, moments or the reference change: the copy comes first, on the device."""
        with self._lock:
            if self._live:
                self._sources = [
                    (place, source.clone() if place + len(source) > self._reached else source)
                    for place, source in self._sources
                ]
                self._live = False
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.exception()

    @property
    def writing(self) -> Future[dict[str, FileMark]]:
        """The last write; its result is the files' marks, its exception a StorageError."""
        if self._writing is None:
            self._writing = Future()
            self._writing.set_result({})
        return self._writing
