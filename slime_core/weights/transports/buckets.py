"""Flat buckets of a trainer's tensors in the engine's dtype, and the checksums of exactly those bytes.

Router biases stay float32, as engines hold them: near 8 bfloat16 has steps of 0.06, and a bias moves by 0.001.

    Source (gathers one tensor) -> Parts (names that SGLang loads) -> Slots of Buckets -> Staging (kept for the next)

A source may be several parts: the stacked experts of a layer are one tensor in the trainer and many in a model folder;
a weight in fp8 is its scales and its numbers (`transports.quantised`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slime_core.errors import TrainerError
from slime_core.weights.fp8 import SCALE
from slime_core.weights.hashing import layout_name

if TYPE_CHECKING:
    from slime_core.types import RankTensor, WeightRoute
    from slime_core.weights.fp8 import BlockFormat
    from slime_core.weights.hashing import Checksums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTER_BIAS = "e_score_correction_bias"
"""The last part of the names of tensors that keep float32 in any engine."""
FUSED = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")
"""SGLang joins a layer's two tensors, and fills its own only where one request has both."""
AT_ONCE = 256 << 20  # bytes of gathered tensors that wait for one cast


@dataclass(slots=True, frozen=True)
class TensorPart:
    """One tensor as engines know it: a name of the model folder, and where it lies in the tensor it is a part of."""

    name: str
    shape: tuple[int, ...]
    cut: Callable[[torch.Tensor], torch.Tensor]  # a view of the whole tensor; what is quantised of it
    dtype: torch.dtype | None = None  # of what is sent; None is the engine's


def one_part(name: str, shape: Sequence[int]) -> tuple[TensorPart]:
    """Of a tensor that is one in the trainer and in a model folder."""
    return (TensorPart(name, tuple(shape), _whole),)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(slots=True, frozen=True)
class TensorSource:
    """One tensor of the trainer. ``gather`` gives it whole; it is a collective where ranks share the tensor."""

    parts: tuple[TensorPart, ...]
    gather: Callable[[], torch.Tensor]


Stream = Iterator[tuple[tuple[TensorPart, ...], torch.Tensor]]
"""Whole tensors one after another, with the parts that each of them is."""


def stream(sources: Iterable[TensorSource]) -> Stream:
    """Gather one source after another; every rank must go through all of it."""
    for source in sources:
        yield source.parts, source.gather()


@dataclass(slots=True, frozen=True)
class Slot:
    """Where one part lies: bytes ``begin`` to ``end`` of its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, frozen=True)
class Bucket:
    """Parts end to end without gaps: all of them have one dtype."""

    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.slots[-1].end

    def described(self) -> dict[str, list[object]]:
        """``names``, ``dtypes`` and ``shapes``, as SGLang's requests have them."""
        return {
            "names": [slot.name for slot in self.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in self.slots],
            "shapes": [list(slot.shape) for slot in self.slots],
        }


def lay_out(parts: Iterable[TensorPart], dtype: str, most: int = 0) -> tuple[Bucket, ...]:
    """Buckets of at most ``most`` bytes (a larger tensor has one of its own); 0: one bucket of a dtype.

    Tensors that SGLang fuses stand side by side in one bucket.

    Raises:
        TrainerError: a dtype that engines are not given, or a name that comes twice.
    """
    if dtype not in DTYPES:
        raise TrainerError(f"weights are sent as {' or '.join(DTYPES)}, not as {dtype}", where="WeightRoute.dtype")
    by_dtype: dict[torch.dtype, list[TensorPart]] = {}
    names = set[str]()
    for part in parts:
        if part.name in names:
            raise TrainerError(f"the tensor {part.name} would be sent twice", why="two tensors have its name")
        names.add(part.name)
        kind = torch.float32 if part.name.endswith(ROUTER_BIAS) else DTYPES[dtype]
        by_dtype.setdefault(part.dtype or kind, []).append(part)
    return tuple(bucket for kind, alike in by_dtype.items() for bucket in _buckets(alike, kind, most))


def _buckets(parts: Sequence[TensorPart], kind: torch.dtype, most: int) -> list[Bucket]:
    groups: dict[str, list[tuple[TensorPart, int]]] = {}  # parts and bytes of what stays together
    for part in parts:
        size = torch.Size(part.shape).numel() * kind.itemsize
        groups.setdefault(FUSED.sub(".fused.", part.name), []).append((part, size))
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    place = 0
    for group in groups.values():
        if slots and most and place + sum(size for _, size in group) > most:
            buckets.append(Bucket(tuple(slots)))
            slots, place = [], 0
        for part, size in group:
            slots.append(Slot(part.name, kind, tuple(part.shape), place, place + size))
            place += size
    return [*buckets, Bucket(tuple(slots))] if slots else buckets


class Staging:
    """Flat memory that one update after another is cast into; its addresses stay, and so do handles to it.

    Example:
        staging = Staging(buckets, lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
        staging.fill(stream(sources))
    """

    def __init__(self, buckets: Sequence[Bucket], allocate: Callable[[int], torch.Tensor]) -> None:
        self.buckets = tuple(buckets)
        self.flats = [allocate(bucket.size) for bucket in buckets]
        self.views: dict[str, torch.Tensor] = {
            slot.name: flat[slot.begin : slot.end].view(slot.dtype).view(slot.shape)
            for bucket, flat in zip(buckets, self.flats, strict=True)
            for slot in bucket.slots
        }

    @torch.no_grad()
    def fill(self, tensors: Stream) -> None:
        """Cast every part into its place; returns when all bytes are there, on a GPU too."""
        into: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        waiting = 0
        device = self.flats[0].device if self.flats else torch.device("cpu")
        for parts, whole in tensors:
            for part in parts:
                view, tensor = self.views[part.name], part.cut(whole)
                if part.dtype is torch.float8_e4m3fn:
                    view, tensor = view.view(torch.uint8), tensor.view(torch.uint8)
                into.append(view)
                out.append(tensor if tensor.device == device else tensor.to(view.dtype))
                waiting += tensor.numel() * tensor.element_size()
            if waiting > AT_ONCE:
                _cast(into, out)
                waiting = 0
        _cast(into, out)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


def _cast(into: list[torch.Tensor], out: list[torch.Tensor]) -> None:
    """A few kernels for many tensors; empties both lists."""
    if into:
        torch._foreach_copy_(into, out, non_blocking=True)
        into.clear()
        out.clear()


class Tally:
    """Checksums of sent tensors, as an engine will hold them; a tensor is released once no check waits for it.

    Of a weight in fp8 SGLang takes those of its values, so what was sent of it is dequantised.

    Example:
        tally = Tally(route, Sums)
        tally.add("model.norm.weight", sent)
        update.fingerprints = tally.finish()
    """

    def __init__(
        self, route: WeightRoute, sums: Callable[[torch.dtype], Checksums], block_format: BlockFormat | None = None
    ) -> None:
        self._checks: dict[str, list[RankTensor]] = {}  # tensor -> checks that wait for it or for its siblings
        self._missing = {check.key: _names(check) for check in route.checks}
        for check in route.checks:
            for name in self._missing[check.key]:
                self._checks.setdefault(name, []).append(check)
        self._sources: dict[str, torch.Tensor] = {}
        self._dtype = DTYPES[route.dtype]
        self._sums = sums(self._dtype)
        self._block_format, self._scales = block_format, dict[str, torch.Tensor]()  # by the weight's name

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The bytes of ``name`` that were sent; they must not change until the checks that need them are done.

        Scales come before the numbers that they belong to.
        """
        name = layout_name(name)
        weight = name.removesuffix(SCALE)
        if weight not in self._checks:
            return
        if weight != name:
            self._scales[weight] = tensor
            return
        if self._block_format is not None and tensor.dtype == torch.float8_e4m3fn:
            tensor = self._block_format.dequantise(tensor, self._scales.pop(name), self._dtype)
        self._sources[name] = tensor
        ready = []
        for check in self._checks[name]:
            missing = self._missing[check.key]
            missing.discard(name)
            if not missing:
                ready.append(check)
        self._sums.add(self._sources, ready)
        for check in ready:
            del self._missing[check.key]
            for used in _names(check):
                self._checks[used].remove(check)
                if not self._checks[used]:
                    del self._sources[used], self._checks[used]

    def add_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Every tensor of a staging."""
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def finish(self) -> dict[str, str]:
        """Checksum by `types.RankTensor.key`.

        Raises:
            TrainerError: a check waits for a tensor that was not sent.
        """
        for key, missing in self._missing.items():
            raise TrainerError(
                f"{min(missing)} was not sent, and the engine's {key} is made of it",
                where="WeightRoute.checks",
                why="the trainer's model and the engine's are not the same",
            )
        return self._sums.finish()


class Sender(Protocol):
    """One transport at rank 0."""

    def send(
        self, parts: list[TensorPart], tensors: Stream, version: int, route: WeightRoute, tally: Tally
    ) -> dict[str, Any]:
        """The update's handle; ``tally`` counts the bytes sent."""
        ...

    def drop(self) -> None:
        """Give memory back."""
        ...


def _names(check: RankTensor) -> set[str]:
    """Tensors of which it is made; pieces without a name are zeros."""
    return {piece.name for piece in check.pieces if piece.name}
