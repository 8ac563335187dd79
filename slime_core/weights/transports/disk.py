"""A safetensors folder a version: written beside its name, published by one rename, read by servers that see it.

    gather -> cast -> (GPU: locked host memory) -> pieces written by threads, while the next tensor is gathered
    FOLDER/.v-VERSION.tmp/model-00001-of-00002.safetensors ... model.safetensors.index.json config.json
    rename -> FOLDER/v-VERSION        (v-VERSION.2 where a version is published again, for a server that came back)

Nothing here is synced to the device: a folder is of use only to the servers of this run and only until the next, and
what an earlier process left is removed before the first write, so no reader ever meets a torn folder. Closing every
file before the rename is what a shared file system needs for another machine to see whole files, and what makes
it tell of a full disk. The two newest folders are kept: servers may still read the one before.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.durable import storage_error
from slime_core.weights.shards import INDEX, file_names, header
from slime_core.weights.transports.buckets import Bucket, Slot, Stream, Tally, TensorPart, lay_out

if TYPE_CHECKING:
    from slime_core.types import WeightRoute

SHARD = 4 << 30  # bytes of tensors in one file
PIECE = 32 << 20  # bytes written at once
WRITERS = 4  # threads: one copies into the page cache at 1 to 3 GB/s, and a write lets go of the interpreter's lock
BUFFERS = 6  # pieces of locked host memory, on a GPU


class DiskSender:
    """Writes folders.

    Example:
        handle = DiskSender(device, config_text).send(parts, stream(sources), 4, route, tally)
    """

    def __init__(self, device: torch.device, texts: Mapping[str, str]) -> None:
        self._device, self._texts = device, dict(texts)  # file name -> content: config.json
        self._published: list[Path] = []  # published by this process, newest last
        self._folder: Path | None = None
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="weights")
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._reserved = False

    def send(
        self, parts: Sequence[TensorPart], tensors: Stream, version: int, route: WeightRoute, tally: Tally
    ) -> dict[str, Any]:
        """``{"folder": absolute path}``.

        Raises:
            StorageError: STO109, STO110, ... the folder cannot be written; nothing of it stays.
        """
        folder = Path(route.folder).absolute()
        aside = folder / f".v-{version}.tmp"
        try:
            self._clear(folder)
            aside.mkdir()
            self._write(aside, parts, tensors, route, tally)
            final = self._name(folder, version)
            aside.rename(final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if hasattr(error, "code"):
                raise
            raise storage_error(error, folder, "the weights cannot be written for the engine") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._published.append(final)
        return {"folder": str(final)}

    def drop(self) -> None:
        """Give locked host memory back; folders stay."""
        self._buffers, self._reserved = queue.SimpleQueue(), False

    def _clear(self, folder: Path) -> None:
        """Leave the newest folder of this process and nothing else, so that with the next there are two."""
        folder.mkdir(parents=True, exist_ok=True)
        if folder != self._folder:
            self._folder, self._published = folder, []
        self._published = self._published[-1:]
        for path in folder.iterdir():
            if path.name.startswith(("v-", ".v-")) and path not in self._published:
                shutil.rmtree(path)

    def _name(self, folder: Path, version: int) -> Path:
        name, count = f"v-{version}", 1
        while (folder / name).exists():
            count += 1
            name = f"v-{version}.{count}"
        return folder / name

    def _write(
        self, aside: Path, parts: Sequence[TensorPart], tensors: Stream, route: WeightRoute, tally: Tally
    ) -> None:
        shards = lay_out(parts, route.dtype, SHARD)
        names = file_names(len(shards))
        files: list[int] = []
        jobs: deque[tuple[int, Future[None]]] = deque()
        try:
            places: dict[str, tuple[int, int, Slot]] = {}
            for name, shard in zip(names, shards, strict=True):
                fd = os.open(aside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                files.append(fd)
                head = header(((slot.name, slot.dtype, slot.shape) for slot in shard.slots), {"format": "pt"})
                _write_all(fd, memoryview(head), 0)
                places |= {slot.name: (fd, len(head), slot) for slot in shard.slots}
            for cut, whole in tensors:
                for part in cut:
                    fd, first, slot = places[part.name]
                    sent = part.cut(whole).detach().to(slot.dtype).contiguous()
                    tally.add(part.name, sent)
                    self._submit(jobs, fd, first + slot.begin, sent)
                    _wait(jobs, route.buffer_bytes)
            _wait(jobs, 0)
        except BaseException:  # nothing may be written into a file that is closed
            for _, job in jobs:
                job.cancel()
                with suppress(BaseException):
                    job.result()
            self.drop()
            raise
        finally:
            for fd in files:
                os.close(fd)
        self._describe(aside, names, shards)

    def _submit(self, jobs: deque[tuple[int, Future[None]]], fd: int, place: int, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat), PIECE):
            piece = flat[begin : begin + PIECE]
            if piece.is_cuda:
                job = self._pool.submit(self._write_copied, fd, place + begin, *self._copied(piece))
            else:
                job = self._pool.submit(_write_all, fd, piece.numpy().data, place + begin)
            jobs.append((len(piece), job))

    def _copied(self, piece: torch.Tensor) -> tuple[torch.Tensor, int, torch.cuda.Event]:
        """A piece on its way to host memory."""
        if not self._reserved:
            self._reserved = True
            for _ in range(BUFFERS):
                self._buffers.put(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True))
        buffer = self._buffers.get()
        buffer[: len(piece)].copy_(piece, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return buffer, len(piece), event

    def _write_copied(self, fd: int, place: int, buffer: torch.Tensor, size: int, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()
            _write_all(fd, buffer[:size].numpy().data, place)
        finally:
            self._buffers.put(buffer)

    def _describe(self, aside: Path, names: Sequence[str], shards: Sequence[Bucket]) -> None:
        texts = dict(self._texts)
        if len(shards) > 1:
            where = {slot.name: name for name, shard in zip(names, shards, strict=True) for slot in shard.slots}
            total = sum(shard.size for shard in shards)
            texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        for name, text in texts.items():
            (aside / name).write_text(text)


def _write_all(fd: int, data: memoryview, place: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, place)
        data, place = data[count:], place + count


def _wait(jobs: deque[tuple[int, Future[None]]], most: int) -> None:
    """Wait until at most ``most`` bytes are in flight. Raises a writer's exception."""
    under_way = sum(size for size, _ in jobs)
    while jobs and under_way > most:
        size, job = jobs.popleft()
        under_way -= size
        job.result()
