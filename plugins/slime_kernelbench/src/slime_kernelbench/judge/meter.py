"""Calls a model many times on rotating inputs, times each call, and keeps every output until it may be looked at.

Runs inside the judge's processes; the same code measures references and candidates. What is to be trusted of torch and
of the clock is taken hold of here, when this module is imported: before any candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
_LARGE_BYTES, _ALIGNED_BYTES = 1 << 20, 512
"""Torch cuts what is larger from whatever large memory is free, to multiples of this."""


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
        made = call()
        end.record()
        _synchronize()
        return begin.elapsed_time(end), made

    def by_host(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """See `Stopwatch`."""
        self._cache.zero_()
        _synchronize()
        began = _clock()
        made = call()
        _synchronize()
        return 1e3 * (_clock() - began), made


class HostStopwatch:
    """Where there is no device: both by the host's clock. For tests of everything else."""

    def by_events(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """See `Stopwatch`."""
        began = _clock()
        made = call()
        return 1e3 * (_clock() - began), made

    by_host = by_events


def stopwatch(device: str) -> Stopwatch:
    """The one for ``device``, "cuda" or "cpu"."""
    return CudaStopwatch() if device == "cuda" else HostStopwatch()


def scaled(inputs: Sequence[Any], which: Sequence[bool], scale: float) -> list[Any]:
    """New tensors with new values: those that ``which`` names, times ``scale``; every other one copied."""
    return [
        (value * scale if chosen else value.clone()) if isinstance(value, torch.Tensor) else value
        for value, chosen in zip(inputs, which)
    ]


class Meter:
    """Measures one model on rotating sets of inputs."""

    def __init__(self, model: Callable[..., Any], sets: Sequence[list[Any]], watch: Stopwatch) -> None:
        self._model, self._sets, self._watch = model, sets, watch
        self.outputs: list[Any] = []  # of every timed call: those by events, then those by the host

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

    def measure(self, order: Sequence[int], host_order: Sequence[int], warm: int) -> dict[str, list[float]]:
        """Times of calls on the sets that ``order`` names, after ``warm`` ones; both orders' outputs are kept.

        The two orders' calls are spread among each other: what slows the machine for a while slows both.
        Memory that outputs are likely to be made in holds NaN before a timed call.
        """
        first = [self._model(*self._sets[number % len(self._sets)]) for number in range(max(warm, 1))]
        most = max(_fitting(first[0], KEPT_BYTES), 6)
        for tensor in (tensor for made in first for tensor in tensors_of(made)):
            _spoil(tensor)
        del first
        clocks = {"events": (self._watch.by_events, order[:most]), "host": (self._watch.by_host, host_order[:most])}
        calls = [
            ((place + 0.5) / len(numbers), name, number)
            for name, (_, numbers) in clocks.items()
            for place, number in enumerate(numbers)
        ]
        times: dict[str, list[float]] = {name: [] for name in clocks}
        outputs: dict[str, list[Any]] = {name: [] for name in clocks}
        for _, name, number in sorted(calls, key=lambda one: one[0]):
            taken, made = clocks[name][0](partial(self._model, *self._sets[number]))
            times[name].append(taken)
            outputs[name].append(made)
        self.outputs = [*outputs["events"], *outputs["host"]]
        return times


def _fitting(answer: Any, size: int) -> int:
    """How many answers like this one ``size`` bytes hold."""
    return size // max(sum(map(_bytes, tensors_of(answer))), 1)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
