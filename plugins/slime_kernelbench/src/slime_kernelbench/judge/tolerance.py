"""How far an answer may be from the reference: derived from the reference in float64, by the answer's dtype.

For every element the tolerance is

    rtol(dtype) * max(|reference|, scale) + min(4 * e, cap * scale)

where ``scale`` is the root mean square of the reference over the whole output (in the case itself or, where larger,
in the case of the problem's own inputs), ``e`` the largest error that the reference itself makes when it computes in
the answer's dtype. Since rtol and cap are far below 1 and some element is at least as large as the root mean square,
an answer of zeros, or any constant, is never within it unless the reference is that constant. Integers and booleans
are exact.

Sources: rounding errors of sums grow with the magnitude of what is summed, not of the result, hence the scale (N.
Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); rtol of float32 is a quarter of half precision's
unit roundoff 2^-11 or less, so that computing in float16 or TF32 shows. TF32 cuts the last 13
bits of both factors off: what a product of sums loses is 7e-4 of its value, and deviates by 3e-4 of the scale, so that
the worst of 10^5 elements is at 2e-3 and `TF32_RTOL` some eight deviations away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RTOL = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "complex64": 1e-4,
    "complex128": 1e-9,
}
"""Relative to the larger of an element and the scale. TF32 asks for `TF32_RTOL`, which is an option."""
TF32_RTOL = 3e-3
CAP = 0.01
"""Of the scale: what the reference's own error may add."""


def scale_of(reference: Array) -> float:
    """Root mean square of the finite elements; 0 where there are none."""
    finite = np.abs(reference[np.isfinite(reference)]).astype(np.float64)
    if not finite.size:
        return 0.0
    largest = float(finite.max())
    return largest * float(np.sqrt(np.mean(np.square(finite / largest)))) if largest > 0 else 0.0


def well_conditioned(exact: Array, computed: Array, dtype: str) -> bool:
    """Whether the reference in the answer's own dtype says anything: its error is below the tolerance's cap."""
    if dtype not in RTOL or not exact.size:
        return True
    error = _error(exact, computed)
    return error <= max(CAP, RTOL[dtype]) * scale_of(exact) or error == 0.0


def tolerance(exact: Array, computed: Array, dtype: str, own_scale: float = 0.0, tf32: bool = False) -> Array:
    """The largest allowed |answer - exact| of each element, in float64; zeros for integers and booleans.

    Args:
        exact: The reference in float64.
        computed: The reference in the answer's dtype, as float64.
        dtype: Of the answer, torch's name.
        own_scale: The scale of the same output for the problem's own inputs.
        tf32: Whether matrix products may round their inputs to TF32 in float32.
    """
    if dtype not in RTOL:
        return np.zeros(exact.shape)
    rtol = max(RTOL[dtype], TF32_RTOL) if tf32 and dtype == "float32" else RTOL[dtype]
    scale = max(scale_of(exact), own_scale)
    own_error = min(4 * _error(exact, computed), CAP * scale)
    size = np.abs(exact).astype(np.float64)
    return np.where(np.isfinite(size), rtol * np.maximum(size, scale) + own_error, 0.0)


def _error(exact: Array, computed: Array) -> float:
    finite = np.isfinite(exact) & np.isfinite(computed)
    return float(np.abs(exact[finite] - computed[finite]).max()) if finite.any() else 0.0
