"""Calls a model many times, times each call, and keeps every output until it may be looked at.

No call gets values that another had, and none finds what another left in the model's tensors: what a kernel remembers
of a call is of no use to it in the next.

Runs inside the judge's processes; the same code measures references and candidates. What is to be trusted of torch and
of the clock is taken hold of here, when this module is imported: before any candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from slime_kernelbench.judge.tensors import tensors_of

_clock = time.perf_counter
_Event = torch.cuda.Event
_synchronize = torch.cuda.synchronize
_spin = torch.cuda._sleep
FLUSH_BYTES = 256 << 20
LEAD_CYCLES = 1_000_000
"""For which the device is busy before a timed call, some half a millisecond: what the host takes to enqueue it is over
by then, also where Python and a driver that others use take longer than the kernel."""
KEPT_BYTES = 16 << 30
"""Of outputs, at most; fewer calls are made where they would not fit."""
ROOM_BYTES = 1 << 30
"""That a candidate has ready while others do too; a kernel whose outputs are larger hides what the driver takes."""
LOOKS = 8
"""One of so many timed calls is followed by a look."""
_LARGE_BYTES, _ALIGNED_BYTES = 1 << 20, 512
"""Torch cuts what is larger from whatever large memory is free, to multiples of this."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Stopwatch(Protocol):
    """Times one call, in milliseconds."""

    def by_events(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """By the device's own events, with its caches flushed."""
        ...

    def by_host(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """By the host's clock, up to when the whole device is idle."""
        ...


class CudaStopwatch:
    """The device waits while the host enqueues the call, whose latency is thus not measured; then all streams end."""

    def __init__(self) -> None:
        self._cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def by_events(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """See `Stopwatch`."""
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        _synchronize()
        self._cache.zero_()
        _spin(LEAD_CYCLES)
        begin.record()
        output = call()
        end.record()
        _synchronize()
        return begin.elapsed_time(end), output

    def by_host(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """See `Stopwatch`."""
        self._cache.zero_()
        _synchronize()
        began = _clock()
        output = call()
        _synchronize()
        return 1e3 * (_clock() - began), output


class HostStopwatch:
    """Where there is no device: both by the host's clock. For tests of everything else."""

    def by_events(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """See `Stopwatch`."""
        began = _clock()
        output = call()
        return 1e3 * (_clock() - began), output

    by_host = by_events


def stopwatch(device: str) -> Stopwatch:
    """The one for ``device``, "cuda" or "cpu"."""
    return CudaStopwatch() if device == "cuda" else HostStopwatch()


class Inputs:
    """A model's inputs, always in the same memory, with values that follow from a seed and those of the problem."""

    def __init__(self, base: Sequence[Any], which: Sequence[bool], device: str) -> None:
        """``which`` says for each of ``base``, on the ``device``, whether its values may change."""
        self._base, self._which = list(base), which
        self._symmetric = [_symmetric(value) for value in base]
        self.now, self._then = list(map(_copied, base)), list(map(_copied, base))
        for number, value in enumerate(base):
            if which[number]:  # in every process in the same order, whatever lies in memory how
                self._then[number] = value.clone(memory_format=torch.contiguous_format)
        self._generator, self._same = torch.Generator(device), _Same(self._then)

    def renew(self, seed: int) -> list[Any]:
        """Other values: each element times one factor, and all but symmetric matrices times one more each.

        An answer that is kept from another call can thus not be scaled into this call's.
        """
        scale = 0.4 + seed % (1 << 20) / (1 << 21)
        self._generator.manual_seed(seed)
        for number, chosen in enumerate(self._which):
            if not chosen:
                continue
            value, then = self.now[number], self._then[number]
            if self._symmetric[number]:
                then.fill_(scale)
            else:
                then.uniform_(0.75 * scale, scale, generator=self._generator)
            value.copy_(then.mul_(self._base[number]))
        return self.now

    def changed(self) -> bool:
        """Whether a model wrote to them since."""
        return not all(map(self._same, self.now, self._then))


class State:
    """The tensors that a model has, as they are when this is made; found anywhere in its modules' attributes."""

    def __init__(self, model: Any) -> None:
        self._copies = [(name, tensor, tensor.detach().clone()) for name, tensor in _tensors(model)]
        self._same = _Same([then for _, _, then in self._copies])

    def restore(self) -> list[str]:
        """Names of those with other bits than they had, which they have again afterwards."""
        changed: list[str] = []
        for name, now, then in self._copies:
            if not self._same(now, then):
                now.detach().copy_(then)
                changed.append(name)
        return changed


class _Same:
    """Whether two tensors have the same bits; found out in memory of its own, so that what answers are made in stays
    NaN."""

    def __init__(self, values: Sequence[Any]) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        most = {one.device: max(_bits(two).numel() for two in tensors if two.device == one.device) for one in tensors}
        self._room = [torch.empty(count, dtype=torch.bool, device=device) for device, count in most.items()]

    def __call__(self, now: Any, then: Any) -> bool:
        """Values that are no tensors are taken to be the same."""
        if not isinstance(now, torch.Tensor):
            return True
        one, two = _bits(now), _bits(then)
        room = next(room for room in self._room if room.device == one.device)[: one.numel()]
        return bool(torch.eq(one, two, out=room).all())


class Meter:
    """Measures one model on inputs that are new to it in every call."""

    def __init__(self, model: Callable[..., Any], inputs: Inputs, watch: Stopwatch) -> None:
        self._model, self._inputs, self._watch = model, inputs, watch
        self.outputs: list[Any] = []  # of every timed call: those by events, then those by the host
        self.changed: set[str] = set()  # tensors of the model that a timed call wrote to
        self.mutated = False  # an input was written to

    def make_room(self, answer: Any, calls: int) -> None:
        """Take memory for so many answers like this one, and let it go filled with NaN (a float of ones alone is one).

        A timed call finds it with torch: asking the driver takes longer than a kernel, and every answer is kept. All
        answers' large tensors are asked for at once, since processes that start wait for each other at the driver.
        """
        count, room = min(calls, _fitting(answer, ROOM_BYTES)), []
        for tensor in tensors_of(answer):
            if (size := _bytes(tensor)) > _LARGE_BYTES:
                size += -size % _ALIGNED_BYTES
                room.append(torch.full((count * size,), 0xFF, dtype=torch.uint8, device=tensor.device))
            else:
                room += [torch.empty_like(tensor) for _ in range(count)]
        for tensor in room:
            _spoil(tensor)

    def measure(
        self, order: Sequence[int], host_order: Sequence[int], warm: int, look: Callable[[], Any] = tuple
    ) -> dict[str, list[float]]:
        """Times of calls on the inputs of the seeds in both orders, after ``warm`` ones; all outputs are kept.

        After some of them, as secret as their seeds, ``look`` calls the model once more and gives its answer.
        The two orders' calls are spread among each other: what slows the machine for a while slows both.
        Memory that outputs are likely to be made in holds NaN before a timed call.
        """
        first = [self._model(*self._inputs.now) for _ in range(max(warm, 1))]
        most = max(_fitting(first[0], KEPT_BYTES), 6)
        for tensor in (tensor for output in first for tensor in tensors_of(output)):
            _spoil(tensor)
        del first
        self.mutated = self._inputs.changed()
        clocks = {"events": (self._watch.by_events, order[:most]), "host": (self._watch.by_host, host_order[:most])}
        calls = [
            ((place + 0.5) / len(seeds), name, seed)
            for name, (_, seeds) in clocks.items()
            for place, seed in enumerate(seeds)
        ]
        times: dict[str, list[float]] = {name: [] for name in clocks}
        outputs: dict[str, list[Any]] = {name: [] for name in clocks}
        state = State(self._model)
        for _, name, seed in sorted(calls, key=lambda one: one[0]):
            duration, output = clocks[name][0](partial(self._model, *self._inputs.renew(seed)))
            times[name].append(duration)
            outputs[name].append(output)
            for tensor in tensors_of(look()) if seed % LOOKS == 0 else ():
                _spoil(tensor)
            self.mutated |= self._inputs.changed()
            self.changed.update(state.restore())
        self.outputs = [*outputs["events"], *outputs["host"]]
        return times


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that its modules have in their attributes, with names."""
    for prefix, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name != "_modules"}
        attributes |= attributes.pop("_parameters", {}) | attributes.pop("_buffers", {})
        yield from (
            (f"{prefix}.{name}".lstrip("."), one) for name, value in attributes.items() for one in tensors_of(value)
        )


def _fitting(answer: Any, size: int) -> int:
    """How many answers like this one ``size`` bytes hold."""
    return size // max(sum(map(_bytes, tensors_of(answer))), 1)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, which NaN is equal to itself as."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _symmetric(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1 and torch.equal(value, value.mT)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
