"""An answer's bytes against the reference's, in a process that no candidate entered. numpy alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_kernelbench.judge.tolerance import scale_of, tolerance
from slime_kernelbench.judge.wire import Leaf, Tree

Array = NDArray[Any]


@dataclass(slots=True, kw_only=True)
class Expected:
    """The reference's outputs for one case."""

    exact: Tree  # computed in float64
    computed: Tree  # computed in the problem's own dtypes: what an answer must look like
    scales: list[float] = field(default_factory=list)  # of each output, for the problem's own inputs


@dataclass(slots=True, kw_only=True)
class OutputComparison:
    """How one answer compares. ``problem`` is "" where it agrees, else what is wrong, in words without a value of the
    reference."""

    agrees: bool
    kind: str = ""  # "structure", "type", "dtype", "shape", "device", "stride", "nan", "values"
    problem: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    tolerance: float = 0.0
    where: tuple[int, ...] = ()


def array_of(leaf: Leaf) -> Array:
    """A tensor's elements; bfloat16 as float32, 8-bit floats as their bits."""
    if leaf.dtype == "bfloat16":
        bits = np.frombuffer(leaf.data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(leaf.shape)
    dtype = "uint8" if leaf.dtype.startswith("float8") else leaf.dtype
    return np.frombuffer(leaf.data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(leaf.shape)


def compare(answer: Tree, expected: Expected, *, tf32: bool = False, device: str = "cpu") -> OutputComparison:
    """Compare a whole answer, output by output; the first that disagrees is told, the largest difference is of all."""
    pairs: list[tuple[str, Tree, Tree, Tree]] = []
    wrong = _pair("output", answer, expected.exact, expected.computed, pairs)
    if wrong:
        return OutputComparison(agrees=False, kind="structure", problem=wrong)
    worst = OutputComparison(agrees=True)
    for index, (name, output, exact, computed) in enumerate(pairs):
        own_scale = expected.scales[index] if index < len(expected.scales) else 0.0
        comparison = _compare_one(name, output, exact, computed, own_scale, tf32=tf32, device=device)
        if not comparison.agrees:
            return comparison
        if comparison.max_rel >= worst.max_rel:
            worst = comparison
    return worst


def scales_of(exact: Tree) -> list[float]:
    """The scale of each output."""
    pairs: list[tuple[str, Tree, Tree, Tree]] = []
    _pair("output", exact, exact, exact, pairs)
    return [scale_of(np.asarray(numbers_of(one))) for _, one, _, _ in pairs]


def _pair(name: str, output: Tree, exact: Tree, computed: Tree, pairs: list[tuple[str, Tree, Tree, Tree]]) -> str:
    """Walk three trees side by side; what is wrong with the first one's form, or ""."""
    if isinstance(computed, list | tuple):
        if not isinstance(output, list | tuple) or len(output) != len(computed):
            return f"{name} should be {len(computed)} values, not {_described(output)}"
        parts = zip(map(str, range(len(computed))), output, exact, computed)
    elif isinstance(computed, dict):
        if not isinstance(output, dict) or set(output) != set(computed):
            return f"{name} should be a dict with keys {sorted(computed)}, not {_described(output)}"
        parts = ((key, output[key], exact[key], computed[key]) for key in sorted(computed))  # type: ignore[assignment]
    else:
        if isinstance(computed, Leaf) and not isinstance(output, Leaf):
            return f"{name} should be a tensor, not {_described(output)}"
        pairs.append((name, output, exact, computed))
        return ""
    for key, one, two, three in parts:
        wrong = _pair(f"{name}[{key}]", one, two, three, pairs)
        if wrong:
            return wrong
    return ""


def _described(tree: Tree) -> str:
    if isinstance(tree, list | tuple | dict):
        return f"a {type(tree).__name__} of {len(tree)}"
    return "a tensor" if isinstance(tree, Leaf) else f"a {type(tree).__name__}"


def _compare_one(
    name: str, output: Tree, exact: Tree, computed: Tree, own_scale: float, *, tf32: bool, device: str
) -> OutputComparison:
    if not isinstance(computed, Leaf):
        same = type(output) is type(computed) and (output == computed or (output != output and computed != computed))
        return OutputComparison(agrees=same, kind="" if same else "values", problem="" if same else f"{name} differs")
    wrong = _form(name, output, computed, device)
    if wrong:
        return OutputComparison(agrees=False, kind=wrong[0], problem=wrong[1])
    want = np.asarray(numbers_of(exact))
    allowed = tolerance(want, numbers_of(computed), computed.dtype, own_scale, tf32)
    return _values(name, numbers_of(output), want, allowed)


def _form(name: str, output: Leaf, computed: Leaf, device: str) -> tuple[str, str] | None:
    if output.kind != "Tensor":
        return "type", f"{name} is a {output.kind}, not a torch.Tensor"
    if output.dtype != computed.dtype:
        return "dtype", f"{name} has dtype {output.dtype}, not {computed.dtype}"
    if output.shape != computed.shape:
        return "shape", f"{name} has shape {output.shape}, not {computed.shape}"
    if output.device and output.device != device:
        return "device", f"{name} is on {output.device}, not on {device}"
    overlaps = any(step == 0 and size > 1 for step, size in zip(output.stride, output.shape))
    meant = any(step == 0 and size > 1 for step, size in zip(computed.stride, computed.shape))
    if overlaps and not meant:
        return "stride", f"{name} has strides {output.stride}: its elements share memory"
    return None


def numbers_of(tree: Tree) -> Array:
    """A tensor's elements in float64, or as the integers and booleans that they are; complex ones as pairs."""
    array = array_of(tree) if isinstance(tree, Leaf) else np.asarray(tree)
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1).astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _values(name: str, output: Array, want: Array, allowed: Array) -> OutputComparison:
    if not want.size:
        return OutputComparison(agrees=True)
    exact_kind = want.dtype.kind in "biu" or output.dtype.kind in "biu"
    if exact_kind:
        different = output != want
        difference = np.abs(output.astype(np.float64) - want.astype(np.float64))
        bad = different
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.where(output == want, 0.0, np.abs(output - want))
            bad = ~(difference <= allowed)  # NaN is a mismatch
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scaled = np.where(difference == 0, 0.0, difference / np.maximum(allowed, 1e-300))
    at = int(np.nanargmax(np.where(np.isnan(scaled), np.inf, scaled)))
    where = tuple(int(index) for index in np.unravel_index(at, want.shape))
    flat = difference.reshape(-1)
    finding = OutputComparison(
        agrees=not bad.any(),
        max_abs=_finite(flat[at]),
        max_rel=_finite(scaled.reshape(-1)[at]),
        tolerance=_finite(allowed.reshape(-1)[at]),
        where=where,
    )
    if bad.any():
        missing = int((~np.isfinite(output.astype(np.float64)) & np.isfinite(want.astype(np.float64))).sum())
        finding.kind = "nan" if missing else "values"
        finding.problem = _message(name, int(bad.sum()), want.size, missing, finding)
    return finding


def _message(name: str, bad: int, size: int, missing: int, finding: OutputComparison) -> str:
    if missing:
        return f"{name}: {missing} of {size} elements are NaN or infinite, or never written; one at {finding.where}"
    return (
        f"{name}: {bad} of {size} elements differ; the largest difference is {finding.max_abs:.3g} "
        f"at {finding.where}, allowed is {finding.tolerance:.3g}"
    )


def _finite(value: Any) -> float:
    number = float(value)
    return number if np.isfinite(number) else 1e300
