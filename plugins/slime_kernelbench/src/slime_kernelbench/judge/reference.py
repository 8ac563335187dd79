"""The reference's process: inputs from a secret seed, and what the reference makes of them.

Runs in a sandbox of its own, since the source comes from a data set, and never beside a candidate. For each style of
sizes (`shrink`) it finds sizes that the reference runs with, draws inputs, changes them into regimes, and computes
every case in the problem's own dtypes and in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from slime_kernelbench.judge import shrink
from slime_kernelbench.judge.bounded import Bounded
from slime_kernelbench.judge.module import executed
from slime_kernelbench.judge.tensors import leaf_of, tensors_of, to_wire
from slime_kernelbench.judge.wire import Tree, leaves_of, pack, unpack
from slime_sandbox import CandidateChannel

BOUNDS = {"even": (1, 2048), "odd": (1, 2048), "long": (2500, 9000)}
"""Elements of the largest input, per style."""
ROOM = 16
"""Times as many where nothing within the bounds does, as with volumes."""
MOST_PARAMETERS = 1 << 18
MOST_ELEMENTS, AXES = 1 << 17, 3
"""Where larger sizes are asked for: of the largest input, and how many sizes are grown each alone."""
WOKEN = frozenset({"odd"})
"""Styles under which weights of one and biases of zero get values: a kernel that leaves them out is found out."""
Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


class Unusable(Exception):
    """These sizes do not do."""


def main(channel: CandidateChannel) -> None:
    """Answer one request, ``{"source", "seed", "weights_seed", "styles"}`` or, for larger sizes, with ``"least"`` in
    the place of styles: with ``{"styles": ...}``, or ``{"error": ...}``."""
    request = unpack(channel.receive())
    torch.set_num_threads(1)
    try:
        identity = request["source"], request["seed"], request["weights_seed"]
        answer = (
            larger(*identity, request["least"]) if "least" in request else examination(*identity, request["styles"])
        )
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    channel.send(pack(answer))


def examination(source: str, seed: int, weights_seed: int, styles: list[str]) -> Tree:
    """All cases of every style that can be had; raises `Unusable` where none can."""
    answer: dict[str, Tree] = {}
    reason = "no style was given"
    for number, style in enumerate(styles):
        try:
            answer[style] = _styled(source, style, seed + 1000 * number, weights_seed)
        except Unusable as error:
            reason = str(error)
    if not answer:
        raise Unusable(reason)
    return {"styles": answer}


def _styled(source: str, style: str, seed: int, weights_seed: int) -> Tree:
    reason = "it has no sizes that could be changed"
    low, high = BOUNDS[style]
    tries = (
        (mapping, most)
        for most in ((high,) if style == "long" else (high, high * ROOM))
        for mapping in _mappings(source, style)
    )
    for mapping, high in tries:
        try:
            text = shrink.resized(source, mapping)
            _weigh(text, high)
            drawing = DrawnProblem(text, seed, weights_seed)
            if not low <= drawing.largest <= high:
                raise Unusable(f"its largest input has {drawing.largest} elements, wanted are {low} to {high}")
            if drawing.parameters > MOST_PARAMETERS:
                raise Unusable(f"it has {drawing.parameters} parameters")
            if style == "long" and 1 in mapping.values() and (drawing.parameters or drawing.rows != {shrink.LONGEST}):
                raise Unusable("with a size of 1 it is not one long row without weights")
            woken = drawing.wake(weights_seed) if style in WOKEN else {}
            drawing.most = 8 * high if style == "long" else None
            cases = list(drawing.cases(seed))
            if not cases:
                raise Unusable("the reference gives NaN, or nothing that float32 can be judged by")
            elements = max((math.prod(leaf.shape) for leaf in leaves_of(cases[0]["computed"])), default=0)
            if elements > 4 * high or (style == "long" and elements > high):
                raise Unusable(f"its largest output has {elements} elements, the most is {high}")
            made_of = {"init": drawing.init, "state": drawing.state, "woken": woken}
            return made_of | {"cases": cases, "shapes": drawing.shapes}
        except Exception as error:
            reason = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
    raise Unusable(reason)


def larger(source: str, seed: int, weights_seed: int, least: int) -> Tree:
    """One case for each way to larger sizes that can be had: with ``least`` elements, and with one size at its own."""
    styles: dict[str, Tree] = {}
    sizes = shrink.sizes(source)
    for axis in range(min(len(sizes), AXES) + 1):
        for mapping in shrink.grown(sizes, axis):
            try:
                text = shrink.resized(source, mapping)
                _weigh(text, MOST_ELEMENTS)
                drawing = DrawnProblem(text, seed + axis, weights_seed)
                if (not axis and drawing.largest < least) or max(drawing.largest, drawing.parameters) > MOST_ELEMENTS:
                    continue
                drawing.most = 4 * MOST_ELEMENTS
                case = next(drawing.cases(seed + axis))
            except Exception:
                continue
            made_of = {"init": drawing.init, "state": drawing.state, "woken": {}}
            if case["regime"] == "normal" and all(drawing.shapes != style["shapes"] for style in styles.values()):
                styles[f"larger {axis}"] = made_of | {"cases": [case], "shapes": drawing.shapes}
            break
    return {"styles": styles}


def _weigh(source: str, most: int) -> None:
    """Raise `Unusable` where it is too large, found out without memory for a single element."""
    try:
        with torch.device("meta"):
            module = executed(source, "<problem>", {"__name__": "problem"})
            elements = [value.numel() for value in module["get_inputs"]() if isinstance(value, torch.Tensor)]
            model = module["Model"](*module["get_init_inputs"]())
    except Exception:  # it needs values to be made: that is found out by making it
        return
    parameters = sum(value.numel() for value in model.parameters())
    if max(elements, default=0) > most:
        raise Unusable(f"its largest input has {max(elements)} elements, the most is {most}")
    if parameters > MOST_PARAMETERS:
        raise Unusable(f"it has {parameters} parameters")


def _mappings(source: str, style: str) -> Iterator[dict[int, int]]:
    sizes = shrink.sizes(source)
    yield from shrink.proposals(sizes, style)
    if style == "even":
        yield {}


class DrawnProblem:
    """A problem with its sizes set: a model, and inputs drawn from a secret seed."""

    def __init__(self, source: str, seed: int, weights_seed: int) -> None:
        self.module = executed(source, "<problem>", {"__name__": "problem"})
        self.model: Any
        self.most: int | None = None  # elements of what the model makes on its way
        torch.manual_seed(weights_seed)
        init = self.module["get_init_inputs"]()
        self.init = to_wire(list(init))
        torch.manual_seed(weights_seed)
        self.model = self.module["Model"](*init)
        self.state = {name: leaf_of(value) for name, value in self.model.state_dict().items()}
        self.parameters = sum(value.numel() for value in self.model.parameters())
        inputs = self.draw(seed)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self.largest = max((value.numel() for value in tensors), default=0)
        self.rows = {value.shape[-1] for value in tensors if value.numel() == self.largest and value.ndim}
        self.shapes = " ".join("x".join(map(str, value.shape)) or "scalar" for value in tensors)

    @torch.no_grad()
    def wake(self, seed: int) -> dict[str, float]:
        """Give parameters and buffers whose elements are all alike values of their own; which, and what they were.

        What is above zero stays so (variances). A candidate gets the same, where its parameters are the reference's.
        """
        generator, woken = torch.Generator().manual_seed(seed), {}
        for name, value in self.model.state_dict().items():
            if not value.is_floating_point() or value.unique().numel() != 1:
                continue
            noise = 0.3 * torch.randn(value.shape, generator=generator).to(value.dtype)
            woken[name] = float(value.flatten()[0])
            value.copy_(value * noise.exp() if woken[name] > 0 else value + noise)
        self.state = {name: leaf_of(value) for name, value in self.model.state_dict().items()}
        return woken

    def draw(self, seed: int) -> list[Any]:
        """The problem's own inputs."""
        torch.manual_seed(seed)
        return list(self.module["get_inputs"]())

    def cases(self, seed: int) -> Iterator[Tree]:
        """Every regime under which the reference is finite and well behaved."""
        generator = torch.Generator().manual_seed(seed + 1)
        for number, (regime, change) in enumerate(REGIMES.items()):
            inputs = self.draw(seed + 2 + number)
            if regime != "normal":
                changed = [_changed(value, change, generator) for value in inputs]
                if not any(new is not old for new, old in zip(changed, inputs)):
                    continue
                inputs = changed
            try:
                computed = self.computed(copy.deepcopy(inputs), torch.float32)
                exact = self.computed(copy.deepcopy(inputs), torch.float64)
            except Exception:
                if regime == "normal":
                    raise
                continue
            if all(map(_finite, [*tensors_of(exact), *tensors_of(computed)])):
                yield {
                    "regime": regime,
                    "inputs": to_wire(inputs),
                    "computed": to_wire(computed),
                    "exact": to_wire(exact),
                }

    def computed(self, inputs: list[Any], dtype: torch.dtype) -> Any:
        """What the reference gives, in the problem's dtypes or, for float64, with every real number in double
        precision."""
        model = copy.deepcopy(self.model)
        before = torch.get_default_dtype()
        if dtype == torch.float64:
            model = model.double()
            inputs = [_doubled(value) for value in inputs]
            torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad(), nullcontext() if self.most is None else Bounded(self.most):
                return model(*inputs)
        finally:
            torch.set_default_dtype(before)


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


# Regimes change what stands where, never what is zero to something else: triangular and masked inputs stay so.


def _changed(value: Any, change: Change, generator: torch.Generator) -> Any:
    """A tensor of real numbers under a regime; labels, masks and other inputs of few values as they are."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return value
    if value.unique().numel() <= 4 or _symmetric(value):
        return value
    return change(value, generator)


def _symmetric(value: torch.Tensor) -> bool:
    return value.ndim == 2 and value.shape[0] == value.shape[1] and torch.equal(value, value.T)


def _signs(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype) * 2 - 1


def _sparse(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return value * (torch.rand(value.shape, generator=generator) < 0.15).to(value.dtype)


def _large(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Large, and in one half so large that the exponential of some is no number of float32."""
    factors, half = torch.full((len(value), *[1] * (value.ndim - 1)), 24.0), (len(value) + 1) // 2
    factors[:half] = max(24.0, 120.0 / max(float(value[:half].max()), 1.0))
    return value * factors.to(value.dtype)


def _extreme(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One in two elements, up to a hundred thousand times as large (a thousand in half precision)."""
    most = 3.0 if value.dtype == torch.float16 else 5.0
    powers = torch.rand(value.shape, generator=generator) * most
    chosen = torch.rand(value.shape, generator=generator) < 0.5
    return value * torch.where(chosen, 10**powers, 1.0).to(value.dtype)


REGIMES: dict[str, Change] = {
    "normal": lambda value, generator: value,
    "again": lambda value, generator: value.clone(),
    "negative": lambda value, generator: -value.abs(),
    "mixed": lambda value, generator: value.abs() * _signs(value, generator),
    "large": _large,
    "small": lambda value, generator: value * 0.03,
    "sparse": _sparse,
    "extreme": _extreme,
}
