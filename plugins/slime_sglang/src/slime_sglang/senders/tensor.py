"""CUDA IPC: tensors in a staging buffer of this process, which SGLang's ranks on the same machine read and copy.

    float32 masters --cast kernels--> Staging (one buffer, kept) == handle ==> SGLang: views of it -> load_weights
                                         `--broadcast--> copies on other ranks, for servers on their GPUs

What SGLang takes is a pickle, read by an unpickler of its own that allows listed names only. That is SGLang's format
and not ours: the bytes are written here, opcode by opcode, with no pickle module and without importing SGLang, whose
classes are references by name. Nothing here, nor anywhere in slime, reads a pickle.

The handle stays the same from one update to the next, so it is made once. Its counter of readers and its event are
therefore of the first update; neither is needed: the buffer is let go of only when no update is under way, and `fill`
returns when the bytes are there. On a CPU the same bytes lie in shared memory, which is how this is tested.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_core.errors import TrainerError
from slime_core.weights.transports.buckets import Bucket, Staging, Stream, Tally, lay_out

if TYPE_CHECKING:
    from slime_core.types import WeightRoute
    from slime_core.weights.transports.buckets import TensorPart

REDUCTIONS = "torch.multiprocessing.reductions"
METADATA = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"
REBUILD = "sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"
READERS = 64  # more than the ranks that read one update: on a CPU each takes one off the memory's count of users
DEVICE = 6  # place of the device in rebuild_cuda_tensor's arguments


class TensorSender:
    """Casts weights into a buffer and tells where it lies; the buffer is made at the first update.

    Example:
        handle = TensorSender(device).send(parts, stream(sources), 4, route, tally)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: Staging | None = None
        self._laid: tuple[object, ...] = ()  # what the buckets are of
        self._buckets: list[dict[str, Any]] = []  # of each bucket, the same at every update
        self._names: list[str] = []  # of shared memory, on a CPU
        self._spread: tuple[tuple[int, ...], Any] = (), None  # ranks with a copy, and their group
        self._everyone: list[Any] = []  # what each rank has told, while the buffers stay

    def send(
        self, parts: list[TensorPart], tensors: Stream, version: int, route: WeightRoute, tally: Tally
    ) -> dict[str, Any]:
        """``{"buckets": [{"names", "dtypes", "shapes", "handle"}]}``.

        Raises:
            TrainerError: TRN96 the memory does not hold the buffer.
        """
        staging = self._lay(parts, route)
        staging.fill(tensors)
        self._lend()
        tally.add_all(staging.views)
        return {"buckets": list(self._buckets)}

    def spread(self, parts: list[TensorPart], route: WeightRoute, rank: int) -> dict[str, list[dict[str, Any]]]:
        """Copy rank 0's buffer to the ranks of ``route.copies``; their buckets by rank. A collective of all ranks.

        Raises:
            TrainerError: TRN96 a rank's memory does not hold the buffer.
        """
        ranks = (0, *route.copies)
        if ranks != self._spread[0]:
            every = len(ranks) == dist.get_world_size()
            self._spread = ranks, dist.group.WORLD if every else dist.new_group(list(ranks))
            self._everyone = []
        if rank not in ranks:
            if self._laid != (laid := _laid(parts, route)):
                self._laid, self._everyone = laid, []  # as on the ranks with a buffer, so that all tell or none
        else:
            for flat in self._lay(parts, route).flats:
                dist.broadcast(flat, 0, group=self._spread[1])
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if rank:
                self._lend()
        if not self._everyone:
            self._everyone = [None] * dist.get_world_size()
            dist.all_gather_object(self._everyone, self._buckets)
        return {str(number): self._everyone[number] for number in route.copies}

    def _lay(self, parts: list[TensorPart], route: WeightRoute) -> Staging:
        """The buffer of these parts; laying it out is a few milliseconds that a next update need not wait."""
        laid = _laid(parts, route)
        if self._staging is None or self._laid != laid:
            self.drop()
            buckets = lay_out(parts, route.dtype)  # one: all of it is in memory anyway, and each costs SGLang a call
            self._staging, self._laid = Staging(buckets, self._allocate), laid
            pairs = zip(buckets, self._staging.flats, strict=True)
            self._buckets = [bucket.described() | {"handle": payload(bucket, flat)} for bucket, flat in pairs]
        return self._staging

    def _lend(self) -> None:
        """On a CPU, count the readers that each take one off the users of shared memory."""
        if self._names and self._staging is not None:
            for flat in self._staging.flats:
                for _ in range(READERS):
                    flat.untyped_storage()._shared_incref()

    def drop(self) -> None:
        """Give the buffer's memory back; no update may be under way."""
        self._staging, self._buckets, self._everyone = None, [], []
        for name in self._names:
            Path(f"/dev/shm{name}").unlink(missing_ok=True)
        self._names = []
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            storage = torch.UntypedStorage._new_using_filename_cpu(size)
            self._names.append(storage._share_filename_cpu_()[1].decode())
            return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise TrainerError(
                f"the GPU has no room for {size >> 20} MiB of weights on their way to the engine",
                code="TRN96",
                where=str(self._device),
                why=str(error).split(". ")[0],
                fix="give the engine less memory (sglang.mem_fraction_static), or set "
                "rollout.update_weight_transport=disk",
            ) from error


def _laid(parts: Sequence[TensorPart], route: WeightRoute) -> tuple[object, ...]:
    """What a buffer is of: as long as it stays the same, so does the buffer."""
    return (route.dtype, *((part.name, part.shape) for part in parts))


def uuid(device: torch.device | int) -> str:
    """By which processes that number GPUs differently name one of them."""
    return str(torch.cuda.get_device_properties(device).uuid)


def payload(bucket: Bucket, flat: torch.Tensor) -> str:
    """What SGLang's load format ``flattened_bucket`` wants of one bucket, in base64."""
    rows = [
        Made(
            *METADATA,
            {
                "name": slot.name,
                "shape": torch.Size(slot.shape),
                "dtype": slot.dtype,
                "start_idx": slot.begin,
                "end_idx": slot.end,
                "numel": slot.end - slot.begin,
            },
        )
        for slot in bucket.slots
    ]
    return base64.b64encode(dumped({"flattened_tensor": shared(flat), "metadata": rows})).decode()


def shared(flat: torch.Tensor) -> Call:
    """The call that gives a tensor over the same memory to another process."""
    if flat.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(flat)
        arguments = (*arguments[:DEVICE], uuid(flat.device), *arguments[DEVICE + 1 :])
        return Call(*REBUILD, arguments)
    untyped = flat.untyped_storage()
    manager, name, size = untyped._share_filename_cpu_()
    storage = Call(REDUCTIONS, "rebuild_storage_filename", (torch.UntypedStorage, manager, name, size))
    typed = Call(REDUCTIONS, "rebuild_typed_storage", (storage, flat.dtype))
    place = flat.storage_offset(), flat.size(), flat.stride(), False
    return Call(REDUCTIONS, "rebuild_tensor", (torch.Tensor, typed, place))


class Call:
    """``module.name(*arguments)`` at the reader."""

    def __init__(self, module: str, name: str, arguments: tuple[Any, ...]) -> None:
        self.module, self.name, self.arguments = module, name, arguments


class Made:
    """An object of the reader's class ``module.name`` with these attributes."""

    def __init__(self, module: str, name: str, attributes: Mapping[str, Any]) -> None:
        self.module, self.name, self.attributes = module, name, dict(attributes)


def dumped(value: Any) -> bytes:
    """A value in the protocol 4 of Python's pickles, as bytes that need no module of the names they mention.

    Raises:
        TypeError: a type that these bytes never need.
    """
    return b"\x80\x04" + _written(value) + b"."


def _written(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, (bytes, bytearray)):
        return b"B" + struct.pack("<I", len(value)) + bytes(value)
    if isinstance(value, torch.Size):
        return _called("torch", "Size", (tuple(value),))
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_written, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_written, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_written(key) + _written(item) for key, item in value.items()) + b"u"
    if isinstance(value, torch.dtype):
        return _named("torch", str(value).removeprefix("torch."))
    if isinstance(value, type):
        return _named(value.__module__, value.__qualname__)
    if isinstance(value, Call):
        return _called(value.module, value.name, value.arguments)
    if isinstance(value, Made):
        return _named(value.module, value.name) + b")\x81" + _written(value.attributes) + b"b"
    raise TypeError(f"a {type(value).__name__} is not part of a weight update")


def _named(module: str, name: str) -> bytes:
    return _written(module) + _written(name) + b"\x93"


def _called(module: str, name: str, arguments: tuple[Any, ...]) -> bytes:
    return _named(module, name) + _written(arguments) + b"R"
