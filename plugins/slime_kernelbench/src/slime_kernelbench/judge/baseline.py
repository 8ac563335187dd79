"""The reference's process on a GPU: inputs of a problem's own sizes, what is expected of them, the reference's speed.

Eager and under `torch.compile`, measured live by the same code as candidates, in a process that no candidate enters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from slime_kernelbench.judge import shrink
from slime_kernelbench.judge.meter import Inputs, Meter, stopwatch
from slime_kernelbench.judge.reference import DrawnProblem, Unusable
from slime_kernelbench.judge.tensors import to_wire
from slime_kernelbench.judge.wire import Tree, pack, unpack
from slime_sandbox import CandidateChannel

LARGEST_BYTES = 96 << 20
"""Of all inputs; larger problems are measured at the largest sizes that stay below."""
_CAPS = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)


def main(channel: CandidateChannel) -> None:
    """Answer ``{"source", "seed", "weights_seed", "seeds", "order", "host_order", "warm", "device", "compile"}``.

    Nothing where all is ready and compiled, then, when any message says that the device is free, what was measured.
    """
    try:
        bench = Bench(unpack(channel.receive()))
        channel.send(b"")
        channel.receive()
        answer = bench.measured()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    channel.send(pack(answer))


class Bench:
    """A problem's reference on a device: inputs, what is expected of them, models to be timed. Raises what it does."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request, device = request, request["device"]
        model = _sized(request["source"], request["seed"], request["weights_seed"], device)
        inputs, self._model = model.draw(request["seed"]), model.model
        which = [
            isinstance(one, torch.Tensor) and one.is_floating_point() and one.unique().numel() > 4 for one in inputs
        ]
        on_device = _moved(inputs, device)
        self._inputs = Inputs(on_device, which, device)
        self._inputs.renew(request["seeds"][0])
        self._compiled = _compiled(self._model, self._inputs.now) if request["compile"] else None
        self._result: dict[str, Tree] = {
            "init": model.init,
            "state": model.state,
            "shapes": model.shapes,
            "inputs": to_wire(inputs),
            "which": which,
            "expected": [
                {
                    "computed": to_wire(model.computed(copy.deepcopy(one), torch.float32)),
                    "exact": to_wire(model.computed(copy.deepcopy(one), torch.float64)),
                }
                for one in map(self._inputs.renew, request["seeds"])
            ],
            "bytes": _moved_bytes([self._inputs.now, model.computed(copy.deepcopy(self._inputs.now), torch.float32)]),
            "flops": _flops(self._model, self._inputs.now),
            "name": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        }

    def measured(self) -> Tree:
        """Times, beside all that a candidate's answers are held against."""
        eager = _timed(self._model, self._inputs, self._request)
        return self._result | {"eager": eager, "compiled": self._timed_compiled()}

    def _timed_compiled(self) -> Tree:
        """None where that does not work."""
        if self._compiled is None:
            return None
        try:
            return _timed(self._compiled, self._inputs, self._request)
        except Exception:
            return None


def _sized(source: str, seed: int, weights_seed: int, device: str) -> DrawnProblem:
    reason = ""
    for mapping in _mappings(source):
        drawing = DrawnProblem(shrink.resized(source, mapping), seed, weights_seed)
        if _moved_bytes(drawing.draw(seed)) <= LARGEST_BYTES:
            drawing.model = drawing.model.to(device)
            return drawing
        reason = drawing.shapes
    raise Unusable(f"its inputs are too large: {reason}")


def _mappings(source: str) -> Iterator[dict[int, int]]:
    yield {}
    sizes = shrink.sizes(source)
    yield from ({size: min(size, cap) for size in sizes} for cap in _CAPS)


def _timed(model: Any, inputs: Inputs, request: dict[str, Any]) -> Tree:
    order, host_order, warm = request["order"], request["host_order"], request["warm"]
    meter = Meter(model, inputs, stopwatch(request["device"]))
    with torch.no_grad():
        meter.make_room(model(*inputs.now), len(order) + len(host_order) + warm)
        return dict(meter.measure(order, host_order, warm))


def _compiled(model: Any, inputs: list[Any]) -> Any:
    """The same under `torch.compile`, called once, which takes seconds; None where that does not work."""
    try:
        compiled = torch.compile(copy.deepcopy(model))
        with torch.no_grad():
            compiled(*copy.deepcopy(inputs))
    except Exception:
        return None
    return compiled


def _flops(model: Any, inputs: list[Any]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        copy.deepcopy(model)(*inputs)
    return float(counter.get_total_flops())


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_moved(item, device) for item in value] if isinstance(value, list | tuple) else value


def _moved_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_moved_bytes, items))
