"""Tensors in, files out, in two halves: a copy that training waits for, and the writing behind it.

    stage: device -> host memory, on a stream of its own        write: host memory -> header, bytes, sha256, fsync

On CUDA the host memory is page-locked, made once, and kept: `before_change` puts the wait for the copy in front of
whatever changes parameters or moments next, so that the copy runs beside the passes before it. On a CPU
tensors are written from where they are, and `before_change` copies what is not written yet.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_core import durable
from slime_core.durable import FileMark, storage_error
from slime_core.weights.shards import header

BLOCK = 64 << 20  # bytes of host memory asked for at once: a power of two, which torch's allocator does not round up
PIECE = 16 << 20  # bytes hashed and written at once
IN_FLIGHT = 512 << 20  # bytes of gathered tensors that wait for their copy


@dataclass(slots=True)
class Layout:
    """One file: tensors by name with shape and dtype, and where their bytes begin in host memory."""

    name: str
    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    begin: int = 0

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    def starts(self) -> dict[str, int]:
        """Where each tensor's bytes begin in host memory."""
        found, place = {}, self.begin
        for name, (shape, dtype) in self.tensors.items():
            found[name] = place
            place += shape.numel() * dtype.itemsize
        return found

    def parts(self, read: Callable[[int, int], Iterator[memoryview]]) -> Iterator[bytes | memoryview]:
        """The file; ``read`` gives host memory from one place to another in pieces. Another format is a subclass."""
        yield header((name, dtype, shape) for name, (shape, dtype) in self.tensors.items())
        yield from read(self.begin, self.begin + self.size)


class Staging:
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
        self._layouts: list[Layout] = []
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._copied: torch.cuda.Event | None = None  # until the copy is waited for
        self._in_flight = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[dict[str, FileMark]] | None = None

    def reserve(self, size: int) -> None:
        """Have ``size`` bytes of host memory; page-locking them takes a second a few GB."""
        while self._cuda and len(self._blocks) * BLOCK < size:
            self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True))

    def plan(self, layouts: Sequence[Layout]) -> None:
        """Lay files out one after another, and begin a copy after what the device was told to do before."""
        self._sources.clear()
        self._live, self._reached = True, 0
        self._layouts, place = list(layouts), 0
        for layout in self._layouts:
            layout.begin, place = place, place + layout.size
        self.reserve(place)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._copied = torch.cuda.Event()

    def copy(self, begin: int, tensor: torch.Tensor, *, temporary: bool = False) -> None:
        """Copy a tensor's bytes to host memory at ``begin``; ``temporary`` ones were made to be saved."""
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        if self._stream is None:
            self._sources.append((begin, source))
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
